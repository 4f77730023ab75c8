"""Boolean masks, one bit per element (MONeT §3, output-activated ReLU)."""

from __future__ import annotations

import torch


def packed_bytes(elements: int) -> int:
    """Bytes of a packed mask of so many elements."""
    return -(-elements // 8)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """A boolean tensor as a flat uint8 tensor, in the mask's logical (row-major) order: bit k of
    byte j is element k·n/8 + j, so that packing is eight passes over contiguous memory."""
    count = mask.numel()
    size = packed_bytes(count)
    flat = mask.reshape(-1).view(torch.uint8)
    packed = torch.zeros(size, dtype=torch.uint8, device=mask.device)
    for bit in range(8):
        part = flat[bit * size : (bit + 1) * size]
        if part.numel():
            packed[: part.numel()] |= part << bit
    return packed


def unpack(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The boolean tensor, contiguous, that `pack` was given."""
    count = shape.numel()
    size = packed_bytes(count)
    flat = torch.empty(count, dtype=torch.uint8, device=packed.device)
    for bit in range(8):
        part = flat[bit * size : (bit + 1) * size]
        if part.numel():
            torch.bitwise_and(packed[: part.numel()] >> bit, 1, out=part)
    return flat.view(torch.bool).view(shape)
