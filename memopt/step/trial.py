"""Tries whether another way to run a kernel call gives its bits, on data of the same layout.

An `out=` overload, a kernel that works in place, a form written by hand: any of them may lay its
result out differently, compute it in another order, or resize its argument, depending on layouts
and dtypes (ATen's loops over vectors round otherwise than those over single elements). So none is
trusted: both ways run once on stand-in data, and a way that differs in a bit is not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from memopt.step.backend import autocast_off, random_state_kept
from memopt.step.memory_layout import same_strides
from memopt.step.numerics import numeric_settings
from memopt.step.signature import (
    ENDS_PROCESS,
    REFUSALS,
    Answers,
    Arguments,
    Signature,
    StandIns,
    TensorArgument,
    copied,
)
from memopt.torch_private import pytree
from memopt.torch_private.tensors import storage_at

POISON = 0xFF
"""Byte that fills unwritten memory: NaN as a float, −1 as an integer."""

Other = Callable[[Arguments], Any]
"""Function that runs a call another way, with these arguments; it may overwrite them."""

_DRAWN = 2**18 + 3
"""A prime: rows of a tensor are not equal."""
_APART = 104_729
"""How far apart arguments begin in them."""

_known = Answers()


@functools.cache
def _drawn() -> Tensor:
    """Draw `_DRAWN` numbers from a normal distribution of deviation 2."""
    own = torch.Generator("cpu").manual_seed(0)
    return 2 * torch.randn(_DRAWN, generator=own, device="cpu", dtype=torch.float32)


class TrialData(StandIns):
    """Stand-in arguments that tell kernels apart: floats of either sign, masks of both values."""

    _begin = 0

    def _tensor(self, wanted: TensorArgument) -> Tensor:
        dtype = wanted.dtype
        if not (dtype.is_floating_point or dtype.is_complex or dtype is torch.bool):
            return super()._tensor(wanted)
        elements = -(-wanted.storage_bytes // dtype.itemsize)
        flat = self._normals(elements, dtype if dtype.is_complex else torch.float32)
        flat = flat > 0 if dtype is torch.bool else flat.to(dtype)
        return wanted.over(flat.to(self._place(wanted)))

    def _normals(self, elements: int, dtype: torch.dtype) -> Tensor:
        """Draw from a normal distribution of deviation 2. On a CPU, where drawing takes as long as
        the kernels, repeat `_DRAWN` numbers, from another position on for each argument."""
        if self._device.type != "cpu" or dtype is not torch.float32:
            where = self._device
            return 2 * torch.randn(elements, dtype=dtype, device=where, generator=self._generator)
        self._begin = (self._begin + _APART) % _DRAWN
        drawn = _drawn()
        first = drawn[self._begin :][:elements]
        rounds, rest = divmod(elements - len(first), _DRAWN)
        return torch.cat([first, *[drawn] * rounds, drawn[:rest]])


def same_bits(
    call: Signature, likes: Sequence[Tensor], device: torch.device, way: Any, other: Other
) -> bool:
    """Return whether `other` gives the results of a call, bit for bit, laid out as planned.

    Args:
        call: the kernel call.
        likes: its (fake) results as the plan has them.
        device: where to run both.
        way: identifies `other`, for the cached answer.
        other: the other way.
    """
    layouts = tuple((tuple(v.shape), tuple(v.stride()), v.dtype) for v in likes)
    around = torch.get_num_threads(), numeric_settings()
    key = (call.target, call.text, layouts, way, device, around)
    return bool(_known.find(key, lambda: _tried(call, likes, device, other)))


def _tried(call: Signature, likes: Sequence[Tensor], device: torch.device, other: Other) -> bool:
    if call.target in ENDS_PROCESS:
        return False
    with torch.no_grad(), autocast_off():
        # Values of either sign tell more, but some kernels refuse them.
        for data in (TrialData(device), StandIns(device)):
            arguments = data.arguments(call)
            try:
                expected = _results(call, arguments, device)
            except REFUSALS:
                continue
            if not _as_planned(expected, likes):
                return False
            try:
                with random_state_kept([device]):
                    found = pytree.tree_leaves(other(copied(arguments)))
            except REFUSALS:
                return False
            if not _as_planned(found, likes):
                return False
            # Kernels that sum in any order (CUDA's atomics) do not even repeat their own bits.
            return all(map(equal_bytes, found, expected)) or not all(
                map(equal_bytes, _results(call, arguments, device), expected)
            )
    return False


def _results(call: Signature, arguments: Arguments, device: torch.device) -> list[Any]:
    with random_state_kept([device]):
        return pytree.tree_leaves(call.target(*arguments[0], **arguments[1]))


def poisoned(likes: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Make unwritten tensors for results, in memory that cannot be resized, like an arena's."""
    made = []
    for like in likes:
        size_bytes = like.untyped_storage().nbytes()
        memory = torch.full((size_bytes,), POISON, dtype=torch.uint8, device=device)
        storage = storage_at(memory.data_ptr(), device, size_bytes)
        empty = torch.empty(0, dtype=like.dtype, device=device)
        into = empty.set_(storage, 0, like.shape, like.stride())
        into._memory = memory  # type: ignore[attr-defined]  # lives as long as the tensor
        made.append(into)
    return made


def _as_planned(values: Sequence[Any], likes: Sequence[Tensor]) -> bool:
    return len(values) == len(likes) and all(map(_laid_out_like, values, likes))


def _laid_out_like(value: Any, like: Tensor) -> bool:
    """Return whether a result has a fake one's shape, dtype and strides, and its own storage."""
    return (
        isinstance(value, Tensor)
        and value.shape == like.shape
        and value.dtype == like.dtype
        and value.storage_offset() == 0
        and value.untyped_storage().nbytes() == like.untyped_storage().nbytes()
        and same_strides(value, like.stride())
    )


def equal_bytes(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors hold the same bytes, element for element, in any layout."""
    return torch.equal(_bytes(a), _bytes(b))


def _bytes(value: Tensor) -> Tensor:
    # A tensor of one element is contiguous with any stride, but only stride 1 allows a view.
    return value.contiguous().as_strided((value.numel(),), (1,)).view(torch.uint8)
