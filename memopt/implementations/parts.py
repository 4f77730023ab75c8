"""Kernels that go through a batch in parts, to bound their scratch memory."""

from __future__ import annotations

import torch

PARTS = 8
"""Of a batch, where nothing else is asked for."""


def split(batch: int, parts: int = PARTS) -> list[slice]:
    """At most so many slices of a batch, alike but for the last."""
    step = -(-batch // parts)
    return [slice(i, i + step) for i in range(0, batch, step)]


def part_bytes(value: torch.Tensor, parts: int = PARTS) -> int:
    """The storage of a tensor's largest part, bytes."""
    return -(-value.untyped_storage().nbytes() // parts)
