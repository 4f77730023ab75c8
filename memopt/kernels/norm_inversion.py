"""Inverts normalisations, so that their backward reads the output instead of the input (MONeT §3,
in-place activated batch norm).

The normalised input is x̂ = (y − b) / w. It costs the digits that |b| ≫ |w·x̂| cancels: with ε the
dtype's rounding, x̂ is off by at most about 2ε·(|x̂| + 2·|b/w|), and so not exact. That bounds the
kernel's own error: a gradient Σ g·x̂ is off by at most Σ|g| times as much, which is much of the
sum if its terms cancel. A weight of 0 loses x̂: where |b/w| > LIMIT, or w is 0 or subnormally
small, the kernel raises, and `with_implementations` leaves the alternative out.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from memopt.errors import ExecutionError
from memopt.kernels.kernel import Kernel
from memopt.kernels.site import Sites, value_of

LIMIT = 100.0
"""The largest |b/w|: x̂ is then off by at most 2.4e-5 + 1.2e-7·|x̂| in float32."""


def channels(value: Tensor | None, like: Tensor) -> Any:
    """Return a value per channel, shaped to broadcast with `like`."""
    return None if value is None else value.view(1, -1, *[1] * (like.ndim - 2))


def invertible(weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether y = w·x̂ + b gives x̂ back to the stated accuracy. Waits for the device."""
    if weight is None:
        # y − b is x̂ to the rounding of y.
        return bias is None or bool((bias.abs() <= LIMIT).all())
    least = torch.finfo(weight.dtype).tiny / torch.finfo(weight.dtype).eps
    fine = weight.abs() > least
    if bias is not None:
        fine &= bias.abs() <= LIMIT * weight.abs()
    return bool(fine.all())


def check_invertible(weight: Tensor | None, bias: Tensor | None) -> None:
    """Refuse weights that lose x̂.

    Raises:
        ExecutionError: the weights do not allow it.
    """
    if not invertible(weight, bias):
        raise ExecutionError(
            "a normalisation's backward from its output met a weight of 0, or a bias more than "
            f"{LIMIT:g} times its weight, and cannot find its input again. No gradient was written "
            "in this step. Plan again with exact_only=True, or from the present weights"
        )


def normalised(y: Tensor, weight: Any, bias: Any) -> Tensor:
    """Return x̂ from the output, in one tensor of scratch memory; the weights must allow it and be
    shaped to broadcast."""
    found = y.clone() if bias is None else y - bias
    return found if weight is None else found.div_(weight)


def normed(sites: Sites, target: str, mean: int, *forwards: str) -> list[tuple[Node, Node, Node]]:
    """Return (forward, its output, backward) of each normalisation in float32 and float64 whose
    backward has the forward's mean at a position of its arguments."""
    found = []
    for forward, backward in sites.pairs(target, mean, *forwards):
        y = sites.result(forward, 0)
        if y is not None and value_of(y).dtype in (torch.float32, torch.float64):
            found.append((forward, y, backward))
    return found


def add_from_output(
    sites: Sites, backward: Node, kernel: Kernel, args: Any, scratch_bytes: int, weights: Any
) -> None:
    """Add a backward that reads the output; `weights`: weight and bias, which must allow it."""
    sites.add(
        backward,
        "output",
        kernel,
        args,
        workspace_bytes=scratch_bytes,
        exact=False,
        like=1.3,
        requires=(invertible, weights),
    )
