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


def symbols_of(nodes: Sequence[Node]) -> Symbols | None:
    """Return the sizes of a joint graph's values; None: not all are polynomials in one length."""
    values = [
        value
        for node in nodes
        for value in pytree.tree_leaves((node.meta.get("val"), node.args))
        if not isinstance(value, Node)
    ]
    env = next((one.fake_mode.shape_env for one in values if isinstance(one, FakeTensor)), None)
    if env is None or env.replacements or env.deferred_runtime_asserts:
        return None
    found: set[Any] = set()
    for value in values:
        if isinstance(value, Tensor):
            numbers = (*value.shape, *value.stride(), value.storage_offset())
            found.update(one.node.expr for one in numbers if isinstance(one, torch.SymInt))
        elif isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            found.add(value.node.expr)
    sizes, positive = _without_maxima(found)
    symbols = {symbol for one in sizes for symbol in one.free_symbols}
    if len(symbols) != 1 or set(env.var_to_range) != symbols:
        return None
    (length,) = symbols
    if not all(one.is_polynomial(length) for one in sizes):
        return None
    degree = max(int(one.as_poly(length).degree()) for one in sizes)
    guards = tuple({*(guard.expr for guard in env.guards), *positive})
    span = env.var_to_range[length]
    if degree > 2 or any(one.free_symbols != symbols for one in guards):
        return None

    def holds(value: int) -> bool:
        if not span.lower <= value <= span.upper:
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
