"""Normalisations whose backward reads the output instead of the input (MONeT §3, in-place
activated batch norm's inversion): what they share, and layer norm.

The normalised input is x̂ = (y − b) / w. It costs the digits that |b| ≫ |w·x̂| cancels: with ε the
dtype's rounding, x̂ is off by at most about 2ε·(|x̂| + 2·|b/w|), and so not exact. That bounds the
kernel's own error: a gradient Σ g·x̂ is off by at most Σ|g| times as much, which is much of the
sum if its terms cancel. A weight of 0 loses x̂: where |b/w| > LIMIT, or w is 0 or subnormally
small, the kernel raises, and `with_implementations` leaves the alternative out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from memopt.errors import ExecutionError
from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten
LIMIT = 100.0
"""The largest |b/w|: x̂ is then off by at most 2.4e-5 + 1.2e-7·|x̂| in float32."""


def channels(value: torch.Tensor | None, like: torch.Tensor) -> Any:
    """A value per channel, to go with `like`."""
    return None if value is None else value.view(1, -1, *[1] * (like.ndim - 2))


def invertible(weight: torch.Tensor | None, bias: torch.Tensor | None) -> bool:
    """Whether y = w·x̂ + b gives x̂ back to the stated accuracy. Waits for the device."""
    if weight is None:
        # y − b is x̂ to the rounding of y.
        return bias is None or bool((bias.abs() <= LIMIT).all())
    least = torch.finfo(weight.dtype).tiny / torch.finfo(weight.dtype).eps
    fine = weight.abs() > least
    if bias is not None:
        fine &= bias.abs() <= LIMIT * weight.abs()
    return bool(fine.all())


def check_invertible(weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """Refuse what loses x̂.

    Raises:
        ExecutionError: the weights do not allow it.
    """
    if not invertible(weight, bias):
        raise ExecutionError(
            "a normalisation's backward from its output met a weight of 0, or a bias more than "
            f"{LIMIT:g} times its weight, and cannot find its input again. No gradient was written "
            "in this step. Plan again with exact_only=True, or from the present weights"
        )


def normalised(y: torch.Tensor, weight: Any, bias: Any, shaped: Any) -> torch.Tensor:
    """x̂ from the output, in one tensor of scratch memory; the weights allow it."""
    found = y.clone() if bias is None else y - shaped(bias)
    return found if weight is None else found.div_(shaped(weight))


def _layer_backward(
    g: torch.Tensor, y: torch.Tensor, shape: Any, inverse: Any, weight: Any, bias: Any, mask: Any
) -> Any:
    check_invertible(weight, bias)
    x = normalised(y, weight, bias, lambda v: v).div_(inverse)
    mean = torch.zeros_like(inverse)
    return ATEN.native_layer_norm_backward(g, x, shape, mean, inverse, weight, bias, mask)


LAYER_OUTPUT = Kernel("layer_norm_backward.output.2", _layer_backward)


def add_from_output(
    sites: Sites, backward: Node, kernel: Kernel, args: tuple[Any, ...], scratch_bytes: int,
    weights: tuple[Any, Any],
) -> None:  # fmt: skip
    """A backward that reads the output; `weights`: weight and bias, which must allow it."""
    sites.add(
        backward,
        "output",
        kernel,
        args,
        workspace_bytes=scratch_bytes,
        exact=False,
        like=((backward, 1.3),),
        requires=(invertible, weights),
    )


def single_or_double(node: Any) -> bool:
    """Whether a value is there, in float32 or float64."""
    return node is not None and value_of(node).dtype in (torch.float32, torch.float64)


def attach(sites: Sites) -> None:
    """Layer norm, in float32 and float64."""
    for backward in sites.calls("aten.native_layer_norm_backward.default"):
        g, _, shape, mean, inverse, weight, bias, mask = backward.args
        forward = sites.producer(mean)
        y = None if forward is None else sites.result(forward, 0)
        if single_or_double(y):
            args = (g, y, shape, inverse, weight, bias, mask)
            size = value_of(y).untyped_storage().nbytes()
            add_from_output(sites, backward, LAYER_OUTPUT, args, size, (weight, bias))
