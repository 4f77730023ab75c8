"""Compares a plan's priced graph with a model's graph, and prices that with the plan's figures.

A plan file brings its own graph. Only its times are trusted, and memory where it counts more than
the model's graph does: the program is checked against a graph that is captured anew
(`memopt.stages.figures`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from memopt.models.graph import Graph, Implementation, Operator, Tensor

Resized = tuple[tuple[int, int], ...]
"""(tensor, its size in the captured graph, bytes) of tensors that their kernels make larger."""


def resized(captured: Graph, priced: Graph) -> Resized:
    """Return the tensors of a captured graph that have another size in the priced one."""
    pairs = zip(captured.tensors, priced.tensors, strict=False)
    return tuple(
        (index, before.size_bytes)
        for index, (before, after) in enumerate(pairs)
        if before.size_bytes != after.size_bytes
    )


def as_captured(priced: Graph, sizes: Resized = ()) -> Graph:
    """Return the structure of the graph that a priced graph was made from: without implementations,
    the tensors that only they write, and the sizes that were measured.

    Raises:
        ValueError: the sizes are of no tensors of the graph.
    """
    plain = without_implementations(priced)
    tensors = list(plain.tensors)
    for index, size_bytes in sizes:
        if not 0 <= index < len(tensors):
            raise ValueError(f"there is no tensor {index} of another size")
        tensors[index] = replace(tensors[index], size_bytes=size_bytes)
    operators = [replace(one, in_place=()) for one in plain.operators]
    return replace(plain, tensors=tuple(tensors), operators=tuple(operators), allocator_owned=())


def without_implementations(graph: Graph) -> Graph:
    """Return a graph without implementations and the tensors (its last) that only they write."""
    used = {t for operator in graph.operators for t in (*operator.reads, *operator.writes)}
    used |= {*graph.resident, *graph.outputs, *graph.gradients, *graph.tangents}
    count = max(used, default=-1) + 1
    return replace(
        graph,
        tensors=graph.tensors[:count],
        operators=tuple(replace(one, implementations=()) for one in graph.operators),
        allocator_owned=tuple(t for t in graph.allocator_owned if t < count),
    )


def graph_difference(planned: Graph, found: Graph) -> str | None:
    """Return the first difference, for people, between a planned graph and the one that was found.

    Times and workspaces are not compared, nor is memory where the planned graph counts more.
    """
    return next(_differences(planned, found), None)


def _differences(planned: Graph, found: Graph) -> Iterator[str]:
    for one, other in zip(planned.tensors, found.tensors, strict=False):
        if (one.name, one.kind) != (other.name, other.kind):
            planned_one = f"the {one.kind} {one.name!r}"
            yield f"the plan has {planned_one} where the model has the {other.kind} {other.name!r}"
        elif one.size_bytes < other.size_bytes:
            sizes = f"{one.size_bytes} bytes in the plan and {other.size_bytes} in the model"
            yield f"the {one.kind} {one.name!r} has {sizes}"
    if len(planned.tensors) != len(found.tensors):
        yield f"the plan has {len(planned.tensors)} tensors and the model {len(found.tensors)}"
    for mine, yours in zip(planned.operators, found.operators, strict=False):
        yield from _operator_differences(mine, yours)
    if len(planned.operators) != len(found.operators):
        count = f"{len(planned.operators)} operators and the model {len(found.operators)}"
        yield f"the plan has {count}"
    for what in ("outputs", "gradients", "tangents", "written_back"):
        if getattr(planned, what) != getattr(found, what):
            values = f"{getattr(planned, what)}, the model's {getattr(found, what)}"
            yield f"the plan's {what.replace('_', ' ')} are {values}"
    if found.tangents_held and not planned.tangents_held:
        yield "the plan drops gradients of outputs that this torch holds during the backward"
    if planned.extra_resident_bytes < found.extra_resident_bytes:
        more = f"{planned.extra_resident_bytes}, of the model {found.extra_resident_bytes}"
        yield f"resident bytes outside of the plan's graph are {more}"


_STRUCTURE = ("name", "target", "phase", "reads", "writes", "recomputable", "random")


def _operator_differences(mine: Operator, yours: Operator) -> Iterator[str]:
    owner = f"the operator {mine.name!r}"
    for field in _STRUCTURE:
        if getattr(mine, field) != getattr(yours, field):
            values = f"{getattr(mine, field)!r}, the model's {getattr(yours, field)!r}"
            yield f"{owner}: the plan's {field} is {values}"
    if not set(mine.in_place) <= set(yours.in_place):
        yield f"{owner}: the plan overwrites {mine.in_place}, the model {yours.in_place}"
    known = {choice.name: choice for choice in yours.implementations}
    for choice in mine.implementations:
        other = known.get(choice.name)
        if other is None:
            yield f"{owner}: the model has no implementation {choice.name!r}"
        elif _form(choice) != _form(other) or not set(choice.in_place) <= set(other.in_place):
            yield f"{owner}: its implementation {choice.name!r} is another in the model"


def _form(choice: Implementation) -> tuple[object, ...]:
    return choice.reads, choice.writes, choice.exact


def with_figures(
    found: Graph,
    planned: Graph,
    sizes: Mapping[int, int] | None = None,
    workspaces: Mapping[tuple[int, str | None], int] | None = None,
) -> Graph:
    """Return a graph with the figures of a planned one that has the same structure.

    Args:
        found: the structure.
        planned: its times; and its sizes and workspaces, as minimums.
        sizes: tensor → bytes it has here; counted if that is more.
        workspaces: (operator, implementation) → bytes its kernel takes here; counted
            if that is more.
    """
    known = sizes or {}
    needed = workspaces or {}
    tensors = tuple(
        replace(one, size_bytes=max(one.size_bytes, other.size_bytes, known.get(index, 0)))
        for index, (one, other) in enumerate(zip(found.tensors, planned.tensors, strict=True))
    )
    operators = []
    for index, (one, other) in enumerate(zip(found.operators, planned.operators, strict=True)):
        priced = {choice.name: choice for choice in other.implementations}
        choices = tuple(
            replace(
                choice,
                time_s=priced[choice.name].time_s,
                workspace_bytes=max(
                    priced[choice.name].workspace_bytes, needed.get((index, choice.name), 0)
                ),
                in_place=_of_same_size(tensors, choice.in_place, choice.writes or one.writes),
            )
            for choice in one.implementations
            if choice.name in priced
        )
        operators.append(
            replace(
                one,
                time_s=other.time_s,
                workspace_bytes=max(other.workspace_bytes, needed.get((index, None), 0)),
                in_place=_of_same_size(tensors, one.in_place, one.writes),
                implementations=choices,
            )
        )
    return replace(
        found,
        tensors=tensors,
        operators=tuple(operators),
        boundary_bytes=planned.boundary_bytes,
        extra_resident_bytes=planned.extra_resident_bytes,
        tangents_held=planned.tangents_held,
    )


def _of_same_size(
    tensors: tuple[Tensor, ...], in_place: tuple[int, ...], writes: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the tensors of the size of the first output, whose storage it can take over."""
    return tuple(t for t in in_place if tensors[t].size_bytes == tensors[writes[0]].size_bytes)
