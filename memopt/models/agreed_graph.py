"""Merges the graphs of ranks that have each priced one step: the largest figure of any rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from memopt.models.graph import Graph, Implementation, Operator
from memopt.models.same_graph import graph_difference

Priced = TypeVar("Priced", Operator, Implementation)


def agreed_graph(graphs: Sequence[Graph]) -> Graph:
    """Merge the ranks' graphs: sizes, workspaces and times are the largest of any rank, so that a
    plan fits each of them. Ranks whose shards are smaller have smaller tensors.

    Raises:
        ValueError: they are not of the same step; the message says, for people, what differs.
    """
    agreed = graphs[0]
    for position, other in enumerate(graphs[1:], 1):
        if (len(agreed.tensors), len(agreed.operators)) == (
            len(other.tensors),
            len(other.operators),
        ):
            agreed, other = _with_largest(agreed, other), _with_largest(other, agreed)
        found = graph_difference(agreed, other)
        if found is not None:
            raise ValueError(f"rank {position} runs another step than rank 0: {found}")
    return agreed


def _with_largest(one: Graph, other: Graph) -> Graph:
    """Return a graph with the larger figures; in place only where both may overwrite."""
    tensors = tuple(
        replace(a, size_bytes=max(a.size_bytes, b.size_bytes))
        for a, b in zip(one.tensors, other.tensors, strict=True)
    )
    operators = tuple(map(_operator, one.operators, other.operators))
    return replace(
        one,
        tensors=tensors,
        operators=operators,
        boundary_bytes=max(one.boundary_bytes, other.boundary_bytes),
        extra_resident_bytes=max(one.extra_resident_bytes, other.extra_resident_bytes),
        allocator_owned=tuple(sorted({*one.allocator_owned, *other.allocator_owned})),
        movable=tuple(t for t in one.movable if t in other.movable),
    )


def _operator(one: Operator, other: Operator) -> Operator:
    known = {choice.name: choice for choice in other.implementations}
    choices = (
        _costlier(choice, known[choice.name])
        for choice in one.implementations
        if choice.name in known
    )
    return replace(_costlier(one, other), implementations=tuple(choices))


def _costlier(one: Priced, other: Priced) -> Priced:
    """Return an operator, or an implementation, with the larger of two ranks' figures."""
    return replace(
        one,
        time_s=max(one.time_s, other.time_s),
        workspace_bytes=max(one.workspace_bytes, other.workspace_bytes),
        in_place=tuple(t for t in one.in_place if t in other.in_place),
    )
