"""Layer and group norms whose backward reads the output instead of the input (MONeT §3, in-place
activated batch norm), and group norm's forward recomputed from its known statistics.

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
from memopt.kernels.site import Sites, contiguous, storage_bytes, value_of

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
            "the backward of a normalisation cannot compute its input from its output: it has a "
            f"weight of 0, or a bias more than {LIMIT:g} times its weight. No gradient was written "
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


ATEN = torch.ops.aten


def _grouped(value: Tensor, like: Tensor) -> Tensor:
    """Return statistics [images, groups] as [images, channels, 1...], to broadcast with `like`."""
    wide = value.repeat_interleave(like.shape[1] // value.shape[1], 1)
    return wide.view(*wide.shape, *[1] * (like.ndim - 2))


def _layer_output(
    g: Tensor, y: Tensor, shape: Any, inverse: Tensor, weight: Any, bias: Any, mask: Any
) -> Any:
    check_invertible(weight, bias)
    x = normalised(y, weight, bias).div_(inverse)
    mean = torch.zeros_like(inverse)
    return ATEN.native_layer_norm_backward(g, x, shape, mean, inverse, weight, bias, mask)


def _group_output(g: Tensor, y: Tensor, inverse: Tensor, weight: Any, bias: Any, *more: Any) -> Any:
    check_invertible(weight, bias)
    x = normalised(y, channels(weight, y), channels(bias, y)).div_(_grouped(inverse, y))
    # The input less its mean: only that difference counts.
    return ATEN.native_group_norm_backward(g, x, torch.zeros_like(inverse), inverse, weight, *more)


def _group_again(x: Tensor, weight: Any, bias: Any, mean: Tensor, inverse: Tensor) -> Any:
    scale = _grouped(inverse, x)
    scale = scale if weight is None else scale * channels(weight, x)
    shift = -_grouped(mean, x) * scale
    shift = shift if bias is None else shift + channels(bias, x)
    return (torch.addcmul(shift, x, scale),)


LAYER_OUTPUT = Kernel("layer_norm_backward.output.2", _layer_output)
GROUP_OUTPUT = Kernel("group_norm_backward.output", _group_output)
GROUP_AGAIN = Kernel("group_norm.statistics", _group_again)


def attach_layer_norm(sites: Sites) -> None:
    """Attach to layer norms' backwards alternatives that read the output."""
    for _, y, backward in normed(sites, "aten.native_layer_norm_backward.default", 3):
        g, _, shape, _, inverse, weight, bias, mask = backward.args
        given = (g, y, shape, inverse, weight, bias, mask)
        add_from_output(sites, backward, LAYER_OUTPUT, given, storage_bytes(y), (weight, bias))


def attach_group_norm(sites: Sites) -> None:
    """Attach to group norms of contiguous images a backward that reads the output, and a forward
    that knows the statistics."""
    for forward, y, backward in normed(sites, "aten.native_group_norm_backward.default", 2):
        g, x, mean, inverse, weight, *more = backward.args
        bias = forward.args[2]
        if contiguous(x):
            given = (g, y, inverse, weight, bias, *more)
            add_from_output(sites, backward, GROUP_OUTPUT, given, storage_bytes(y), (weight, bias))
            again = (x, weight, bias, mean, inverse)
            sites.add(forward, "statistics", GROUP_AGAIN, again, (y,), exact=False)
