"""Kernels whose time and memory depend on the values that they get: those that need the most.

A plan is to hold for every step, so these kernels are measured on the dearest values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.step.functions import EAGER_BACKWARD, dearest_values
from memopt.torch_private.operators import aten as _ATEN

_LARGE_NORM = 10.0
"""Matrices of norms above 3 (float32) or 6 (float64) are squared in `matrix_exp`."""


def make_dearest(target: Any, arguments: tuple[Any, ...]) -> None:
    """Change the stand-in arguments of a call, in place, to those for which it needs most."""
    change = _DEAREST.get(target)
    if change is not None:
        change(arguments)


def _no_empty_bags(arguments: tuple[Any, ...]) -> None:
    """By maxima, the gradient copies the rows of all bags that are not empty."""
    bag_sizes = arguments[4]
    bag_sizes.fill_(1)


def _several_norms(arguments: tuple[Any, ...]) -> None:
    """The polynomial has a higher degree the larger the norm; a batch of different norms is divided
    into copies."""
    matrices = arguments[0]
    if not matrices.numel():
        return
    *batch, rows, _ = matrices.shape
    norms = torch.full((matrices[..., 0, 0].numel(),), _LARGE_NORM)
    for position, smaller in enumerate((1.0, 2.0)[: len(norms) - 1]):
        norms[position] = smaller
    matrices.copy_((norms / rows).reshape(*batch, 1, 1).expand(matrices.shape))


_DEAREST: dict[Any, Callable[[tuple[Any, ...]], None]] = {
    EAGER_BACKWARD: dearest_values,
    _ATEN._embedding_bag_backward.default: _no_empty_bags,
    _ATEN.linalg_matrix_exp.default: _several_norms,
}
