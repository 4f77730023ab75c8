"""Divides a captured step into regions: sets of operators that one kernel may compute.

Every operator has a level: 0 if it reads nothing computed, else the highest level of its sources,
where a source counts one more if only one of the two is an anchor, or if their phases differ.
Operators of one level that are no anchors make a region if they are connected, or read the same
tensor. No path between two of them leads through an operator outside: an anchor on it would raise
the level. So regions are convex, and the graph of regions and anchors has no cycles.

A sum counts one more, too, if its region would add more than LONGEST_SUM results, or more than two
that become a parameter's gradient: a kernel that adds the gradients of eight chunks' losses would
hold all eight, where one sum after the other holds two.

A region keeps to one phase of the step. A long one is cut in the order of the step, so that no
kernel holds much memory at once and strategies have something to choose from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch.fx import Node

from memopt.kernels.compiled.fusible import is_constant, is_fusible
from memopt.kernels.compiled.pooling import is_pooling, is_unpooling
from memopt.models.disjoint import DisjointSets
from memopt.models.graph import Graph, Operator, Phase
from memopt.step.build import Lowering

LARGEST = 48
"""Most operators of a region."""
LONGEST_SUM = 3
"""Most results that a region adds up: those of query, key and value."""
_ADD = "aten.add.Tensor"


@dataclass(frozen=True)
class Region:
    """Operators that become one operator."""

    operators: tuple[int, ...]


def divide(
    lowering: Lowering, fusible: Callable[[int], bool] | None = None, largest: int = LARGEST
) -> list[Region]:
    """Return regions of at least two operators, or of a single one that gains as a region, in the
    graph's order.

    Args:
        lowering: of the captured step, its graph in the framework's order.
        fusible: whether an operator, given by its index, may be in a region; None: `is_fusible`.
        largest: most operators of a region.
    """
    graph, nodes = lowering.graph, lowering.nodes
    allowed = fusible or (lambda op: is_fusible(nodes[op]))
    free = [
        op
        for op, one in enumerate(graph.operators)
        if one.recomputable and allowed(op) and one.phase is not Phase.UPDATE
    ]
    constants = {op for op in free if is_constant(nodes[op]) and not _reads_computed(graph, op)}
    members = set(free) - constants
    level = _levels(graph, members, constants)
    _sink(graph, members, level)
    groups = _connected(graph, members, level)
    parts = [part for group in groups for part in _cut(group, largest)]
    worth = [p for p in parts if len(p) > 1 or _is_worth(graph.operators[p[0]], nodes[p[0]])]
    return [Region(tuple(part)) for part in sorted(worth)]


def _is_worth(operator: Operator, node: Node) -> bool:
    """Return whether a single operator gains by being a region: a dropout, or a pooling."""
    return operator.random or is_pooling(node) or is_unpooling(node)


def _reads_computed(graph: Graph, op: int) -> bool:
    return any(t in graph.producer for t in graph.operators[op].reads)


def _levels(graph: Graph, members: set[int], constants: set[int]) -> list[int]:
    level = [0] * len(graph.operators)
    terms: dict[int, int] = {}
    summed = set(graph.gradients)
    for operator in reversed(graph.operators):
        if operator.target == _ADD and not summed.isdisjoint(operator.writes):
            summed.update(operator.reads)
    for op, operator in enumerate(graph.operators):
        sources = [one for one in _sources(graph, op) if one not in constants]
        for source in sources:
            crossing = (source in members) != (op in members) or (
                graph.operators[source].phase is not operator.phase
            )
            level[op] = max(level[op], level[source] + crossing)
        if op in members and operator.target == _ADD and len(sources) > 1:
            terms[op] = sum(terms.get(s, 1) if level[s] == level[op] else 1 for s in sources)
            if terms[op] > (LONGEST_SUM if summed.isdisjoint(operator.writes) else 2):
                level[op], terms[op] = level[op] + 1, len(sources)
    return level


def _sink(graph: Graph, members: set[int], level: list[int]) -> None:
    """Move operators to the level of their readers if that is one later level, and the operator
    reads no more bytes than it writes."""
    for op in sorted(members, reverse=True):
        operator = graph.operators[op]
        readers = {reader for t in operator.writes for reader in graph.readers[t]}
        results = {*graph.outputs, *graph.gradients}
        if operator.random or not readers or not results.isdisjoint(operator.writes):
            continue
        later = {level[reader] for reader in readers}
        same = all(
            one in members and graph.operators[one].phase is operator.phase for one in readers
        )
        if len(later) == 1 and same and _no_larger(graph, op):
            level[op] = max(level[op], *later)


def _no_larger(graph: Graph, op: int) -> bool:
    operator = graph.operators[op]
    read = sum(graph.tensors[t].size_bytes for t in operator.reads if t in graph.producer)
    return read <= sum(graph.tensors[t].size_bytes for t in operator.writes)


def _connected(graph: Graph, members: set[int], level: list[int]) -> list[list[int]]:
    """Group members of one level and phase, each list ascending. Two are connected if one reads the
    other's result, or both read the same tensor and each reads nothing larger."""
    connected = DisjointSets[int]()
    place = {op: (level[op], graph.operators[op].phase) for op in members}
    for op in sorted(members):
        for source in _sources(graph, op):
            if source in members and place[source] == place[op]:
                connected.join(source, op)
    for tensor in graph.producer:
        first: dict[tuple[int, Phase], int] = {}
        for op in graph.readers[tensor]:
            if op in members and _is_largest(graph, tensor, op):
                connected.join(first.setdefault(place[op], op), op)
    return connected.sets(sorted(members))


def _is_largest(graph: Graph, tensor: int, op: int) -> bool:
    """Return whether an operator reads nothing larger; a kernel then reads it once for several."""
    size = graph.tensors[tensor].size_bytes
    return all(graph.tensors[t].size_bytes <= size for t in graph.operators[op].reads)


def _sources(graph: Graph, op: int) -> Iterator[int]:
    for tensor in graph.operators[op].reads:
        if tensor in graph.producer:
            yield graph.producer[tensor]


def _cut(group: list[int], largest: int) -> Iterable[list[int]]:
    """Cut into parts of similar size, in the order of the step: no part precedes its sources."""
    count = -(-len(group) // largest)
    size = -(-len(group) // count)
    return [group[start : start + size] for start in range(0, len(group), size)]
