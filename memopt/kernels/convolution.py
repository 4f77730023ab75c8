"""Convolutions: in parts of the batch, to bound the workspace or to write over their operand; the
gradients of the input and of the weight as separate runs, the weight's from what made its input; a
library's other algorithms.

A library may choose another algorithm for another batch size, so split kernels are not declared
exact. ATen computes the two gradients separately in any case: each alone has the same bits (tested
on the CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from memopt.kernels.batch_norm import BATCH_AGAIN, BATCH_NORM
from memopt.kernels.kernel import PARTS, Kernel, split, with_twin
from memopt.kernels.site import Sites, contiguous, part_bytes, storage_bytes, value_of

ATEN = torch.ops.aten


def _forward(x: Tensor, parts: int, *arguments: Any) -> Any:
    result = None
    for part in split(len(x), parts):
        one = ATEN.convolution(x[part], *arguments)
        if result is None:
            result = one.new_empty((len(x), *one.shape[1:]))
        result[part] = one
        del one  # not beside the next part's
    return result


def _forward_over(x: Tensor, parts: int, *arguments: Any) -> Any:
    for part in split(len(x), parts):
        x[part] = ATEN.convolution(x[part], *arguments)
    return x


def _input_gradient(g: Tensor, shape: Any, *arguments: Any) -> Any:
    """Return a tuple of a convolution's input gradient alone, without its input's values."""
    # The input's values are not used (MONeT appendix C); oneDNN copies it all the same.
    like = g.new_empty(()).expand(shape)
    return ATEN.convolution_backward(g, like, *arguments, [True, False, False])[:1]


def _input_gradient_into(result: Tensor, g: Tensor, parts: int, *arguments: Any) -> Any:
    for part in split(len(g), parts):
        (result[part],) = _input_gradient(g[part], result[part].shape, *arguments)
    return (result,)


def _input_gradient_of(*arguments: Any) -> Any:
    return ATEN.convolution_backward(*arguments, [True, False, False])[:1]


def _weight_gradient(bias: bool, *arguments: Any) -> Any:
    return ATEN.convolution_backward(*arguments, [False, True, bias])[1:]


def _summed_weight_gradients(
    parts: Iterable[tuple[Tensor, Tensor]], bias: bool, *arguments: Any
) -> Any:
    """Return (gradient of the weight, of the bias or None): the sum over parts of the batch.

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
        del found
    return tuple(total)


def _weight_gradient_split(g: Tensor, x: Tensor, parts: int, bias: bool, *arguments: Any) -> Any:
    pieces = ((g[part], x[part]) for part in split(len(g), parts))
    return _summed_weight_gradients(pieces, bias, *arguments)


def _weight_gradient_again(
    g: Tensor, u: Tensor, convolution: Any, norm: Any, relu: bool, parts: int, *more: Any
) -> Any:
    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        for part in split(len(g), parts):
            x = ATEN.convolution(u[part], *convolution)
            if norm is not None:
                (x,) = BATCH_AGAIN.over(x, *norm)  # type: ignore[misc]  # it has one
            yield g[part], ATEN.relu_(x) if relu else x

    return _summed_weight_gradients(pieces(), *more)


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
INPUT = Kernel("convolution_backward.input.2", _input_gradient)
WEIGHT_SPLIT = Kernel("convolution_backward.weight.split", _weight_gradient_split)
WEIGHT_AGAIN = Kernel("convolution_backward.weight.again", _weight_gradient_again)
KEEPING = Kernel("convolution_backward.input", _input_gradient_of)
WEIGHT = Kernel("convolution_backward.weight", _weight_gradient)
NATIVE = Kernel("convolution.native", _native(ATEN.convolution))
NATIVE_BACKWARD = Kernel("convolution_backward.native", _native(ATEN.convolution_backward))
CUDNN = Kernel("convolution.cudnn", _cudnn)


CONVOLUTION = "aten.convolution.default"
CONVOLUTION_BACKWARD = "aten.convolution_backward.default"
LIBRARIES = (CUDNN, NATIVE, NATIVE_BACKWARD)
"""Kernels of `attach_libraries`."""
SPLITS = (2, PARTS)
"""Numbers of parts of the batch."""


def _wanted(backward: Node) -> tuple[bool, bool, bool]:
    """Return whether a convolution's backward gives gradients of input, weight and bias."""
    mask: Any = backward.args[-1]
    return tuple(mask)


def attach(sites: Sites) -> None:
    """Attach alternatives to convolutions of contiguous images, and to those of their backwards
    that give the gradients of both input and weight."""
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
                    parts=parts,
                )
    for backward in sites.calls(CONVOLUTION_BACKWARD):
        if all(_wanted(backward)[:2]):
            _attach_backward(sites, backward)


def _attach_backward(sites: Sites, backward: Node) -> None:
    given = backward.args[:-1]
    g, x, *more = given
    by_input, *by_weight = (sites.result(backward, i) for i in range(3))
    bias = _wanted(backward)[2]
    many = len(value_of(x)) >= PARTS
    alone: Any = {"workspace_bytes": storage_bytes(more[0]), "like": 0.5, "parts": 1}
    # First the weight's: then its input can be freed.
    sites.add(
        backward, "weight gradient", WEIGHT, (bias, *given), tuple(by_weight), like=0.5, parts=1
    )
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
            parts=PARTS,
        )
    if not contiguous(x):
        sites.add(backward, "input gradient", KEEPING, tuple(given), (by_input,), **alone)
        return
    shape = tuple(value_of(x).shape)
    sites.add(backward, "input gradient", INPUT, (g, shape, *more), (by_input,), **alone)
    if many and contiguous(g):
        # Over the gradient, if the shapes are alike.
        sites.add(
            backward,
            "input gradient split",
            INPUT_SPLIT,
            (g, PARTS, shape, *more),
            (by_input,),
            workspace_bytes=part_bytes(x) + storage_bytes(more[0]),
            exact=False,
            like=0.5,
            moved_bytes=2 * storage_bytes(x),
            parts=PARTS,
        )


def attach_again(sites: Sites) -> None:
    """Attach to a convolution's backward an alternative that recomputes its input from the
    convolution before, through batch norm and ReLU if they lie between."""
    for backward in sites.calls(CONVOLUTION_BACKWARD):
        g, x, *arguments, _ = backward.args
        relu = sites.producer(x, "aten.relu.default")
        normed = relu.args[0] if relu is not None else x
        norm = sites.producer(normed, BATCH_NORM)
        made = sites.producer(norm.args[0] if norm is not None else normed, CONVOLUTION)
        by_input, by_weight, by_bias = _wanted(backward)
        if not by_weight or made is None or len(value_of(x)) < PARTS:
            continue
        u, *convolution = made.args
        if not contiguous(g, x, u):
            continue
        statistics = None
        if norm is not None:
            mean, inverse = (sites.result(norm, i) for i in (1, 2))
            if mean is None or value_of(x).dtype != value_of(mean).dtype or inverse is None:
                continue
            statistics = (*norm.args[1:3], mean, inverse)
        again = tuple((call, 1.0) for call in (made, norm, relu) if call is not None)
        sites.add(
            backward,
            "weight gradient again",
            WEIGHT_AGAIN,
            (g, u, tuple(convolution), statistics, relu is not None, PARTS, by_bias, *arguments),
            (sites.result(backward, 1), sites.result(backward, 2)),
            workspace_bytes=part_bytes(x) + storage_bytes(arguments[0]),
            exact=False,
            like=((backward, 0.5 if by_input else 1.0), *again),
            parts=PARTS,
        )


def attach_libraries(sites: Sites) -> None:
    """Attach libraries' other algorithms to convolutions of contiguous images: on the CPU ATen's
    own kernels in place of oneDNN's, on CUDA cuDNN's deterministic algorithms or the fastest of a
    trial. An estimate cannot tell them apart and leaves them out (`LIBRARIES`)."""
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
