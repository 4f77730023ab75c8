"""Layer and group norms whose backward reads the output instead of the input, and group norm's
forward recomputed from its known statistics.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from memopt.kernels.kernel import Kernel
from memopt.kernels.norm_inversion import (
    add_from_output,
    channels,
    check_invertible,
    normalised,
    normed,
)
from memopt.kernels.site import Sites, contiguous, storage_bytes

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
