"""Boolean masks, one bit per element (MONeT §3, output-activated ReLU)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch


def packed_bytes(elements: int) -> int:
    """Return the bytes of a packed mask of so many elements."""
    return -(-elements // 8)


def pack(mask: torch.Tensor) -> torch.Tensor:
    """Pack a boolean tensor into a flat uint8 tensor, in the mask's logical (row-major) order: bit
    k of byte j is element k·n/8 + j, so that packing is eight passes over contiguous memory."""
    return pack_where(mask, lambda part: part)


def pack_where(values: torch.Tensor, test: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Pack the results of an elementwise test of the values, an eighth of them at a time."""
    flat = values.reshape(-1)
    size = packed_bytes(values.numel())
    packed = torch.zeros(size, dtype=torch.uint8, device=values.device)
    for bit in range(8):
        part = flat[bit * size : (bit + 1) * size]
        if part.numel():
            packed[: part.numel()] |= test(part).view(torch.uint8) << bit
    return packed


def masks(packed: torch.Tensor, count: int) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield (place in the flat tensor, mask) of each eighth of `count` packed elements."""
    size = packed_bytes(count)
    for bit in range(8):
        place = slice(bit * size, min((bit + 1) * size, count))
        if place.start < place.stop:
            found = (packed[: place.stop - place.start] >> bit).bitwise_and_(1)
            yield place, found.view(torch.bool)


def unpack(packed: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the boolean tensor, contiguous, that was packed."""
    flat = torch.empty(shape.numel(), dtype=torch.bool, device=packed.device)
    for place, mask in masks(packed, shape.numel()):
        flat[place] = mask
    return flat.view(shape)
