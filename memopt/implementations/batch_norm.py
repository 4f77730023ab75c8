"""Batch norm in training mode: its backward from the output, or from the input part by part, and
its forward again with its known statistics. Each can write over its first argument (MONeT
appendix C.1; Bulò et al., in-place activated batch norm). See `norms` for the accuracy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from memopt.implementations.kernel import writing
from memopt.implementations.norms import (
    add_from_output,
    channels,
    check_invertible,
    normalised,
    single_or_double,
)
from memopt.implementations.parts import PARTS, part_bytes, split
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten
FORWARD = "aten._native_batch_norm_legit_functional.default"

Normalise = Callable[[torch.Tensor], torch.Tensor]
"""x̂ of a part, in a tensor of its own."""


def _gradients(
    g: torch.Tensor, held: torch.Tensor, find: Normalise, scale: Any, mask: Any, result: Any
) -> Any:
    """All three gradients; that of the input is written to `result`, which may be `g`.

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


def _scale(inverse: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    return inverse if weight is None else inverse * weight


def _from_output(
    result: Any, g: Any, y: Any, weight: Any, bias: Any, inverse: Any, mask: Any
) -> Any:
    check_invertible(weight, bias)

    def find(part: torch.Tensor) -> torch.Tensor:
        return normalised(part, weight, bias, lambda v: channels(v, part))

    return _gradients(g, y, find, _scale(inverse, weight), mask, result)


def _from_input(
    result: Any, g: Any, x: Any, weight: Any, mean: Any, inverse: Any, mask: Any
) -> Any:
    def find(part: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (part - channels(mean, part)).mul_(channels(inverse, part))
        return found

    return _gradients(g, x, find, _scale(inverse, weight), mask, result)


def _again(
    result: torch.Tensor, x: torch.Tensor, weight: Any, bias: Any, mean: Any, inverse: Any
) -> Any:
    scale = _scale(inverse, weight)
    shift = -mean * scale if bias is None else bias - mean * scale
    # A tuple, as the operator's: its other results are there already.
    return (torch.addcmul(channels(shift, x), x, channels(scale, x), out=result),)


OUTPUT = writing("batch_norm_backward.output.3", _from_output, like=1)
INPUT = writing("batch_norm_backward.input", _from_input, like=1)
AGAIN = writing("batch_norm.statistics.3", _again)


def attach(sites: Sites) -> None:
    """Batch norm in training mode, in float32 and float64."""
    for backward in sites.calls("aten.native_batch_norm_backward.default"):
        g, x, weight, _, _, mean, inverse, train, _, mask = backward.args
        forward = sites.producer(mean)
        if forward is None or str(forward.target) != FORWARD or not train:
            continue
        y = sites.result(forward, 0)
        if not single_or_double(y):
            continue
        scratch = 2 * part_bytes(value_of(y), min(PARTS, len(value_of(y))))
        bias = forward.args[2]
        args = (g, y, weight, bias, inverse, mask)
        add_from_output(sites, backward, OUTPUT, args, scratch, (weight, bias))
        sites.add(
            backward,
            "input",
            INPUT,
            (g, x, weight, mean, inverse, mask),
            workspace_bytes=scratch,
            exact=False,
            like=((backward, 1.3),),
        )
        sites.add(forward, "statistics", AGAIN, (x, weight, bias, mean, inverse), (y,), exact=False)
