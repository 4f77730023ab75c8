"""Explains why AOTAutograd derives no joint graph from dynamo's, and what to do."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from memopt.capture.remedies import said_of_selection, said_remedy, without_labels
from memopt.capture.uncaptured import first_line, line_of
from memopt.errors import CaptureError
from memopt.step.inputs import Call
from memopt.step.nodes import module_path

COUNTED = "counted"
"""Key in a graph's meta: why Python numbers that the forward changes, traced as tensors' numbers,
are refused where they decide sizes or places."""
_TIMES_CHANGED = "_tensor_version"
"""Torch's operator that stands for `tensor._version` in a graph."""


def not_derived(
    model: nn.Module, traced: GraphModule, call: Call, error: Exception
) -> CaptureError:
    """Make the error for what AOTAutograd refused in Dynamo's graph of a model: it says in which
    modules, and what to do about it."""
    node, text = _refused_at(model, traced, call, error)
    return CaptureError(text) if node is None else refused_in(node, text)


def refused_in(node: Node, text: str) -> CaptureError:
    """Make the error for a node of Dynamo's graph, and for the modules that the node is in."""
    refused = CaptureError(text)
    refused.modules = _modules_of(node)
    return refused


def _modules_of(node: Node) -> tuple[str, ...]:
    stack = node.meta.get("nn_module_stack", {}).values()
    return tuple(filter(None, (module_path(path) for path, _ in stack)))


def _refused_at(
    model: nn.Module, traced: GraphModule, call: Call, error: Exception
) -> tuple[Node | None, str]:
    """Return the node at which AOTAutograd fails, None if that is not known, and what to do."""
    first = first_line(error) or repr(error)
    node = _shape_from_data(traced)
    if node is None and "nonzero" in first:
        node = _selection(traced)
    if node is not None:
        where = line_of(node)
        remedy = said_of_selection(where) or (
            "multiply by a mask or use torch.where instead of selecting by a condition (y[mask], "
            "nonzero, unique), or make the part around it whose results have the same shapes one "
            "operator (memopt.opaque)" + without_labels(model, call, _modules_of(node))
        )
        return node, (
            f"a shape depends on the values of a tensor{where}: {first}. memopt needs the same "
            f"shapes in every step: {remedy}"
        )
    node = _value_read(traced) if "_local_scalar_dense" in first else None
    if node is not None and _is_given_number(traced):
        return node, (
            f"the model computes with a Python number{line_of(node)} that is another one from call "
            "to call, which no graph can hold: keep it in a tensor (a buffer that is updated in "
            "place, rate.fill_(0.5)), or pass it as one"
        )
    if node is not None and COUNTED in traced.meta:
        return node, traced.meta[COUNTED]
    if node is not None:
        return node, (
            f"the model reads a number out of a tensor{line_of(node)}, which no graph can hold: "
            "leave out a check of values, and compute with the tensor itself in place of its "
            "number, by tensor operators (h / h.max(), torch.where)"
            + without_labels(model, call, _modules_of(node))
        )
    return None, _why_no_backward(traced, error, first)


def _why_no_backward(traced: GraphModule, error: Exception, first: str) -> str:
    changes = any(_TIMES_CHANGED in str(node.target) for node in traced.graph.nodes)
    said = said_remedy(_TIMES_CHANGED if changes else str(error))
    if said is not None:
        return f"the model cannot be captured as one graph{_of_numbers(traced)}: {said}"
    return (
        f"the model's backward cannot be traced: {first}. Look for operators without a derivative, "
        "in-place updates of leaf parameters, or double backward in the forward"
    )


def _shape_from_data(traced: GraphModule) -> Node | None:
    """Return the node that makes a tensor whose shape dynamo left open; None if there is none."""
    node: Node
    for node in traced.graph.nodes:
        value = _example(node)
        if isinstance(value, torch.Tensor) and any(
            isinstance(size, torch.SymInt) for size in value.shape
        ):
            return node
    return None


def _selection(traced: GraphModule) -> Node | None:
    """Return the node that reads or writes elements selected by a boolean tensor."""
    node: Node
    for node in traced.graph.nodes:
        if node.target in (operator.getitem, operator.setitem):
            index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
            values = [_example(one) for one in index if isinstance(one, Node)]
            if any(isinstance(one, Tensor) and one.dtype is torch.bool for one in values):
                return node
    return None


def _value_read(traced: GraphModule) -> Node | None:
    """Return the node that reads a number out of a tensor; None if there is none."""
    numbers = (torch.SymInt, torch.SymFloat, torch.SymBool)
    return next((n for n in traced.graph.nodes if isinstance(_example(n), numbers)), None)


def _is_given_number(traced: GraphModule) -> bool:
    """Return whether the first number read is a Python number that torch.compile hands over."""
    for node in traced.graph.nodes:
        if node.target == "item":
            return bool(node.args[0].op == "placeholder")
    return False


def _of_numbers(traced: GraphModule) -> str:
    """Return the line that reads a number, or computes in numpy; "" if there is none."""
    found = (n for n in traced.graph.nodes if type(n.target).__name__.startswith("numpy_"))
    node = _value_read(traced) or next(found, None)
    return "" if node is None else line_of(node)


def _example(node: Node) -> Any:
    return node.meta.get("example_value", node.meta.get("val"))
