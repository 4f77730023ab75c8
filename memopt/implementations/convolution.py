"""Convolutions: in parts of the batch, to bound the workspace or to write over what they read; the
gradients of the input and of the weight as runs of their own; the other ways a library offers.

A library may choose another algorithm for another batch, so that the split ones are not declared
exact. Both gradients are computed apart in ATen in any case: asked for alone they are the same
bits (tested on the CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from memopt.implementations.kernel import PARTS, Kernel, split, with_twin
from memopt.implementations.site import Sites, contiguous, part_bytes, storage_bytes, value_of

ATEN = torch.ops.aten
CONVOLUTION = "aten.convolution.default"
CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
SPLITS = (2, PARTS)
"""Parts of the batch."""


def _forward(x: Tensor, parts: int, *arguments: Any) -> Any:
    result = None
    for part in split(len(x), parts):
        one = ATEN.convolution(x[part], *arguments)
        if result is None:
            result = one.new_empty((len(x), *one.shape[1:]))
        result[part] = one
    return result


def _forward_over(x: Tensor, parts: int, *arguments: Any) -> Any:
    for part in split(len(x), parts):
        x[part] = ATEN.convolution(x[part], *arguments)
    return x


def input_gradient(g: Tensor, shape: Any, *arguments: Any) -> Any:
    """A tuple of the input gradient of a convolution alone, without its input's values."""
    # The input's values are not used (MONeT appendix C); oneDNN copies it all the same.
    like = g.new_empty(()).expand(shape)
    return ATEN.convolution_backward(g, like, *arguments, [True, False, False])[:1]


def _input_gradient_into(result: Tensor, g: Tensor, parts: int, *arguments: Any) -> Any:
    for part in split(len(g), parts):
        (result[part],) = input_gradient(g[part], result[part].shape, *arguments)
    return (result,)


def _input_gradient_of(*arguments: Any) -> Any:
    return ATEN.convolution_backward(*arguments, [True, False, False])[:1]


def _weight_gradient(bias: bool, *arguments: Any) -> Any:
    return ATEN.convolution_backward(*arguments, [False, True, bias])[1:]


def summed_weight_gradients(
    parts: Iterable[tuple[Tensor, Tensor]], bias: bool, *arguments: Any
) -> Any:
    """(gradient of the weight, of the bias or None): the sum over parts of the batch.

    Args:
        parts: (gradient, input) of each; at least one.
        bias: whether the bias has a gradient.
        arguments: of ATen's `convolution_backward`, from the weight on but for its mask.
    """
    total: list[Any] = []
    for g, x in parts:
        found = _weight_gradient(bias, g, x, *arguments)
        if not total:
            total = [None if one is None else one.clone() for one in found]
        else:
            total = [a if a is None else a.add_(b) for a, b in zip(total, found, strict=True)]
    return tuple(total)


def _weight_gradient_split(g: Tensor, x: Tensor, parts: int, bias: bool, *arguments: Any) -> Any:
    pieces = ((g[part], x[part]) for part in split(len(g), parts))
    return summed_weight_gradients(pieces, bias, *arguments)


def _native(operator: Any) -> Callable[..., Any]:
    def run(*arguments: Any) -> Any:
        with torch.backends.mkldnn.flags(enabled=False):
            return operator(*arguments)

    return run


def _cudnn(benchmark: bool, deterministic: bool, backward: bool, *arguments: Any) -> Any:
    operator = ATEN.convolution_backward if backward else ATEN.convolution
    with torch.backends.cudnn.flags(enabled=True, benchmark=benchmark, deterministic=deterministic):
        return operator(*arguments)


FORWARD = with_twin("convolution.split.2", _forward, _forward_over)
INPUT_SPLIT = with_twin(
    "convolution_backward.input.split",
    lambda g, parts, shape, *more: _input_gradient_into(g.new_empty(shape), g, parts, *more),
    lambda g, parts, _, *more: _input_gradient_into(g, g, parts, *more),
)
INPUT = Kernel("convolution_backward.input.2", input_gradient)
WEIGHT_SPLIT = Kernel("convolution_backward.weight.split", _weight_gradient_split)
KEEPING = Kernel("convolution_backward.input", _input_gradient_of)
WEIGHT = Kernel("convolution_backward.weight", _weight_gradient)
NATIVE = Kernel("convolution.native", _native(ATEN.convolution))
NATIVE_BACKWARD = Kernel("convolution_backward.native", _native(ATEN.convolution_backward))
CUDNN = Kernel("convolution.cudnn", _cudnn)


def wanted(backward: Node) -> tuple[bool, bool, bool]:
    """Whether a convolution's backward gives gradients of the input, the weight and the bias."""
    mask: Any = backward.args[-1]
    return tuple(mask)


def attach(sites: Sites) -> None:
    """Every convolution with contiguous images; gradients where both are wanted."""
    for forward in sites.calls(CONVOLUTION):
        x, *more = forward.args
        for parts in SPLITS:
            if len(value_of(x)) >= parts and contiguous(x, forward):
                sites.add(
                    forward,
                    f"split {parts}",
                    FORWARD,
                    (x, parts, *more),
                    workspace_bytes=part_bytes(forward, parts),
                    exact=False,
                    like=1.0,
                    moved_bytes=2 * storage_bytes(forward),
                )
    for backward in sites.calls(CONVOLUTION_BACKWARD):
        if all(wanted(backward)[:2]):
            _attach_backward(sites, backward)


def _attach_backward(sites: Sites, backward: Node) -> None:
    given = backward.args[:-1]
    g, x, *more = given
    by_input, *by_weight = (sites.result(backward, i) for i in range(3))
    bias = wanted(backward)[2]
    many = len(value_of(x)) >= PARTS
    # First the weight's: then its input can go.
    sites.add(backward, "weight gradient", WEIGHT, (bias, *given), tuple(by_weight), like=0.5)
    if many:
        sites.add(
            backward,
            "weight gradient split",
            WEIGHT_SPLIT,
            (g, x, PARTS, bias, *more),
            tuple(by_weight),
            workspace_bytes=storage_bytes(more[0]),
            exact=False,
            like=0.5,
        )
    if not contiguous(x):
        sites.add(backward, "input gradient", KEEPING, tuple(given), (by_input,), like=0.5)
        return
    shape = tuple(value_of(x).shape)
    sites.add(backward, "input gradient", INPUT, (g, shape, *more), (by_input,), like=0.5)
    if many and contiguous(g):
        # Over the gradient, where the shapes are alike.
        sites.add(
            backward,
            "input gradient split",
            INPUT_SPLIT,
            (g, PARTS, shape, *more),
            (by_input,),
            workspace_bytes=part_bytes(x),
            exact=False,
            like=0.5,
            moved_bytes=2 * storage_bytes(x),
        )


def attach_libraries(sites: Sites) -> None:
    """Every convolution with contiguous images, on the device where the step was captured: on the
    CPU by ATen's own kernels in place of oneDNN's, on CUDA by cuDNN's deterministic algorithms or
    the fastest of a trial. An estimate cannot tell them apart: none is attached where the device is
    not the one that runs."""
    for call in sites.calls(CONVOLUTION, CONVOLUTION_BACKWARD):
        if not contiguous(*call.all_input_nodes):
            continue
        backward = str(call.target) == CONVOLUTION_BACKWARD
        device = value_of(call.all_input_nodes[0]).device.type
        if device == "cuda":
            for name, benchmark in (("benchmarked", True), ("deterministic", False)):
                given = (benchmark, not benchmark, backward, *call.args)
                sites.add(call, name, CUDNN, given, exact=False, like=1.0)
        elif device == "cpu" and not sites.cuda_blocks:
            kernel = NATIVE_BACKWARD if backward else NATIVE
            sites.add(call, "native", kernel, call.args, exact=False, like=1.0)
