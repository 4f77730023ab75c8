"""Tensor-level offloading of any Graph: what may move when, the floor, and a bound on the time.

Operators run once, in the graph's own order. The loss boundary and every operator are *slots*,
numbered in the order of the step. Between two slots that touch a tensor (write or read it) it
may be on the host only: that stretch is a *gap*. Results (outputs, gradients), tangents and
resident tensors stay. Choosing gaps whose bytes cover every slot's excess is the chain's problem
(Offloading §3) without the chain.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.instructions import Compute, LossBoundary
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay


@dataclass(frozen=True, slots=True, order=True)
class Gap:
    """A tensor between two slots that touch it, exclusive at both ends."""

    after: int
    before: int
    tensor: int


@dataclass(frozen=True, eq=False)
class GraphProblem:
    """What a graph offloader chooses from.

    Attributes:
        graph: the cost model.
        device: link rates.
        operators: the operator of each slot; None: the loss boundary.
        need_bytes: memory of each slot when nothing moves, resident included.
        gaps: every stretch in which a tensor may be on the host, ascending.
        produced: tensor → the slot that writes it, for tensors with a gap.
    """

    graph: Graph
    device: Device
    operators: tuple[int | None, ...]
    need_bytes: npt.NDArray[np.int64]
    gaps: tuple[Gap, ...]
    produced: dict[int, int]

    def size_bytes(self, gap: Gap) -> int:
        """Bytes that leave the device in a gap."""
        return self.graph.tensors[gap.tensor].size_bytes

    def relieved_bytes(self, gaps: tuple[Gap, ...]) -> npt.NDArray[np.int64]:
        """Bytes off the device at each slot while all these gaps are used to the full."""
        change = np.zeros(len(self.operators) + 1, dtype=np.int64)
        for gap in gaps:
            change[gap.after + 1] += self.size_bytes(gap)
            change[gap.before] -= self.size_bytes(gap)
        return np.cumsum(change)[:-1]

    @cached_property
    def floor_bytes(self) -> int:
        """The smallest budget that any program of this class can meet."""
        return int((self.need_bytes - self.relieved_bytes(self.gaps)).max(initial=0))

    @cached_property
    def peak_bytes(self) -> int:
        """Memory when nothing moves."""
        return int(self.need_bytes.max(initial=self.graph.resident_bytes))

    @cached_property
    def durations_s(self) -> npt.NDArray[np.float64]:
        """Of the slots, seconds."""
        operators = self.graph.operators
        return np.array([0.0 if op is None else operators[op].time_s for op in self.operators])

    def excess_bytes(self, budget_bytes: int) -> npt.NDArray[np.int64]:
        """What must be off the device at each slot; never below 0."""
        return np.maximum(0, self.need_bytes - budget_bytes)

    def lower_bound_s(self, budget_bytes: int) -> float:
        """No program of this class within the budget is faster.

        All operators run; and for each slot, what it lacks leaves the device before it, once a
        tensor that it need not touch has been made, and returns after it, before the earliest
        last reader of such a tensor. (Proposition 3 per operation, on a DAG.)
        """
        ends = np.cumsum(self.durations_s)
        total = float(ends[-1]) if len(ends) else 0.0
        if not self.gaps:
            return total
        excess = self.excess_bytes(budget_bytes)
        slots = len(self.operators)
        made_s = np.full(slots, np.inf)
        rest_s = np.full(slots, np.inf)
        for gap in self.gaps:
            inside = slice(gap.after + 1, gap.before)
            made = float(ends[self.produced[gap.tensor]])
            rest = total - float(ends[gap.before] - self.durations_s[gap.before])
            made_s[inside] = np.minimum(made_s[inside], made)
            rest_s[inside] = np.minimum(rest_s[inside], rest)
        bound = total
        for slot in np.flatnonzero(excess):
            size = int(excess[slot])
            start = float(ends[slot] - self.durations_s[slot])
            before = max(start, float(made_s[slot]) + self.device.swap_out_time_s(size))
            back = self.device.swap_in_time_s(size) + float(rest_s[slot])
            after = max(total - float(ends[slot]), back)
            bound = max(bound, before + float(self.durations_s[slot]) + after)
        return bound


def graph_problem(graph: Graph, device: Device) -> GraphProblem:
    """The slots, their memory and the gaps of a graph run in its own order."""
    program = store_all(graph)
    timeline = replay(graph, program)
    operators: list[int | None] = []
    need: list[int] = []
    touches: dict[int, list[int]] = {}
    for instruction, size in zip(program, timeline.step_bytes, strict=True):
        if isinstance(instruction, Compute):
            for tensor in dict.fromkeys(graph.operators[instruction.op].reads):
                if tensor in touches:
                    touches[tensor].append(len(operators))
            for tensor in instruction.outputs:
                if tensor not in graph.kept and graph.tensors[tensor].size_bytes > 0:
                    touches[tensor] = [len(operators)]
            operators.append(instruction.op)
            need.append(size)
        elif isinstance(instruction, LossBoundary):
            operators.append(None)
            need.append(size)
    gaps = sorted(
        Gap(first, second, tensor)
        for tensor, slots in touches.items()
        for first, second in itertools.pairwise(slots)
        if second > first + 1
    )
    return GraphProblem(
        graph=graph,
        device=device,
        operators=tuple(operators),
        need_bytes=np.array(need, dtype=np.int64),
        gaps=tuple(gaps),
        produced={gap.tensor: touches[gap.tensor][0] for gap in gaps},
    )
