"""Kernels of convolutions: in parts of the batch, one gradient alone, a library's other algorithms.

A library may choose another algorithm for another batch size, so split kernels are not declared
exact. ATen computes the two gradients separately in any case: each alone has the same bits (tested
on the CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from memopt.kernels.kernel import Kernel, split, with_twin

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


def input_gradient(g: Tensor, shape: Any, *arguments: Any) -> Any:
    """Return a tuple of a convolution's input gradient alone, without its input's values."""
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
