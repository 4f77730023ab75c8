"""Divides a step into regions of operators that work token by token.

The forward is cut where a single tensor goes from one side to the other and is kept anyway, such as
the residual stream of a transformer: one region from an attention to the end of its block, one from
there to the next attention. In the backward the part that needs a region's values again is one
region, cut where the fewest bytes cross.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from memopt.kernels.compiled.divide import Region
from memopt.kernels.tiled.tokens import PRODUCTS, Axis, Tokens
from memopt.models.disjoint import DisjointSets
from memopt.models.graph import Phase
from memopt.step.build import Lowering


@dataclass(frozen=True)
class Tiling:
    """The regions of a step.

    Attributes:
        regions: each with its tokens.
        again: tensors of the forward that no operator outside of the regions reads: regions of the
            backward compute them again.
    """

    regions: tuple[tuple[Region, Axis], ...]
    again: frozenset[int]


def tiling(lowering: Lowering, tokens: Tokens, least: int) -> Tiling:
    """Divide a step. Regions of the forward have a matrix product; those of the backward have one,
    or need values of the forward again."""
    operators = lowering.graph.operators
    axes: list[Axis | None] = []
    for node, one in zip(lowering.nodes, operators, strict=True):
        axis = tokens.axis_of(node, sums=one.phase is Phase.BACKWARD)
        many = axis is not None and axis.counts[0] * axis.counts[1] >= least
        axes.append(axis if many and one.recomputable else None)
    forward, backward = _groups(lowering, axes)
    kept = _kept(lowering, forward, backward)
    found = [part for one in forward for part in _cut_forward(lowering, one, kept)]
    parts = [part for part in found if len(part) > 1 and _multiplies(lowering, part)]
    again = _written(lowering, parts) - _kept(lowering, parts, backward)
    home = {t: i for i, part in enumerate(parts) for t in _written(lowering, [part]) & again}
    for group in backward:
        for part in _cut_backward(lowering, group, home):
            reads = {t for op in part for t in operators[op].reads} & again
            if len(part) > 1 and (reads or _multiplies(lowering, part)):
                parts.append(part)
            else:
                again -= reads
    made = ((Region(part), axes[part[0]]) for part in parts)
    return Tiling(
        tuple((region, axis) for region, axis in made if axis is not None), frozenset(again)
    )


def _multiplies(lowering: Lowering, part: Iterable[int]) -> bool:
    return any(str(lowering.nodes[op].target) in PRODUCTS for op in part)


def _groups(
    lowering: Lowering, axes: Sequence[Axis | None]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Return groups of operators that may run as one, of the forward and of the backward.

    An operator's level is one more wherever a path to it goes from an operator that works token by
    token to another one, or back. Those of one level that are connected are a group: no path
    between two of them leads through an operator outside. What comes of no such operator counts as
    given.
    """
    graph = lowering.graph
    level: dict[int, int] = {}
    for op, one in enumerate(graph.operators):
        sources = {graph.producer[t] for t in one.reads if t in graph.producer} & level.keys()
        found = [level[s] + (axes[s] != axes[op] or _crosses(lowering, s, op)) for s in sources]
        if found or axes[op] is not None:
            level[op] = max(found, default=0)
    _sink(lowering, axes, level)
    members = {op for op in level if axes[op] is not None}
    connected = DisjointSets[int]()
    for tensor, producer in graph.producer.items():
        first: dict[tuple[object, ...], int] = {}
        for op in (producer, *graph.readers[tensor]):
            if op in members:
                place = level[op], axes[op], graph.operators[op].phase
                connected.join(first.setdefault(place, op), op)
    halves: dict[Phase, list[tuple[int, ...]]] = defaultdict(list)
    for found in connected.sets(sorted(members)):
        halves[graph.operators[found[0]].phase].append(tuple(found))
    return halves[Phase.FORWARD], halves[Phase.BACKWARD]


def _sink(lowering: Lowering, axes: Sequence[Axis | None], level: dict[int, int]) -> None:
    """Move operators of the backward that come of the forward alone to their first readers."""
    graph = lowering.graph
    results = {*graph.outputs, *graph.gradients}
    for op in reversed(range(len(graph.operators))):
        one = graph.operators[op]
        if axes[op] is None or one.phase is not Phase.BACKWARD or results & set(one.writes):
            continue
        readers = {reader for t in one.writes for reader in graph.readers[t]}
        if readers and all(axes[reader] == axes[op] for reader in readers):
            level[op] = max(level[op], min(level[reader] for reader in readers))


def _crosses(lowering: Lowering, one: int, other: int) -> bool:
    operators = lowering.graph.operators
    return operators[one].phase is not operators[other].phase


def _written(lowering: Lowering, parts: Iterable[Sequence[int]]) -> set[int]:
    operators = lowering.graph.operators
    return {t for part in parts for op in part for t in operators[op].writes}


def _kept(
    lowering: Lowering, forward: Iterable[Sequence[int]], backward: Iterable[Sequence[int]]
) -> set[int]:
    """Return the tensors of the forward's regions that are read outside of the region which writes
    them, regions of the backward left out, or that the step returns."""
    graph = lowering.graph
    home = {op: i for i, part in enumerate(forward) for op in part}
    making = {op for part in backward for op in part}
    results = {*graph.outputs, *graph.gradients}
    return {
        t
        for op, region in home.items()
        for t in graph.operators[op].writes
        if t in results or any(home.get(r) != region and r not in making for r in graph.readers[t])
    }


def _cut_forward(
    lowering: Lowering, part: Sequence[int], kept: Collection[int]
) -> list[tuple[int, ...]]:
    crossing = enumerate(_crossing(lowering, part))
    return _cut(part, [at for at, found in crossing if len(found) == 1 and found.issubset(kept)])


def _cut_backward(
    lowering: Lowering, part: Sequence[int], home: Mapping[int, int]
) -> list[tuple[int, ...]]:
    """Cut between operators that need values of one region of the forward again, and those that
    need an earlier one's. `home`: tensor → the region that makes it."""
    operators, tensors = lowering.graph.operators, lowering.graph.tensors
    needs = [[home[t] for t in operators[op].reads if t in home] for op in part]
    crossing = _crossing(lowering, part)
    sizes = [sum(tensors[t].size_bytes for t in found) for found in crossing]
    named = [at for at, numbers in enumerate(needs) if numbers]
    least = list(accumulate((min(numbers, default=len(home)) for numbers in needs), min))
    backwards = (max(numbers, default=-1) for numbers in reversed(needs))
    most = list(accumulate(backwards, max))[::-1]
    return _cut(
        part,
        [
            min(range(one + 1, other + 1), key=sizes.__getitem__)
            for one, other in pairwise(named)
            if most[other] < least[one]
        ],
    )


def _crossing(lowering: Lowering, part: Sequence[int]) -> list[set[int]]:
    """Return, for each place in a group, the tensors that operators before it write and others
    read."""
    operators = lowering.graph.operators
    last = {t: at for at, op in enumerate(part) for t in operators[op].reads}
    live: set[int] = set()
    found = []
    for at, op in enumerate(part):
        live = {t for t in live if last[t] >= at}
        found.append(live)
        live = live | {t for t in operators[op].writes if last.get(t, -1) > at}
    return found


def _cut(part: Sequence[int], places: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(part[a:b]) for a, b in pairwise([0, *places, len(part)])]
