"""Which parameters are gathered by one collective: small ones of one block.

A collective has its latency, whatever it sends, so that small parameters are gathered together, and
large ones by their own: a plan that gathers one again, or frees one, then need not do so with the
rest of its block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

_NUMBERS = itertools.count()


def buckets(model: nn.Module, bucket_bytes: int, dtype: torch.dtype | None) -> dict[int, int]:
    """The id of a parameter → the number of its bucket, which no other call gives.

    The parameters of a block, in their order, go each to the first of its buckets with room for it.

    Args:
        model: before its parameters are sharded.
        bucket_bytes: of the whole parameters of a bucket, at most.
        dtype: what parameters are gathered in; None: their own.
    """
    found: dict[int, int] = {}
    for block in _blocks(model):
        room: dict[int, int] = {}
        for parameter in block:
            if id(parameter) in found or not parameter.dim():
                continue
            size_bytes = parameter.numel() * (dtype or parameter.dtype).itemsize
            fitting = (bucket for bucket, left in room.items() if left >= size_bytes)
            bucket = next(fitting, None)
            if bucket is None:
                bucket = next(_NUMBERS)
                room[bucket] = bucket_bytes
            room[bucket] -= size_bytes
            found[id(parameter)] = bucket
    return found


def _blocks(model: nn.Module, within: bool = False) -> Iterator[list[nn.Parameter]]:
    """The parameters of each block, and those of each module that is in none. A block is a module
    of a list that has modules of its own; blocks within it come first.

    Args:
        model: where they are looked for.
        within: it is in a block.
    """
    is_list = isinstance(model, (nn.ModuleList, nn.Sequential))
    for child in model.children():
        block = is_list and any(True for _ in child.children())
        yield from _blocks(child, within or block)
        if block:
            yield list(child.parameters())
    if not within:
        yield list(model.parameters(recurse=False))
