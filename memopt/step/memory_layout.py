"""Compares how tensors lie in memory: gaps, storages, and equivalent strides."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import torch

from memopt.torch_private.tensors import storage_key

_FEW = 1 << 16
"""Most elements whose places are compared one by one."""


def is_dense(shape: Iterable[int], strides: Iterable[int]) -> bool:
    """Return whether each element has its own place, without gaps."""
    sizes = zip(strides, shape, strict=True)
    room = 1
    for stride, size in sorted(pair for pair in sizes if pair[1] != 1):
        if stride != room:
            return False
        room *= size
    return True


def expanded(value: torch.Tensor) -> list[int]:
    """Return the dimensions along which a tensor's elements share memory by a stride of zero."""
    sizes = zip(value.shape, value.stride(), strict=True)
    return [i for i, (size, stride) in enumerate(sizes) if size > 1 and stride == 0]


def shares_elements(value: torch.Tensor) -> bool:
    """Return whether some elements of a tensor share memory, or it has too many elements, with
    unusual strides, to tell."""
    pairs = sorted(
        (stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1
    )
    if not value.numel() or _is_nested(pairs):
        return False
    if value.numel() > _FEW:
        return True
    steps = (range(0, size * stride, stride) if stride else [0] * size for stride, size in pairs)
    places = set(map(sum, itertools.product(*steps)))
    return len(places) < value.numel()


def _is_nested(pairs: Iterable[tuple[int, int]]) -> bool:
    """Return whether in ascending (stride, size) pairs each stride exceeds the span before it."""
    span = 0
    for stride, size in pairs:
        if stride <= span:
            return False
        span += (size - 1) * stride
    return True


def same_strides(value: torch.Tensor, strides: Iterable[int]) -> bool:
    """Return whether a tensor has these strides, apart from dimensions of size 1 or less."""
    pairs = zip(value.shape, value.stride(), strides, strict=True)
    return all(size <= 1 or stride == other for size, stride, other in pairs)


def order_of(value: torch.Tensor) -> tuple[int, ...]:
    """Return a tensor's dimensions, from the largest stride on."""
    strides = value.stride()
    return tuple(sorted(range(value.dim()), key=lambda i: -strides[i]))


def in_order(shape: Sequence[int], order: Iterable[int]) -> tuple[int, ...]:
    """Return the strides of a tensor without gaps whose dimensions lie in this order, that of the
    largest stride first."""
    strides, room = [0] * len(shape), 1
    for i in reversed(tuple(order)):
        strides[i] = room
        room *= max(int(shape[i]), 1)
    return tuple(strides)


def storage_of(value: torch.Tensor) -> int:
    """Return an id of a tensor's storage: tensors that share it have the same."""
    return int(storage_key(value.untyped_storage()))


def fills_storage(value: torch.Tensor) -> bool:
    """Return whether a tensor fills its storage, without gaps."""
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == value.nbytes


def spans_storage(value: torch.Tensor) -> bool:
    """Return whether a tensor begins and ends where its storage does, with or without gaps."""
    steps = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((size - 1) * stride for size, stride in steps)
    return value.storage_offset() == 0 and value.untyped_storage().nbytes() == span * value.itemsize
