"""Computes dropout on the CPU as eager does, in a captured graph.

Eager multiplies by noise that was divided by 1 - p in the input's dtype. The trace has CUDA's
`native_dropout`, whose boolean mask takes less memory, but which multiplies by 1 / (1 - p), rounded
once: a different number for some p in float32 (0.15), and in half precision for most p in the
backward. Such dropouts get eager's steps in the forward, and eager's number in the backward.
"""

from __future__ import annotations

import functools
import math
import operator

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import has_side_effect

from memopt.step.operators import Substitute

_ATEN = torch.ops.aten


def rounded(value: float, dtype: torch.dtype) -> float:
    """Round a number to a floating-point type, ties to even."""
    bits = 1 - round(math.log2(torch.finfo(dtype).eps))
    mantissa, exponent = math.frexp(value)
    return math.ldexp(round(math.ldexp(mantissa, bits)), exponent - bits)


@functools.cache
def kept_scale(p: float, dtype: torch.dtype) -> float:
    """Return the number that eager multiplies kept elements by (`_dropout_impl` in ATen's
    Dropout.cpp; half precision divides in float32)."""
    if p == 1:
        return 0.0
    computing = torch.float64 if dtype == torch.float64 else torch.float32
    return rounded(rounded(1 / rounded(1 - p, computing), computing), dtype)


def noise_of(x: torch.Tensor, p: float) -> torch.Tensor:
    """Draw the noise that eager multiplies `x` by, in the memory order of a tensor laid out as `x`;
    if nothing is kept, no numbers are drawn."""
    noise = torch.empty_like(x)
    return noise.zero_() if p == 1 else noise.bernoulli_(1 - p).div_(1 - p)


def dropout(x: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute `native_dropout` with eager's bits on the CPU: the result and the mask of kept
    elements."""
    if x.device.type != "cpu" or train is False or x.numel() == 0:
        result: tuple[torch.Tensor, torch.Tensor] = _ATEN.native_dropout(x, p, train)
        return result
    noise = noise_of(x, p)
    return x.mul(noise), noise.to(torch.bool)


EAGER_DROPOUT = has_side_effect(
    Substitute(_ATEN.native_dropout.default, lambda _, *args: dropout(*args))
)
"""It draws: passes of AOTAutograd keep it where nothing reads its results."""


def dropout_as_eager(module: GraphModule) -> None:
    """Give the dropouts of a captured graph that run on the CPU eager's numbers."""
    found = [node for node in module.graph.nodes if _drops(node)]
    for node in found:
        for result in node.users:
            if result.target is operator.getitem and result.args[1] == 1:
                _scale_backwards(result, kept_scale(*_p_and_dtype(node)))
        if _differs(*_p_and_dtype(node)):
            node.target = EAGER_DROPOUT


def _drops(node: Node) -> bool:
    if node.target is not _ATEN.native_dropout.default or node.args[2] is False:
        return False
    value = node.args[0].meta["val"]  # type: ignore[union-attr]
    return bool(value.device.type == "cpu")


def _p_and_dtype(node: Node) -> tuple[float, torch.dtype]:
    return float(node.args[1]), node.args[0].meta["val"].dtype  # type: ignore[union-attr, arg-type]


def _differs(p: float, dtype: torch.dtype) -> bool:
    """Return whether the kernel's forward multiplies by another number, or draws more numbers."""
    return p == 1 or kept_scale(p, dtype) != rounded(1 / (1 - p), dtype)


def _scale_backwards(mask: Node, scale: float) -> None:
    for backward in list(mask.users):
        if backward.target is _ATEN.native_dropout_backward.default and backward.args[1] is mask:
            backward.update_arg(2, scale)
