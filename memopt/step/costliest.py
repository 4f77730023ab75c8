"""Chooses the stand-in values for which a kernel needs most time and memory.

A plan must hold for every step, so kernels whose cost depends on values are measured on these.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.step.functions import EAGER_BACKWARD, costliest_values
from memopt.torch_private.operators import aten as _ATEN

_LARGE_NORM = 10.0
"""A norm above 3 (float32) or 6 (float64), for which `matrix_exp` squares matrices."""


def make_costliest(target: Any, arguments: tuple[Any, ...]) -> None:
    """Change a call's stand-in arguments, in place, to values for which its kernel needs the
    most time and memory. Most kernels' costs do not depend on values; their arguments stay as
    they are."""
    change = _COSTLIEST.get(target)
    if change is not None:
        change(arguments)


def _no_empty_bags(arguments: tuple[Any, ...]) -> None:
    """Give every bag the size 1, so that none is empty: with mode "max" the gradient copies the
    rows of all bags that are not."""
    bag_sizes = arguments[4]
    bag_sizes.fill_(1)


def _several_norms(arguments: tuple[Any, ...]) -> None:
    """Give the matrices different norms: a larger norm takes a polynomial of a higher degree, and a
    batch of different norms is divided into copies."""
    matrices = arguments[0]
    if not matrices.numel():
        return
    *batch, rows, _ = matrices.shape
    norms = torch.full((matrices[..., 0, 0].numel(),), _LARGE_NORM, device="cpu")
    for position, smaller in enumerate((1.0, 2.0)[: len(norms) - 1]):
        norms[position] = smaller
    matrices.copy_((norms / rows).reshape(*batch, 1, 1).expand(matrices.shape))


_COSTLIEST: dict[Any, Callable[[tuple[Any, ...]], None]] = {
    EAGER_BACKWARD: costliest_values,
    _ATEN._embedding_bag_backward.default: _no_empty_bags,
    _ATEN.linalg_matrix_exp.default: _several_norms,
}
