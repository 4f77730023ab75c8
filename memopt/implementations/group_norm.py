"""Group norm whose backward reads the output, and its forward again with its known statistics;
accuracy and refusals are those of `norms`."""

from __future__ import annotations

from typing import Any

import torch

from memopt.implementations.kernel import Kernel
from memopt.implementations.norms import (
    add_from_output,
    channels,
    check_invertible,
    normalised,
    single_or_double,
)
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten


def _grouped(value: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Statistics [images, groups] as [images, channels, 1...], to go with `like`."""
    wide = value.repeat_interleave(like.shape[1] // value.shape[1], 1)
    return wide.view(*wide.shape, *[1] * (like.ndim - 2))


def _backward(
    g: torch.Tensor, y: torch.Tensor, inverse: torch.Tensor, weight: Any, bias: Any, *more: Any
) -> Any:
    check_invertible(weight, bias)
    x = normalised(y, weight, bias, lambda v: channels(v, y)).div_(_grouped(inverse, y))
    # The input less its mean: only that difference counts.
    return ATEN.native_group_norm_backward(g, x, torch.zeros_like(inverse), inverse, weight, *more)


def _again(
    x: torch.Tensor, weight: Any, bias: Any, mean: torch.Tensor, inverse: torch.Tensor
) -> Any:
    scale = _grouped(inverse, x)
    scale = scale if weight is None else scale * channels(weight, x)
    shift = -_grouped(mean, x) * scale
    shift = shift if bias is None else shift + channels(bias, x)
    return (torch.addcmul(shift, x, scale),)


OUTPUT = Kernel("group_norm_backward.output", _backward)
AGAIN = Kernel("group_norm.statistics", _again)


def attach(sites: Sites) -> None:
    """`native_group_norm` of contiguous images, in float32 and float64."""
    for backward in sites.calls("aten.native_group_norm_backward.default"):
        g, x, mean, inverse, weight, *more = backward.args
        forward = sites.producer(mean)
        y = None if forward is None else sites.result(forward, 0)
        if forward is None or not value_of(x).is_contiguous() or not single_or_double(y):
            continue
        bias = forward.args[2]
        args = (g, y, inverse, weight, bias, *more)
        size = value_of(y).untyped_storage().nbytes()
        add_from_output(sites, backward, OUTPUT, args, size, (weight, bias))
        sites.add(forward, "statistics", AGAIN, (x, weight, bias, mean, inverse), (y,), exact=False)
