"""Convolutions: in parts of the batch, to bound the workspace or to write over what they read; the
gradients of the input and of the weight as runs of their own.

A library may choose another algorithm for another batch, so that the split ones are not declared
exact. Both gradients are computed apart in ATen in any case: asked for alone they are the same
bits (tested on the CPU).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import Node

from memopt.implementations.kernel import Kernel, with_twin
from memopt.implementations.parts import PARTS, part_bytes, split
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten
SPLITS = (2, PARTS)
"""Parts of the batch."""


def _forward(x: torch.Tensor, parts: int, *arguments: Any) -> Any:
    result = None
    for part in split(len(x), parts):
        one = ATEN.convolution(x[part], *arguments)
        if result is None:
            result = one.new_empty((len(x), *one.shape[1:]))
        result[part] = one
    return result


def _forward_over(x: torch.Tensor, parts: int, *arguments: Any) -> Any:
    for part in split(len(x), parts):
        x[part] = ATEN.convolution(x[part], *arguments)
    return x


def input_gradient(g: torch.Tensor, shape: Any, *arguments: Any) -> Any:
    """A tuple of the input gradient of a convolution alone, without its input's values."""
    # The input's values are not used (MONeT appendix C); oneDNN copies it all the same.
    like = g.new_empty(()).expand(shape)
    return ATEN.convolution_backward(g, like, *arguments, [True, False, False])[:1]


def _input_gradient_split(g: torch.Tensor, parts: int, shape: Any, *arguments: Any) -> Any:
    return _input_gradient_into(g.new_empty(shape), g, parts, *arguments)


def _input_gradient_into(result: torch.Tensor, g: torch.Tensor, parts: int, *arguments: Any) -> Any:
    for part in split(len(g), parts):
        (result[part],) = input_gradient(g[part], result[part].shape, *arguments)
    return (result,)


def _input_gradient_of(*arguments: Any) -> Any:
    return ATEN.convolution_backward(*arguments, [True, False, False])[:1]


def _weight_gradient(bias: bool, *arguments: Any) -> Any:
    return ATEN.convolution_backward(*arguments, [False, True, bias])[1:]


def summed_weight_gradients(
    parts: Iterable[tuple[torch.Tensor, torch.Tensor]], bias: bool, *arguments: Any
) -> Any:
    """(gradient of the weight, of the bias or None): the sum over parts of the batch.

    Args:
        parts: (gradient, input) of each; at least one.
        bias: whether the bias has a gradient.
        arguments: of ATen's `convolution_backward`, from the weight on but for its mask.
    """
    total: list[Any] = []
    for g, x in parts:
        found = ATEN.convolution_backward(g, x, *arguments, [False, True, bias])[1:]
        if not total:
            total = [None if one is None else one.clone() for one in found]
        else:
            total = [a if a is None else a.add_(b) for a, b in zip(total, found, strict=True)]
    return tuple(total)


def _weight_gradient_split(
    g: torch.Tensor, x: torch.Tensor, parts: int, bias: bool, *arguments: Any
) -> Any:
    pieces = ((g[part], x[part]) for part in split(len(g), parts))
    return summed_weight_gradients(pieces, bias, *arguments)


FORWARD = with_twin("convolution.split.2", _forward, _forward_over)
INPUT_SPLIT = with_twin(
    "convolution_backward.input.split",
    _input_gradient_split,
    lambda g, parts, _, *more: _input_gradient_into(g, g, parts, *more),
)
INPUT = Kernel("convolution_backward.input.2", input_gradient)
WEIGHT_SPLIT = Kernel("convolution_backward.weight.split", _weight_gradient_split)
KEEPING = Kernel("convolution_backward.input", _input_gradient_of)
WEIGHT = Kernel("convolution_backward.weight", _weight_gradient)


def attach(sites: Sites) -> None:
    """Every convolution with contiguous images; gradients where both are wanted."""
    for forward in sites.calls("aten.convolution.default"):
        x = value_of(forward.args[0])
        y = value_of(forward)
        for parts in SPLITS:
            if x.shape[0] >= parts and x.is_contiguous() and y.is_contiguous():
                sites.add(
                    forward,
                    f"split {parts}",
                    FORWARD,
                    (forward.args[0], parts, *forward.args[1:]),
                    workspace_bytes=part_bytes(y, parts),
                    exact=False,
                    like=((forward, 1.0),),
                    moved_bytes=2 * y.untyped_storage().nbytes(),
                )
    for backward in sites.calls("aten.convolution_backward.default"):
        _attach_backward(sites, backward)


def _attach_backward(sites: Sites, backward: Node) -> None:
    *arguments, mask = backward.args
    if not (mask[0] and mask[1]):  # type: ignore[index]  # a list of booleans
        return
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
    if len(value_of(x)) >= PARTS:
        sites.add(
            backward,
            "weight gradient split",
            WEIGHT_SPLIT,
            (g, x, PARTS, bias, *more),
            (results[1], results[2] if bias else None),
            workspace_bytes=value_of(more[0]).untyped_storage().nbytes(),
            exact=False,
            like=half,
        )
    if value_of(x).is_contiguous():
        without = (g, tuple(value_of(x).shape), *more)
        sites.add(backward, "input gradient", INPUT, without, (results[0],), like=half)
        if len(value_of(x)) >= PARTS and value_of(g).is_contiguous():
            # Over the gradient, where the shapes are alike.
            sites.add(
                backward,
                "input gradient split",
                INPUT_SPLIT,
                (g, PARTS, *without[1:]),
                (results[0],),
                workspace_bytes=part_bytes(value_of(x)),
                exact=False,
                like=half,
                moved_bytes=2 * value_of(x).untyped_storage().nbytes(),
            )
    else:
        sites.add(backward, "input gradient", KEEPING, given, (results[0],), like=half)
