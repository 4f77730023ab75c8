"""Which of a graph's movable tensors a program keeps on the host between steps.

One that a Free, SwapIn or SwapOut names begins and ends on the host: a SwapIn brings it before it
is read, a Free drops the device copy, and after an update has changed it a SwapOut writes the new
value over the host copy before that. The others are resident, as in a graph without `movable`.
"""

from __future__ import annotations

from collections.abc import Iterable

from memopt.models.graph import Graph, Operator, TensorKind
from memopt.programs.instructions import OfTensor

CHANGED_KINDS = frozenset({TensorKind.PARAMETER, TensorKind.OPTIMIZER_STATE})
"""What an update changes in place."""


def moved_tensors(graph: Graph, instructions: Iterable[object]) -> frozenset[int]:
    """The movable tensors that a program moves."""
    if not graph.movable:
        return frozenset()
    named = {x.tensor for x in instructions if isinstance(x, OfTensor)}
    return frozenset(named.intersection(graph.movable))


def resident_under(graph: Graph, instructions: Iterable[object]) -> frozenset[int]:
    """The tensors that are on the device during the whole step under a program."""
    return graph.resident - moved_tensors(graph, instructions)


def resident_bytes_under(graph: Graph, instructions: Iterable[object]) -> int:
    """Bytes that are on the device during the whole step under a program."""
    moved = moved_tensors(graph, instructions)
    return graph.resident_bytes - sum(graph.tensors[t].size_bytes for t in moved)


def changed_by(graph: Graph, operator: Operator) -> list[int]:
    """The tensors that an operator changes in place: an update's parameters and their state."""
    if not operator.changes_in_place:
        return []
    return [t for t in dict.fromkeys(operator.reads) if graph.tensors[t].kind in CHANGED_KINDS]
