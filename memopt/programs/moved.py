"""The movable tensors of a graph that a program keeps on the host between steps.

A movable tensor that a Free, SwapIn or SwapOut names begins and ends on the host. A SwapIn brings
it before it is read. After an update has changed it, a SwapOut writes the new value over the host
copy; then a Free drops the device copy. A tensor that an update on the host changes also begins and
ends there, and is not on the device during the update. The others are resident, as in a graph
without `movable`.

In a repeated step (`Graph.repeated`), a tensor whose first such instruction is a SwapOut begins on
the device: the last step's update has changed it there, and only this step's SwapOut writes the new
value over the host copy. It ends on the device again, changed. So no transfer is under way between
two steps, and each tensor has one current value.
"""

from __future__ import annotations

from collections.abc import Iterable

from memopt.models.graph import Graph, Operator, TensorKind
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Instruction, OfTensor

CHANGED_KINDS = frozenset({TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE})
"""Kinds of tensors that an update changes in place."""


def moved_tensors(graph: Graph, instructions: Iterable[object]) -> frozenset[int]:
    """Return the movable tensors that a program moves."""
    if not graph.movable:
        return frozenset()
    listed = list(instructions)
    named = {x.tensor for x in listed if isinstance(x, OfTensor)}
    for run in updates_on_host(graph, listed):
        named.update(graph.operators[run.op].reads)
    return frozenset(named.intersection(graph.movable))


def carried_over(graph: Graph, instructions: Iterable[Instruction]) -> tuple[int, ...]:
    """Return the moved tensors that stay on the device from the update of one step into the next
    step, ascending."""
    if not graph.repeated:
        return ()
    goes_first: dict[int, bool] = {}
    for instruction in instructions:
        if isinstance(instruction, OfTensor):
            goes = bool(instruction.effects(graph).host_begins)
            goes_first.setdefault(instruction.tensor, goes)
    return tuple(t for t in sorted(graph.movable) if goes_first.get(t))


def updates_on_host(graph: Graph, instructions: Iterable[object]) -> list[Compute]:
    """Return the updates that the host runs."""
    named = (x for x in instructions if type(x) is Compute and x.implementation is not None)
    return [x for x in named if variant(graph.operators[x.op], x.implementation).on_host]


def host_scratch_bytes(graph: Graph, instructions: Iterable[object]) -> int:
    """Return the host memory beside all copies: the workspace of the largest update on the host, of
    which one runs at a time."""
    runs = updates_on_host(graph, instructions)
    needs = (variant(graph.operators[x.op], x.implementation).workspace_bytes for x in runs)
    return max(needs, default=0)


def resident_under(graph: Graph, instructions: Iterable[object]) -> frozenset[int]:
    """Return the tensors that are on the device during the whole step under a program."""
    return graph.resident - moved_tensors(graph, instructions)


def resident_bytes_under(graph: Graph, instructions: Iterable[object]) -> int:
    """Return the bytes that are on the device during the whole step under a program."""
    moved = moved_tensors(graph, instructions)
    return graph.resident_bytes - sum(graph.tensors[t].size_bytes for t in moved)


def changed_by(graph: Graph, operator: Operator) -> list[int]:
    """Return the tensors that an operator changes in place: an update's parameters and state."""
    if not operator.changes_in_place:
        return []
    return [t for t in dict.fromkeys(operator.reads) if graph.tensors[t].kind in CHANGED_KINDS]
