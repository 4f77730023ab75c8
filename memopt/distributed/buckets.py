"""Buckets of parameters that one collective gathers: small ones of one block.

A collective has a fixed latency, so small parameters are gathered together. Large ones are gathered
alone, so that a plan can gather one again, or free it, without the rest of its block.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import nn

_NUMBERS = itertools.count()


def buckets(model: nn.Module, bucket_bytes: int, dtype: torch.dtype | None) -> dict[int, int]:
    """Map the ids of parameters to the numbers of their buckets; no two calls share a number.

    Each parameter of a block, in order, goes to the first of the block's buckets with room for it.

    Args:
        model: before its parameters are sharded.
        bucket_bytes: at most so many bytes are in a bucket, counted unsharded.
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
    """Yield the parameters of each block, and of each module outside of blocks. A block is a module
    in a list that has modules of its own; blocks inside a block come before it."""
    is_list = isinstance(model, (nn.ModuleList, nn.Sequential))
    for child in model.children():
        block = is_list and any(True for _ in child.children())
        yield from _blocks(child, within or block)
        if block:
            yield list(child.parameters())
    if not within:
        yield list(model.parameters(recurse=False))
