"""How tensors lie in memory: gaps, and strides that say the same."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def is_dense(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """Whether elements have a place each, without gaps."""
    sizes = zip(strides, shape, strict=True)
    room = 1
    for stride, size in sorted(pair for pair in sizes if pair[1] != 1):
        if stride != room:
            return False
        room *= size
    return True


def same_strides(value: torch.Tensor, strides: Iterable[int]) -> bool:
    """Whether a tensor has these strides, where they are more than a name for one element."""
    pairs = zip(value.shape, value.stride(), strides, strict=True)
    return all(size <= 1 or stride == other for size, stride, other in pairs)


def storage_of(value: torch.Tensor) -> int:
    """Names a tensor's storage: tensors that share it have one name."""
    return int(value.untyped_storage()._cdata)


def fills_storage(value: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage, without gaps."""
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.nbytes
