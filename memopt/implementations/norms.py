"""Normalisations whose backward reads the output instead of the input (MONeT §3, in-place
activated batch norm's inversion), and whose forward runs again with its known statistics.

The normalised input is x̂ = (y − b) / w. It costs the digits that |b| ≫ |w·x̂| cancels: with ε the
dtype's rounding, x̂ is off by at most about 2ε·(|x̂| + 2·|b/w|), and so not exact. That bounds the
kernel's own error: a gradient Σ g·x̂ is off by at most Σ|g| times as much, which is much of the
sum if its terms cancel. A weight of 0 loses x̂: where |b/w| > LIMIT, or w is 0 or subnormally
small, the kernel raises, and `with_implementations` leaves the alternative out.

Batch norm goes through the batch in parts, from its output or its input, and can write over its
first argument (MONeT appendix C.1; Bulò et al., in-place activated batch norm).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from memopt.errors import ExecutionError
from memopt.implementations.kernel import PARTS, Kernel, split, writing
from memopt.implementations.site import Sites, contiguous, part_bytes, storage_bytes, value_of

ATEN = torch.ops.aten
BATCH_NORM = "aten._native_batch_norm_legit_functional.default"
LIMIT = 100.0
"""The largest |b/w|: x̂ is then off by at most 2.4e-5 + 1.2e-7·|x̂| in float32."""


def _channels(value: Tensor | None, like: Tensor) -> Any:
    """A value per channel, to go with `like`."""
    return None if value is None else value.view(1, -1, *[1] * (like.ndim - 2))


def _grouped(value: Tensor, like: Tensor) -> Tensor:
    """Statistics [images, groups] as [images, channels, 1...], to go with `like`."""
    wide = value.repeat_interleave(like.shape[1] // value.shape[1], 1)
    return wide.view(*wide.shape, *[1] * (like.ndim - 2))


def invertible(weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether y = w·x̂ + b gives x̂ back to the stated accuracy. Waits for the device."""
    if weight is None:
        # y − b is x̂ to the rounding of y.
        return bias is None or bool((bias.abs() <= LIMIT).all())
    least = torch.finfo(weight.dtype).tiny / torch.finfo(weight.dtype).eps
    fine = weight.abs() > least
    if bias is not None:
        fine &= bias.abs() <= LIMIT * weight.abs()
    return bool(fine.all())


def _check_invertible(weight: Tensor | None, bias: Tensor | None) -> None:
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


def _normalised(y: Tensor, weight: Any, bias: Any) -> Tensor:
    """x̂ from the output, in one tensor of scratch memory; the weights, shaped to go with it, allow
    it."""
    found = y.clone() if bias is None else y - bias
    return found if weight is None else found.div_(weight)


def _batch_gradients(
    g: Tensor, held: Tensor, find: Callable[[Tensor], Tensor], scale: Any, mask: Any, result: Any
) -> Any:
    """All three gradients of batch norm; that of the input is written to `result`, which may be
    `g`. `find` makes x̂ of a part of `held`, in a tensor of its own.

    With ĝ = mean g and ĥ = mean g·x̂ over a channel, it is (g − ĝ − x̂·ĥ)·scale.
    """
    over = [0, *range(2, g.ndim)]
    parts = split(len(g))
    zeros = torch.zeros(g.shape[1], dtype=torch.float64, device=g.device)
    of_bias, of_weight = zeros, zeros
    for part in parts:
        of_bias = of_bias + g[part].sum(over, dtype=torch.float64)
        of_weight = of_weight + find(held[part]).mul_(g[part]).sum(over, dtype=torch.float64)
    count = g.numel() // max(1, g.shape[1])
    mean = _channels((of_bias / count).to(g.dtype), g)
    slope = _channels((of_weight / count).to(g.dtype), g)
    for part in parts if mask[0] else ():
        one = find(held[part]).mul_(slope).add_(mean)
        torch.sub(g[part], one, out=result[part])
        result[part].mul_(_channels(scale, g))
    return (
        result if mask[0] else None,
        of_weight.to(g.dtype) if mask[1] else None,
        of_bias.to(g.dtype) if mask[2] else None,
    )


def _scale(inverse: Tensor, weight: Tensor | None) -> Tensor:
    return inverse if weight is None else inverse * weight


def _batch_output(
    result: Any, g: Tensor, y: Tensor, weight: Any, bias: Any, inverse: Tensor, mask: Any
) -> Any:
    _check_invertible(weight, bias)
    wide = _channels(weight, y), _channels(bias, y)
    scale = _scale(inverse, weight)
    return _batch_gradients(g, y, lambda part: _normalised(part, *wide), scale, mask, result)


def _batch_input(
    result: Any, g: Tensor, x: Tensor, weight: Any, mean: Tensor, inverse: Tensor, mask: Any
) -> Any:
    shift, factor = _channels(mean, x), _channels(inverse, x)
    scale = _scale(inverse, weight)
    return _batch_gradients(g, x, lambda one: (one - shift).mul_(factor), scale, mask, result)


def _batch_again(
    result: Tensor, x: Tensor, weight: Any, bias: Any, mean: Tensor, inverse: Tensor
) -> Any:
    scale = _scale(inverse, weight)
    shift = -mean * scale if bias is None else bias - mean * scale
    # A tuple, as the operator's: its other results are there already.
    return (torch.addcmul(_channels(shift, x), x, _channels(scale, x), out=result),)


def _layer_output(
    g: Tensor, y: Tensor, shape: Any, inverse: Tensor, weight: Any, bias: Any, mask: Any
) -> Any:
    _check_invertible(weight, bias)
    x = _normalised(y, weight, bias).div_(inverse)
    mean = torch.zeros_like(inverse)
    return ATEN.native_layer_norm_backward(g, x, shape, mean, inverse, weight, bias, mask)


def _group_output(g: Tensor, y: Tensor, inverse: Tensor, weight: Any, bias: Any, *more: Any) -> Any:
    _check_invertible(weight, bias)
    x = _normalised(y, _channels(weight, y), _channels(bias, y)).div_(_grouped(inverse, y))
    # The input less its mean: only that difference counts.
    return ATEN.native_group_norm_backward(g, x, torch.zeros_like(inverse), inverse, weight, *more)


def _group_again(x: Tensor, weight: Any, bias: Any, mean: Tensor, inverse: Tensor) -> Any:
    scale = _grouped(inverse, x)
    scale = scale if weight is None else scale * _channels(weight, x)
    shift = -_grouped(mean, x) * scale
    shift = shift if bias is None else shift + _channels(bias, x)
    return (torch.addcmul(shift, x, scale),)


BATCH_OUTPUT = writing("batch_norm_backward.output.3", _batch_output, like=1)
BATCH_INPUT = writing("batch_norm_backward.input", _batch_input, like=1)
BATCH_AGAIN = writing("batch_norm.statistics.3", _batch_again)
LAYER_OUTPUT = Kernel("layer_norm_backward.output.2", _layer_output)
GROUP_OUTPUT = Kernel("group_norm_backward.output", _group_output)
GROUP_AGAIN = Kernel("group_norm.statistics", _group_again)


def _normed(sites: Sites, target: str, mean: int, *forwards: str) -> list[tuple[Node, Node, Node]]:
    """(forward, its output, backward) of each normalisation in float32 and float64 whose backward
    has the forward's mean at a position of its arguments."""
    found = []
    for forward, backward in sites.pairs(target, mean, *forwards):
        y = sites.result(forward, 0)
        if y is not None and value_of(y).dtype in (torch.float32, torch.float64):
            found.append((forward, y, backward))
    return found


def _add_from_output(
    sites: Sites, backward: Node, kernel: Kernel, args: Any, scratch_bytes: int, weights: Any
) -> None:
    """A backward that reads the output; `weights`: weight and bias, which must allow it."""
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


def attach_batch_norm(sites: Sites) -> None:
    """Batch norm in training mode."""
    for forward, y, backward in _normed(
        sites, "aten.native_batch_norm_backward.default", 5, BATCH_NORM
    ):
        g, x, weight, _, _, mean, inverse, train, _, mask = backward.args
        if not train:
            continue
        bias, scratch = forward.args[2], 2 * part_bytes(y, min(PARTS, len(value_of(y))))
        of_output = (g, y, weight, bias, inverse, mask)
        _add_from_output(sites, backward, BATCH_OUTPUT, of_output, scratch, (weight, bias))
        sites.add(
            backward,
            "input",
            BATCH_INPUT,
            (g, x, weight, mean, inverse, mask),
            workspace_bytes=scratch,
            exact=False,
            like=1.3,
        )
        again = (x, weight, bias, mean, inverse)
        sites.add(forward, "statistics", BATCH_AGAIN, again, (y,), exact=False)


def attach_layer_norm(sites: Sites) -> None:
    """Layer norm."""
    for _, y, backward in _normed(sites, "aten.native_layer_norm_backward.default", 3):
        g, _, shape, _, inverse, weight, bias, mask = backward.args
        given = (g, y, shape, inverse, weight, bias, mask)
        _add_from_output(sites, backward, LAYER_OUTPUT, given, storage_bytes(y), (weight, bias))


def attach_group_norm(sites: Sites) -> None:
    """Group norm of contiguous images."""
    for forward, y, backward in _normed(sites, "aten.native_group_norm_backward.default", 2):
        g, x, mean, inverse, weight, *more = backward.args
        bias = forward.args[2]
        if contiguous(x):
            given = (g, y, inverse, weight, bias, *more)
            _add_from_output(sites, backward, GROUP_OUTPUT, given, storage_bytes(y), (weight, bias))
            again = (x, weight, bias, mean, inverse)
            sites.add(forward, "statistics", GROUP_AGAIN, again, (y,), exact=False)
