"""Symbolic sizes: a trace in which one length varies, what it relied on, and its sizes in that
length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from memopt.torch_private import pytree
from memopt.torch_private.access import private
from memopt.torch_private.aot import FakeTensor


def of_varying_length(tensor: Tensor, dims: Iterable[int]) -> Tensor:
    """Return a tensor for a trace in which these dimensions may have any length."""
    made = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    for dim in dims:
        private("torch._dynamo.maybe_mark_dynamic")(made, dim)
    return made


def placeholder_values(traced: Any) -> list[Any]:
    """Return the fake values of a traced graph's inputs; None where one has none."""
    return [node.meta.get("val") for node in traced.graph.find_nodes(op="placeholder")]


@dataclass(frozen=True)
class Symbols:
    """The sizes of a joint graph that was traced with one length varying.

    Attributes:
        degree: the largest degree in the length, 1 or 2, of any size: all are polynomials.
        holds: whether a length is one for which every decision of the trace is the same.
    """

    degree: int
    holds: Callable[[int], bool]


def symbols_of(nodes: Sequence[Node], at: int) -> Symbols | None:
    """Return the sizes of a joint graph's values; None: not all are polynomials in one length. Each
    dimension that varies may have a symbol: all are the length."""
    values = [
        value
        for node in nodes
        for value in pytree.tree_leaves((node.meta.get("val"), node.args))
        if not isinstance(value, Node)
    ]
    env = next((one.fake_mode.shape_env for one in values if isinstance(one, FakeTensor)), None)
    if env is None or not env.var_to_range or env.deferred_runtime_asserts:
        return None
    length, *_ = symbols = tuple(env.var_to_range)
    same = dict.fromkeys(symbols, length)
    if any(not one.name.startswith("s") for one in symbols) or any(
        one.xreplace(same) != length for one in env.replacements.values()
    ):
        return None  # a number that depends on values, or one length only
    found: set[Any] = set()
    for value in values:
        if isinstance(value, Tensor):
            numbers = (*value.shape, *value.stride(), value.storage_offset(), value.numel())
            found.update(one.node.expr for one in numbers if isinstance(one, torch.SymInt))
        elif isinstance(value, (torch.SymInt, torch.SymFloat)):
            found.add(value.node.expr)
    sizes, positive = _without_maxima(one.xreplace(same) for one in found)
    guards = tuple({*(guard.expr.xreplace(same) for guard in env.guards), *positive})
    if any(one.free_symbols - {length} for one in (*sizes, *guards)):
        return None
    if not all(one.is_polynomial(length) for one in sizes):
        return None
    degree = max(int(one.as_poly(length).degree()) for one in sizes)
    bools = {value.node.expr for value in values if isinstance(value, torch.SymBool)}
    answers = {one: one.subs(length, at) for one in (flag.xreplace(same) for flag in bools)}
    spans = tuple(env.var_to_range.values())
    if not 1 <= degree <= 2:
        return None

    def holds(value: int) -> bool:
        if not all(span.lower <= value <= span.upper for span in spans):
            return False
        if any(flag.subs(length, value) != answer for flag, answer in answers.items()):
            return False
        return all(guard.subs(length, value) == True for guard in guards)  # noqa: E712  # sympy's

    return Symbols(degree, holds)


def _without_maxima(sizes: Iterable[Any]) -> tuple[set[Any], set[Any]]:
    """Return sizes in which max(1, n), of a dimension's stride, is n, and the conditions for that:
    n >= 1."""
    conditions: set[Any] = set()

    def is_maximum(one: Any) -> bool:
        return type(one).__name__ == "Max" and len(one.args) == 2 and 1 in one.args

    def larger(*numbers: Any) -> Any:
        (size,) = (one for one in numbers if one != 1)
        conditions.add(size >= 1)
        return size

    return {one.replace(is_maximum, lambda found: larger(*found.args)) for one in sizes}, conditions
