"""Recomputes the output of a norm as a pointwise function of its input and its statistics.

A norm's statistics are small, and its backward reads them anyway: with them a kernel recomputes
the output without another reduction.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from memopt.step.build import Lowering
from memopt.step.results import held_by
from memopt.torch_private.operators import aten as _ATEN


@dataclass(frozen=True)
class _Norm:
    """Positions of the operands of a norm's output in its call.

    Attributes:
        weight, bias: positions among its arguments; None: it has none.
        statistics: positions of mean and inverse deviation among its results; None: no mean.
        by_channel: whether they, and weight and bias, belong to the channels of images.
    """

    weight: int
    bias: int | None
    statistics: tuple[int | None, int]
    by_channel: bool = False


_NORMS: dict[Any, _Norm] = {
    _ATEN.native_layer_norm.default: _Norm(2, 3, (1, 2)),
    _ATEN._fused_rms_norm.default: _Norm(2, None, (None, 1)),
    _ATEN._native_batch_norm_legit_functional.default: _Norm(1, 2, (1, 2), by_channel=True),
}
_TRAINING = 5
"""Position of the argument of a batch norm that says whether it computes statistics."""


def parts_of(call: Node) -> tuple[Node | None, ...] | None:
    """Return the operands of a norm's output: input, mean, inverse deviation, weight and bias, None
    for a missing one; None for other calls, and norms whose statistics nothing names."""
    form = _NORMS.get(call.target)
    if form is None or (form.by_channel and call.args[_TRAINING] is not True):
        return None
    results: dict[Any, Node] = {u.args[1]: u for u in call.users if u.target is operator.getitem}
    mean, inverse = map(results.get, form.statistics)
    if inverse is None or (mean is None and form.statistics[0] is not None):
        return None
    arguments: dict[Any, Any] = dict(enumerate(call.args))
    return (arguments[0], mean, inverse, arguments.get(form.weight), arguments.get(form.bias))


def statistics_of(lowering: Lowering, op: int) -> tuple[int, ...] | None:
    """Return the tensors from which a norm's output can be recomputed; None: no norm."""
    parts = parts_of(lowering.nodes[op])
    return None if parts is None else held_by(parts, lowering.storages)


def output_of(graph: FxGraph, call: Node, copy: Callable[[Node], Node]) -> Node:
    """Add a norm's output to a graph that has copies of its operands."""
    parts = parts_of(call)
    assert parts is not None
    x, mean, inverse, weight, bias = parts
    assert x is not None
    assert inverse is not None
    value = x.meta["val"]
    computing = torch.promote_types(value.dtype, torch.float32)
    form = _NORMS[call.target]

    def wide(node: Node) -> Node:
        """Add the copy of an operand, shaped to broadcast with the norm's input."""
        one = copy(node)
        if form.by_channel and value.dim() > 2:
            shape = [1, -1, *[1] * (value.dim() - 2)]
            one = graph.call_function(_ATEN.view.default, (one, shape))
        return one

    result = _converted(graph, copy(x), value.dtype, computing)
    if mean is not None:
        result = graph.call_function(_ATEN.sub.Tensor, (result, wide(mean)))
    result = graph.call_function(_ATEN.mul.Tensor, (result, wide(inverse)))
    if weight is not None:
        result = graph.call_function(_ATEN.mul.Tensor, (result, wide(weight)))
    if bias is not None:
        result = graph.call_function(_ATEN.add.Tensor, (result, wide(bias)))
    return _converted(graph, result, computing, call.meta["val"][0].dtype)


def _converted(graph: FxGraph, node: Node, has: torch.dtype, dtype: torch.dtype) -> Node:
    if has == dtype:
        return node
    return graph.call_function(_ATEN._to_copy.default, (node,), {"dtype": dtype})
