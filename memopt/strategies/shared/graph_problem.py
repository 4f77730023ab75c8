"""Tensor-level offloading of any Graph: what may move when, the floor, and a bound on the time.

Operators run once, in the graph's own order. The loss boundary and every operator are *time
points*, numbered in the order of the step. Between two points that touch a tensor (write or read
it) it may be on the host only: that stretch is an *absence*. Results (outputs, gradients), tangents
and resident tensors stay. Choosing absences whose bytes cover every point's excess is the chain's
problem (Offloading §3) without the chain.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.lifetimes import lifetimes
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies.shared.run_table import BOUNDARY, Ints, RunTable


@dataclass(frozen=True, slots=True, order=True)
class Absence:
    """A tensor between two time points that touch it, exclusive at both ends."""

    after: int
    before: int
    tensor: int


@dataclass(frozen=True, eq=False)
class GraphProblem:
    """The absences that a graph offloader chooses from, and the memory they relieve.

    Attributes:
        graph: the cost model.
        device: link rates.
        operators: the operator of each point; None: the loss boundary.
        need_bytes: memory of each point when nothing moves, resident included.
        absences: every stretch in which a tensor may be on the host, ascending.
        produced: tensor → the point that writes it, for tensors with an absence.
    """

    graph: Graph
    device: Device
    operators: tuple[int | None, ...]
    need_bytes: npt.NDArray[np.int64]
    absences: tuple[Absence, ...]
    produced: dict[int, int]

    @cached_property
    def table(self) -> RunTable:
        """Return the operators, each by its default implementation, for the mover."""
        return RunTable(self.graph, lambda *_: False)

    @cached_property
    def runs(self) -> Ints:
        """Return the run at each point; see `RunTable`."""
        numbers = (BOUNDARY if op is None else self.table.number[op, None] for op in self.operators)
        return np.array(list(numbers), dtype=np.int64)

    def size_bytes(self, absence: Absence) -> int:
        """Return the bytes that leave the device in an absence."""
        return self.graph.tensors[absence.tensor].size_bytes

    def relieved_bytes(self, absences: tuple[Absence, ...]) -> npt.NDArray[np.int64]:
        """Return bytes off the device at each point if all these absences are used to the full."""
        change = np.zeros(len(self.operators) + 1, dtype=np.int64)
        for absence in absences:
            change[absence.after + 1] += self.size_bytes(absence)
            change[absence.before] -= self.size_bytes(absence)
        return np.cumsum(change)[:-1]

    @cached_property
    def floor_bytes(self) -> int:
        """Return the smallest budget that any program of this class can meet."""
        return int((self.need_bytes - self.relieved_bytes(self.absences)).max(initial=0))

    @cached_property
    def peak_bytes(self) -> int:
        """Return the memory when nothing moves."""
        return int(self.need_bytes.max(initial=self.graph.resident_bytes))

    @cached_property
    def durations_s(self) -> npt.NDArray[np.float64]:
        """Return the seconds that the operator of each point takes."""
        operators = self.graph.operators
        return np.array([0.0 if op is None else operators[op].time_s for op in self.operators])

    def excess_bytes(self, budget_bytes: int) -> npt.NDArray[np.int64]:
        """Return the bytes that must be off the device at each point; never below 0."""
        return np.maximum(0, self.need_bytes - budget_bytes)

    def lower_bound_s(self, budget_bytes: int) -> float:
        """Return a lower bound on the time of programs of this class within the budget.

        All operators run. For each point, the bytes it lacks leave the device before it, once a
        tensor that it need not touch has been made, and return after it, before the earliest last
        reader of such a tensor. (Proposition 3 per operation, on a DAG.) An operator that may
        compute in place needs less, by the storage that its first output takes over.
        """
        ends = np.cumsum(self.durations_s)
        total = float(ends[-1]) if len(ends) else 0.0
        if not self.absences:
            return total
        excess = np.maximum(self.excess_bytes(budget_bytes) - self._taken_over_bytes(), 0)
        points = len(self.operators)
        made_s = np.full(points, np.inf)
        rest_s = np.full(points, np.inf)
        for absence in self.absences:
            inside = slice(absence.after + 1, absence.before)
            made = float(ends[self.produced[absence.tensor]])
            rest = total - float(ends[absence.before] - self.durations_s[absence.before])
            made_s[inside] = np.minimum(made_s[inside], made)
            rest_s[inside] = np.minimum(rest_s[inside], rest)
        bound = total
        for point in np.flatnonzero(excess):
            size = int(excess[point])
            start = float(ends[point] - self.durations_s[point])
            before = max(start, float(made_s[point]) + self.device.swap_out_time_s(size))
            back = self.device.swap_in_time_s(size) + float(rest_s[point])
            after = max(total - float(ends[point]), back)
            bound = max(bound, before + float(self.durations_s[point]) + after)
        return bound

    def _taken_over_bytes(self) -> npt.NDArray[np.int64]:
        """Return, for each point, the most bytes that an in-place output, or the loss boundary's
        writing back, saves there."""
        saved = np.zeros(len(self.operators), dtype=np.int64)
        for point, op in enumerate(self.operators):
            if op is None:
                saved[point] = _written_back_bytes(self.graph)
            elif self.graph.operators[op].in_place:
                first = self.graph.operators[op].writes[0]
                saved[point] = self.graph.tensors[first].size_bytes
        return saved


def graph_problem(graph: Graph, device: Device) -> GraphProblem:
    """Find the points, their memory and the absences of a graph run in its own order."""
    program = store_all(graph)
    timeline = replay(graph, program)
    point = program.steps_before
    runs = dict(program.computes)
    operators = [runs[i].op if i in runs else None for i in program.steps]
    # What is fetched for the loss boundary comes while what it writes back is still there.
    there = [_written_back_bytes(graph) if op is None else 0 for op in operators]
    touches = {
        lifetime.tensor: [point[lifetime.begin], *(point[i] for i in lifetime.readers)]
        for lifetime in lifetimes(graph, program).device
        if lifetime.begin in runs
        and not lifetime.transient
        and lifetime.tensor not in graph.kept
        and graph.tensors[lifetime.tensor].size_bytes > 0
    }
    absences = sorted(
        Absence(first, second, tensor)
        for tensor, points in touches.items()
        for first, second in itertools.pairwise(points)
        if second > first + 1
    )
    return GraphProblem(
        graph=graph,
        device=device,
        operators=tuple(operators),
        need_bytes=np.array([timeline.step_bytes[i] for i in program.steps], dtype=np.int64)
        + there,
        absences=tuple(absences),
        produced={absence.tensor: touches[absence.tensor][0] for absence in absences},
    )


def _written_back_bytes(graph: Graph) -> int:
    return sum(graph.tensors[tensor].size_bytes for tensor in graph.written_back)
