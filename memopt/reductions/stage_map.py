"""Maps operators to the stages of a chain, and says what crosses between stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from memopt.models.graph import Graph, Phase
from memopt.reductions.chain_view import ChainView
from memopt.reductions.cuts import (
    Cut,
    always_held,
    crossing,
    last_forward_reader,
    parameter_free,
)


@dataclass(frozen=True, slots=True)
class StageOperators:
    """One stage of a chain, as operator and tensor indices of its graph.

    Attributes:
        forward: its forward operators, in order; the first run executes them all.
        rerun: those of them that produce `output` or `saved`; a later run executes these.
        backward: its backward operators, in order.
        output: a^ℓ, or None where only held tensors cross to the next stage.
        saved: ā^ℓ: what its forward operators write and its backward ones read, and a^ℓ; held
            tensors are left out.
        gradients: δ^ℓ, what the backward of later stages leaves for this and earlier ones.
        results: gradients of parameters and inputs that its backward operators complete.
    """

    forward: tuple[int, ...]
    rerun: tuple[int, ...]
    backward: tuple[int, ...]
    output: int | None
    saved: frozenset[int]
    gradients: frozenset[int]
    results: frozenset[int]

    @property
    def once(self) -> tuple[int, ...]:
        """Return the forward operators that only the first run executes."""
        again = set(self.rerun)
        return tuple(i for i in self.forward if i not in again)


@dataclass(frozen=True, slots=True)
class StageMap:
    """All stages but the loss, and the storages held for the whole step.

    Attributes:
        stages: stages 1..n-1.
        held: forward storages that a chain holds and charges from start to end.
    """

    stages: tuple[StageOperators, ...]
    held: frozenset[int]


@dataclass(frozen=True)
class StagedGraph(ChainView):
    """A graph whose operators are the stages of a chain; stage n is the loss boundary.

    Attributes:
        stage_map: the operators of stages 1..n-1, and the held storages.
    """

    stage_map: StageMap

    @property
    def stages(self) -> tuple[StageOperators, ...]:
        """Return the operators of stages 1..n-1; stage ℓ is `stages[ℓ-1]`."""
        return self.stage_map.stages

    @property
    def held(self) -> frozenset[int]:
        """Return computed storages held for the whole step, part of `chain.resident_bytes`."""
        return self.stage_map.held


def build_stage_map(
    graph: Graph, cuts: Sequence[Cut], skips: frozenset[int] = frozenset()
) -> StageMap:
    """Assign every operator to a stage, dropping cuts that no consistent assignment allows.

    A backward operator needs its forward operands from its own stage ℓ (ā^ℓ), from a^{ℓ-1} or from
    the held storages, and runs no earlier than its operands. A random operator runs no earlier than
    the random ones before it, a collective no earlier than the collectives before it. Where that is
    impossible, a parameter-free operand becomes a held one; for others the stages in between are
    merged.

    Args:
        graph: the training step.
        cuts: as `find_cuts` gives them.
        skips: storages to hold where they cross a cut, besides the parameter-free ones.
    """
    free = parameter_free(graph)
    fixed = always_held(graph)
    while True:
        held = fixed | crossing(graph, cuts, free | skips)
        assignment = _Assignment(graph, cuts, held)
        if not assignment.conflicts:
            return assignment.stage_map()
        blockers = {t for _, _, tensors in assignment.conflicts for t in tensors} & free
        if blockers:
            fixed |= blockers
            continue
        dropped = {k for low, high, _ in assignment.conflicts for k in range(low, high)}
        cuts = [cut for k, cut in enumerate(cuts, start=1) if k not in dropped]


class _Assignment:
    """Assigns operators to stages for given cuts and held storages, or says which conflict."""

    def __init__(self, graph: Graph, cuts: Sequence[Cut], held: frozenset[int]) -> None:
        self.graph = graph
        self.held = held
        self.count = len(cuts) + 1
        self.first_backward = graph.first_backward
        self.outputs: list[int | None] = [
            None if cut.tensor in held else cut.tensor for cut in cuts
        ] + [None]
        positions = [cut.position for cut in cuts]
        self.stage = [bisect_right(positions, i) + 1 for i in range(self.first_backward)]
        """Stage of each operator; backward operators follow."""
        backward = range(self.first_backward, len(graph.operators))
        draws = [i for i in backward if graph.operators[i].random]
        sends = [i for i in backward if graph.operators[i].collective]
        self.earlier = {late: early for chain in (draws, sends) for early, late in pairwise(chain)}
        """Random backward operator → the one before it, which must draw first; collective → the one
        before it, which every rank must have joined first."""
        self.later = {early: late for late, early in self.earlier.items()}
        self.conflicts: list[tuple[int, int, list[int]]] = []
        """(low, high, tensors): an operator of stage `low` or an earlier one needs these
        tensors, some of them of stage `high`."""
        self._assign_backward()

    def _assign_backward(self) -> None:
        operators = self.graph.operators
        backward = range(self.first_backward, len(operators))
        bounds = dict.fromkeys(backward, (1, self.count))
        for i in backward:
            bounds[i] = self._bounds(i, bounds)
        if self.conflicts:
            return
        wanted = self._wanted(backward, bounds)
        self.stage.extend(wanted)
        early = self._driven(backward)
        for i in reversed(backward):
            low = bounds[i][0]
            for tensor in operators[i].writes:
                for reader in self.graph.readers[tensor]:
                    low = max(low, self.stage[reader])
            if i in self.later:
                low = max(low, self.stage[self.later[i]])
            self.stage[i] = self._waiting(i, low) if i in early else low

    def _wanted(self, backward: range, bounds: dict[int, tuple[int, int]]) -> list[int]:
        """Return, for each backward operator, the highest allowed stage that is not after the last
        forward reader of a resident tensor it reads: the stage of its parameters."""
        wanted: dict[int, int] = {}
        for i in backward:
            low, stage = bounds[i]
            if i in self.earlier:
                stage = min(stage, wanted[self.earlier[i]])
            for tensor in self.graph.operators[i].reads:
                producer = self.graph.producer.get(tensor, -1)
                if producer >= self.first_backward:
                    stage = min(stage, wanted[producer])
                elif tensor in self.graph.resident:
                    last = last_forward_reader(self.graph, tensor)
                    stage = min(stage, self.stage[last] if last >= 0 else self.count)
            wanted[i] = max(low, stage)
        return list(wanted.values())

    def _bounds(self, index: int, bounds: dict[int, tuple[int, int]]) -> tuple[int, int]:
        """Return the lowest and highest stage that an operator's operands allow."""
        low, high = 1, self.count
        if index in self.earlier:
            high = bounds[self.earlier[index]][1]
        needs: list[int] = []
        for tensor in self.graph.operators[index].reads:
            producer = self.graph.producer.get(tensor)
            if producer is None or tensor in self.held:
                continue
            if producer >= self.first_backward:
                high = min(high, bounds[producer][1])
                continue
            stage = self.stage[producer]
            needs.append(tensor)
            low = max(low, stage)
            # a^k is in memory in B^k and in B^{k+1}.
            high = min(high, stage + (tensor == self.outputs[stage - 1]))
        if high < low:
            self.conflicts.append((high, low, needs))
        return low, high

    def _driven(self, backward: range) -> set[int]:
        """Return backward operators that depend on a tangent or on a forward result."""
        sources = set(self.graph.tangents)
        for operator in self.graph.operators[: self.first_backward]:
            sources.update(operator.writes)
        driven = set()
        for i in backward:
            if not sources.isdisjoint(self.graph.operators[i].reads):
                driven.add(i)
                sources.update(self.graph.operators[i].writes)
        return driven

    def _waiting(self, index: int, low: int) -> int:
        """Choose the stage of a backward operator: as early as possible, as the framework does,
        unless waiting (at most for stage `low`) saves memory.

        Only an operator that reads nothing but gradients can wait. Waiting holds the gradients that
        no later operator reads, and saves what it writes: the backward of a pooling or a broadcast.
        """
        graph, operator = self.graph, self.graph.operators[index]
        stage = max(low, self.stage[index])
        if any(
            graph.producer.get(t, self.first_backward) < self.first_backward for t in operator.reads
        ):
            return stage
        written = sum(graph.tensors[t].size_bytes for t in operator.writes)
        ends: list[tuple[int, int]] = []
        for tensor in set(operator.reads) - graph.kept - graph.resident:
            others = [self.stage[i] for i in graph.readers[tensor] if i != index]
            ends.append((min(others, default=self.count + 1), graph.tensors[tensor].size_bytes))
        while stage > low and written > sum(size for last, size in ends if last >= stage):
            stage -= 1
        return stage

    def stage_map(self) -> StageMap:
        """Return the finished map; only without conflicts."""
        forward: list[list[int]] = [[] for _ in range(self.count)]
        backward: list[list[int]] = [[] for _ in range(self.count)]
        for i, stage in enumerate(self.stage):
            (forward if i < self.first_backward else backward)[stage - 1].append(i)
        gradients = self._gradients()
        stages = []
        for k in range(self.count):
            saved = self._saved(forward[k], backward[k], self.outputs[k])
            stages.append(
                StageOperators(
                    forward=tuple(forward[k]),
                    rerun=self._rerun(forward[k], saved),
                    backward=tuple(backward[k]),
                    output=self.outputs[k],
                    saved=saved,
                    gradients=gradients[k],
                    results=self.graph.kept.intersection(self._written(backward[k])),
                )
            )
        return StageMap(tuple(stages), self.held)

    def _written(self, operators: Sequence[int]) -> set[int]:
        return {t for i in operators for t in self.graph.operators[i].writes}

    def _saved(
        self, forward: Sequence[int], backward: Sequence[int], output: int | None
    ) -> frozenset[int]:
        read = {t for i in backward for t in self.graph.operators[i].reads}
        saved = (read & self._written(forward)) - self.held
        return frozenset(saved if output is None else saved | {output})

    def _rerun(self, forward: Sequence[int], targets: frozenset[int]) -> tuple[int, ...]:
        needed = set(targets)
        rerun = []
        for i in reversed(forward):
            operator = self.graph.operators[i]
            if not needed.isdisjoint(operator.writes):
                rerun.append(i)
                needed.update(t for t in operator.reads if t not in self.held)
        return tuple(reversed(rerun))

    def _gradients(self) -> list[frozenset[int]]:
        """Return δ^1..δ^{n-1}: tensors live between B^{ℓ+1} and B^ℓ that are no results."""
        crossing: list[set[int]] = [set() for _ in range(self.count + 1)]
        graph = self.graph
        born = dict.fromkeys(graph.tangents, self.count + 1)
        for i in range(self.first_backward, len(graph.operators)):
            born.update(dict.fromkeys(graph.operators[i].writes, self.stage[i]))
        for tensor, first in born.items():
            if tensor in graph.kept or not graph.readers[tensor]:
                continue
            last = min(self.stage[i] for i in graph.readers[tensor])
            for k in range(last, first):
                crossing[k - 1].add(tensor)
        return [frozenset(tensors) for tensors in crossing[: self.count]]


def has_updates(graph: Graph) -> bool:
    """Tell whether the step contains parameter updates."""
    return any(operator.phase is Phase.UPDATE for operator in graph.operators)
