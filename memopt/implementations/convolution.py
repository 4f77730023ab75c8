"""Convolutions: image by image or in halves, to bound the workspace; the gradients of the input
and of the weight as runs of their own.

A library may choose another algorithm for another batch, so that the split ones are not declared
exact. Both gradients are computed apart in ATen in any case: asked for alone they are the same
bits (tested on the CPU).
"""

from __future__ import annotations

from typing import Any

import torch

from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten
SPLITS = (2, 8)
"""Parts of the batch."""


def _forward(parts: int, x: torch.Tensor, *arguments: Any) -> Any:
    step = -(-x.shape[0] // parts)
    pieces = (x[i : i + step] for i in range(0, x.shape[0], step))
    result = None
    for i, piece in enumerate(pieces):
        one = ATEN.convolution(piece, *arguments)
        if result is None:
            result = one.new_empty((x.shape[0], *one.shape[1:]))
        result[i * step : i * step + len(one)] = one
    return result


def _input_gradient(g: torch.Tensor, shape: Any, *arguments: Any) -> Any:
    # The input's values are not used (MONeT appendix C); oneDNN copies it all the same.
    like = g.new_empty(()).expand(shape)
    return ATEN.convolution_backward(g, like, *arguments, [True, False, False])[:1]


def _input_gradient_of(*arguments: Any) -> Any:
    return ATEN.convolution_backward(*arguments, [True, False, False])[:1]


def _weight_gradient(bias: bool, *arguments: Any) -> Any:
    return ATEN.convolution_backward(*arguments, [False, True, bias])[1:]


FORWARD = Kernel("convolution.split", _forward)
INPUT = Kernel("convolution_backward.input.2", _input_gradient)
KEEPING = Kernel("convolution_backward.input", _input_gradient_of)
WEIGHT = Kernel("convolution_backward.weight", _weight_gradient)


def attach(sites: Sites) -> None:
    """Every convolution with contiguous images; gradients where both are wanted."""
    for forward in sites.calls("aten.convolution.default"):
        x = value_of(forward.args[0])
        y = value_of(forward)
        for parts in SPLITS:
            if x.shape[0] >= parts and x.is_contiguous() and y.is_contiguous():
                part_bytes = -(-y.untyped_storage().nbytes() // parts)
                sites.add(
                    forward,
                    f"split {parts}",
                    FORWARD,
                    (parts, *forward.args),
                    workspace_bytes=part_bytes,
                    exact=False,
                    like=((forward, 1.0),),
                )
    for backward in sites.calls("aten.convolution_backward.default"):
        *arguments, mask = backward.args
        if not (mask[0] and mask[1]):  # type: ignore[index]  # a list of booleans
            continue
        given = tuple(arguments)
        results = [sites.result(backward, i) for i in range(2 + bool(mask[2]))]  # type: ignore[index]  # as above
        bias = len(results) == 3
        half = ((backward, 0.5),)
        # First the weight's: then its input can go.
        sites.add(
            backward,
            "weight gradient",
            WEIGHT,
            (bias, *given),
            (results[1], results[2] if bias else None),
            like=half,
        )
        g, x, *more = given
        if value_of(x).is_contiguous():
            without = (g, tuple(value_of(x).shape), *more)
            sites.add(backward, "input gradient", INPUT, without, (results[0],), like=half)
        else:
            sites.add(backward, "input gradient", KEEPING, given, (results[0],), like=half)
