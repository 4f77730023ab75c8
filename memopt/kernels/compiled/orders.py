"""Tests whether a kernel computes the same for images in another order, on stand-in data.

Some kernels go through memory without looking at strides: the backward of `weight_norm` gives other
numbers for a filter's gradient in channels-last order. A user's model does not run into that, but
a model whose images memopt puts in another order could.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.step.backend import autocast_off
from memopt.step.numerics import numeric_settings
from memopt.step.signature import (
    ENDS_PROCESS,
    REFUSALS,
    Answers,
    Arguments,
    Signature,
    StandIns,
    TensorArgument,
)
from memopt.step.trial import TrialData
from memopt.torch_private import pytree

_CLOSE, _CLOSE_IN_HALF = 1e-3, 0.05
"""Tolerances, relative to the largest number that a call reads or returns."""
_known = Answers()


def computes_alike(before: Signature, after: Signature, device: torch.device) -> bool:
    """Return whether a call gives the same numbers, but for rounding, with its operands laid out
    otherwise (it draws none).

    Args:
        before, after: the call, with both layouts.
        device: where it runs.
    """
    key = before.text, after.text, device, numeric_settings()
    return bool(_known.find(key, lambda: _tried(before, after, device)))


def _tried(before: Signature, after: Signature, device: torch.device) -> bool:
    if before.target in ENDS_PROCESS:
        return False
    with torch.no_grad(), autocast_off():
        # Values of either sign test more, but not every kernel takes them.
        for data in (TrialData(device), StandIns(device)):
            given = data.arguments(after)
            try:
                same = _laid_out(given, before)
                found, wanted = (before.target(*one[0], **one[1]) for one in (given, same))
            except REFUSALS:
                continue
            return _are_close(found, wanted, [given, wanted])
    return False


def _laid_out(given: Arguments, like: Signature) -> Arguments:
    """Return arguments with the given values and a call's strides.

    Raises:
        RuntimeError: elements that share memory have different values.
    """

    def copied(value: Any, wanted: Any) -> Any:
        if not isinstance(wanted, TensorArgument) or value.stride() == wanted.stride:
            return value
        made = torch.empty_strided(
            wanted.shape, wanted.stride, dtype=value.dtype, device=value.device
        )
        return made.copy_(value)

    made: Arguments = pytree.tree_map(copied, given, (like.args, like.kwargs))
    return made


def _are_close(found: Any, wanted: Any, around: Any) -> bool:
    pairs = list(zip(_tensors(found), _tensors(wanted), strict=True))
    numbers = [one for one in _tensors(around) if one.is_floating_point()]
    largest = max((float(one.abs().max()) for one in numbers if one.numel()), default=0.0)
    half = any(one.itemsize < torch.float32.itemsize for one in numbers)
    atol = largest * (_CLOSE_IN_HALF if half else _CLOSE)
    return all(
        torch.allclose(one.float(), other.float(), rtol=0, atol=atol, equal_nan=True)
        if one.is_floating_point()
        else torch.equal(one, other)
        for one, other in pairs
    )


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]
