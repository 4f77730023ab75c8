"""Coarse graphs: runs of cheap operators merged, so that exact solvers see fewer nodes.

Groups are runs of consecutive operators of one phase, so the coarse order is topological by
construction. Tensors that only a group's own operators read become part of its workspace.
Operators that may not run twice, and those with a choice of implementations, stay alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush

from memopt.models.graph import Graph, Operator, Tensor
from memopt.models.program import Compute, DropHost, Free, Instruction, Program, SwapIn, SwapOut
from memopt.models.stage_costs import stage_name


@dataclass(frozen=True)
class Coarsening:
    """A graph and a coarser one of the same step.

    Attributes:
        fine: the graph that was coarsened.
        graph: the coarse graph.
        groups: for each coarse operator, the fine operators it runs, in order.
        tensors: for each coarse tensor, the fine tensor it is.
    """

    fine: Graph
    graph: Graph
    groups: tuple[tuple[int, ...], ...]
    tensors: tuple[int, ...]

    def expand(self, program: Program) -> Program:
        """The fine program of a program for the coarse graph.

        Laws: its replayed peak is at most the coarse program's, and its time is the same.

        Raises:
            ValueError: the program has a placement; place after expanding.
        """
        if program.offsets is not None:
            raise ValueError("expand: the coarse program has a placement; place it afterwards")
        live: set[int] = set()
        fine: list[Instruction] = []
        for instruction in program:
            if isinstance(instruction, Compute):
                fine.extend(self._group(instruction, live))
            elif isinstance(instruction, Free | SwapOut | SwapIn | DropHost):
                tensor = self.tensors[instruction.tensor]
                if isinstance(instruction, Free):
                    live.discard(tensor)
                elif isinstance(instruction, SwapIn):
                    live.add(tensor)
                fine.append(type(instruction)(tensor))
            else:
                fine.append(instruction)
        return Program(fine)

    def _group(self, instruction: Compute, live: set[int]) -> list[Instruction]:
        """The fine operators of one coarse Compute; what it does not keep goes when read."""
        group = self.groups[instruction.op]
        kept = {self.tensors[t] for t in instruction.outputs}
        last = {t: i for i in group for t in self.fine.operators[i].reads}
        fine: list[Instruction] = []
        passing: set[int] = set()
        for i in group:
            operator = self.fine.operators[i]
            needed = [t for t in operator.writes if t in kept or (t in last and t not in live)]
            fine.append(Compute(i, tuple(needed), instruction.implementation))
            passing.update(set(needed) - kept)
            gone = [t for t in dict.fromkeys(operator.reads) if t in passing and last[t] == i]
            fine.extend(map(Free, gone))
            passing.difference_update(gone)
        live |= kept
        return fine


def coarsen(graph: Graph, max_operators: int) -> Coarsening:
    """Merge neighbouring operators until at most `max_operators` are left.

    Merges first where it costs least: short operators, and groups that need little more memory
    than their parts. More operators may be left where nothing may be merged.

    Raises:
        ValueError: max_operators is not positive.
    """
    if max_operators < 1:
        raise ValueError(f"coarsen: max_operators must be at least 1, got {max_operators}")
    groups = _Merger(graph).merge(max_operators)
    used = {t for group in groups for t in (*group.reads, *group.writes)}
    kept = [
        t
        for t, tensor in enumerate(graph.tensors)
        if tensor.resident or t in used or t in graph.kept or t in graph.tangents
    ]
    index = {t: k for k, t in enumerate(kept)}
    coarse = Graph(
        tensors=[graph.tensors[t] for t in kept],
        operators=[group.operator(index) for group in groups],
        outputs=[index[t] for t in graph.outputs],
        gradients=[index[t] for t in graph.gradients],
        tangents=[index[t] for t in graph.tangents],
        tangents_held=graph.tangents_held,
        boundary_bytes=graph.boundary_bytes,
        extra_resident_bytes=graph.extra_resident_bytes,
    )
    return Coarsening(graph, coarse, tuple(group.members for group in groups), tuple(kept))


@dataclass(frozen=True)
class _Group:
    """Consecutive operators seen as one."""

    graph: Graph
    members: tuple[int, ...]

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """What others read, or the step ends with."""
        last = self.members[-1]
        if len(self.members) == 1:
            return self.graph.operators[last].writes
        return tuple(
            t
            for i in self.members
            for t in self.graph.operators[i].writes
            if t in self.graph.kept or (self.graph.readers[t] and self.graph.readers[t][-1] > last)
        )

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """What it finds in memory."""
        own = {t for i in self.members for t in self.graph.operators[i].writes}
        reads = (t for i in self.members for t in self.graph.operators[i].reads)
        return tuple(t for t in dict.fromkeys(reads) if t not in own)

    @cached_property
    def time_s(self) -> float:
        return sum(self.graph.operators[i].time_s for i in self.members)

    @cached_property
    def peak_bytes(self) -> int:
        """Peak of running it, its writes kept from their computation on, its reads apart."""
        tensors, kept = self.graph.tensors, set(self.writes)
        own = {t for i in self.members for t in self.graph.operators[i].writes}
        last = {t: i for i in self.members for t in self.graph.operators[i].reads}
        live = peak = 0
        for i in self.members:
            operator = self.graph.operators[i]
            written = sum(tensors[t].size_bytes for t in operator.writes)
            peak = max(peak, live + written + operator.workspace_bytes)
            live += sum(tensors[t].size_bytes for t in operator.writes if t in kept or t in last)
            for t in dict.fromkeys(operator.reads):
                if last[t] == i and t not in kept and t in own:
                    live -= tensors[t].size_bytes
        return peak

    @cached_property
    def working_bytes(self) -> int:
        """The memory it needs while it runs, its computed reads included."""
        tensors = (self.graph.tensors[t] for t in self.reads)
        return self.peak_bytes + sum(t.size_bytes for t in tensors if not t.resident)

    def operator(self, index: dict[int, int]) -> Operator:
        """The group as one operator of the coarse graph."""
        operators = [self.graph.operators[i] for i in self.members]
        first, tensors = operators[0], self.graph.tensors
        if len(operators) == 1:
            return _renumbered(first, index)
        written = sum(tensors[t].size_bytes for t in self.writes)
        return Operator(
            name=f"{first.name}+{len(operators) - 1}",
            reads=tuple(index[t] for t in self.reads),
            writes=tuple(index[t] for t in self.writes),
            time_s=self.time_s,
            workspace_bytes=max(0, self.peak_bytes - written),
            phase=first.phase,
            random=any(operator.random for operator in operators),
            module=stage_name(self.graph, self.members),
        )


def _renumbered(operator: Operator, index: dict[int, int]) -> Operator:
    """The operator with coarse tensor indices."""

    def coarse(tensors: Sequence[int] | None) -> tuple[int, ...] | None:
        return None if tensors is None else tuple(index[t] for t in tensors)

    return replace(
        operator,
        reads=tuple(index[t] for t in operator.reads),
        writes=tuple(index[t] for t in operator.writes),
        implementations=tuple(
            replace(choice, reads=coarse(choice.reads), writes=coarse(choice.writes))
            for choice in operator.implementations
        ),
    )


class _Merger:
    """Merges neighbours, cheapest pair first, in a doubly linked list of groups."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.groups: list[_Group | None] = [
            _Group(graph, (i,)) for i in range(len(graph.operators))
        ]
        count = len(self.groups)
        self.after = list(range(1, count + 1))
        self.before = list(range(-1, count - 1))
        self.time_s = graph.compute_time_s or 1.0
        self.bytes = max((g.working_bytes for g in self.groups if g), default=0) or 1

    def merge(self, max_operators: int) -> list[_Group]:
        """The groups left, in order."""
        heap = [pair for i in range(len(self.groups) - 1) if (pair := self._pair(i, i + 1))]
        heapify(heap)
        count = len(self.groups)
        while count > max_operators and heap:
            _, left, right, merged, parts = heappop(heap)
            if (self.groups[left], self.groups[right]) != parts:
                continue
            self._replace(left, right, merged)
            count -= 1
            for a, b in ((self.before[left], left), (left, self.after[left])):
                if a >= 0 and b < len(self.groups) and (pair := self._pair(a, b)):
                    heappush(heap, pair)
        return [group for group in self.groups if group is not None]
