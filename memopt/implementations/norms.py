"""Normalisations whose backward reads the output instead of the input (MONeT §3, in-place
activated batch norm's inversion), and batch norm's forward again with its known statistics.

The normalised input is x̂ = (y − b) / w. It costs the digits that |b| ≫ |w·x̂| cancels: with ε the
dtype's rounding, x̂ is off by at most 2ε·(|y| + |b|)/|w|, and so not exact. Weights at 0 lose x̂:
the alternative may be chosen only where no weight vanishes, which `exact_only=True` avoids.
"""

from __future__ import annotations

from typing import Any

import torch

from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten
_BATCH = "aten._native_batch_norm_legit_functional.default"


def _channels(value: torch.Tensor | None, like: torch.Tensor) -> Any:
    return None if value is None else value.view(1, -1, *[1] * (like.ndim - 2))


def _normalised(y: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    """x̂ from the output, in one tensor of scratch memory."""
    found = y.clone() if bias is None else y - bias
    return found if weight is None else found.div_(weight)


def _batch_backward(
    g: torch.Tensor,
    y: torch.Tensor,
    weight: Any,
    bias: Any,
    mean: Any,
    inverse: Any,
    eps: float,
    mask: Any,
) -> Any:
    x = _normalised(y, _channels(weight, y), _channels(bias, y))
    x.div_(_channels(inverse, y)).add_(_channels(mean, y))
    return ATEN.native_batch_norm_backward(g, x, weight, None, None, mean, inverse, True, eps, mask)


def _batch_again(x: torch.Tensor, weight: Any, bias: Any, mean: Any, inverse: Any) -> Any:
    scale = inverse if weight is None else inverse * weight
    shift = -mean * scale if bias is None else bias - mean * scale
    return torch.addcmul(_channels(shift, x), x, _channels(scale, x))


def _layer_backward(
    g: torch.Tensor,
    y: torch.Tensor,
    shape: Any,
    mean: Any,
    inverse: Any,
    weight: Any,
    bias: Any,
    mask: Any,
) -> Any:
    x = _normalised(y, weight, bias).div_(inverse).add_(mean)
    return ATEN.native_layer_norm_backward(g, x, shape, mean, inverse, weight, bias, mask)


BATCH_OUTPUT = Kernel("batch_norm_backward.output", _batch_backward)
BATCH_AGAIN = Kernel("batch_norm.statistics", _batch_again)
LAYER_OUTPUT = Kernel("layer_norm_backward.output", _layer_backward)


def _attach_batch(sites: Sites) -> None:
    for backward in sites.calls("aten.native_batch_norm_backward.default"):
        g, x, weight, _, _, mean, inverse, train, eps, mask = backward.args
        forward = sites.producer(mean)
        if forward is None or str(forward.target) != _BATCH or not train:
            continue
        y = sites.result(forward, 0)
        if y is None or value_of(y).dtype not in (torch.float32, torch.float64):
            continue
        size = value_of(y).untyped_storage().nbytes()
        bias = forward.args[2]
        args = (g, y, weight, bias, mean, inverse, eps, mask)
        sites.add(
            backward,
            "output",
            BATCH_OUTPUT,
            args,
            workspace_bytes=2 * size,
            exact=False,
            like=((backward, 1.3),),
        )
        sites.add(
            forward, "statistics", BATCH_AGAIN, (x, weight, bias, mean, inverse), (y,), exact=False
        )


def _attach_layer(sites: Sites) -> None:
    for backward in sites.calls("aten.native_layer_norm_backward.default"):
        g, _, shape, mean, inverse, weight, bias, mask = backward.args
        forward = sites.producer(mean)
        y = None if forward is None else sites.result(forward, 0)
        if y is None or value_of(y).dtype not in (torch.float32, torch.float64):
            continue
        size = value_of(y).untyped_storage().nbytes()
        args = (g, y, shape, mean, inverse, weight, bias, mask)
        sites.add(
            backward,
            "output",
            LAYER_OUTPUT,
            args,
            workspace_bytes=size,
            exact=False,
            like=((backward, 1.3),),
        )


def attach(sites: Sites) -> None:
    """Batch norm in training mode and layer norm, in float32 and float64."""
    _attach_batch(sites)
    _attach_layer(sites)
