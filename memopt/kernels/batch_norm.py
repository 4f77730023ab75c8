"""Batch norm's backward from the output or the input, and its forward with known statistics.

The backward goes through the batch in parts and can write over its first argument (MONeT
appendix C.1; Bulò et al., in-place activated batch norm).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.kernel import PARTS, split, writing
from memopt.kernels.norms import (
    add_from_output,
    channels,
    check_invertible,
    normalised,
    normed,
)
from memopt.kernels.site import Sites, part_bytes, value_of

BATCH_NORM = "aten._native_batch_norm_legit_functional.default"


def _batch_gradients(
    g: Tensor, held: Tensor, find: Callable[[Tensor], Tensor], scale: Any, mask: Any, result: Any
) -> Any:
    """Return all three gradients of batch norm; the input's is written to `result`, which may be
    `g`. `find` computes x̂ of a part of `held`, in a tensor of its own.

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
    mean = channels((of_bias / count).to(g.dtype), g)
    slope = channels((of_weight / count).to(g.dtype), g)
    for part in parts if mask[0] else ():
        one = find(held[part]).mul_(slope).add_(mean)
        torch.sub(g[part], one, out=result[part])
        result[part].mul_(channels(scale, g))
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
    check_invertible(weight, bias)
    wide = channels(weight, y), channels(bias, y)
    scale = _scale(inverse, weight)
    return _batch_gradients(g, y, lambda part: normalised(part, *wide), scale, mask, result)


def _batch_input(
    result: Any, g: Tensor, x: Tensor, weight: Any, mean: Tensor, inverse: Tensor, mask: Any
) -> Any:
    shift, factor = channels(mean, x), channels(inverse, x)
    scale = _scale(inverse, weight)
    return _batch_gradients(g, x, lambda one: (one - shift).mul_(factor), scale, mask, result)


def _batch_again(
    result: Tensor, x: Tensor, weight: Any, bias: Any, mean: Tensor, inverse: Tensor
) -> Any:
    scale = _scale(inverse, weight)
    shift = -mean * scale if bias is None else bias - mean * scale
    # A tuple, like the operator's results; the statistics exist already.
    return (torch.addcmul(channels(shift, x), x, channels(scale, x), out=result),)


BATCH_OUTPUT = writing("batch_norm_backward.output.3", _batch_output, like=1)
BATCH_INPUT = writing("batch_norm_backward.input", _batch_input, like=1)
BATCH_AGAIN = writing("batch_norm.statistics.3", _batch_again)


def attach_batch_norm(sites: Sites) -> None:
    """Attach alternatives to batch norms in training mode."""
    for forward, y, backward in normed(
        sites, "aten.native_batch_norm_backward.default", 5, BATCH_NORM
    ):
        g, x, weight, _, _, mean, inverse, train, _, mask = backward.args
        if not train:
            continue
        bias, scratch = forward.args[2], 2 * part_bytes(y, min(PARTS, len(value_of(y))))
        of_output = (g, y, weight, bias, inverse, mask)
        add_from_output(sites, backward, BATCH_OUTPUT, of_output, scratch, (weight, bias))
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
