"""Coarse graphs: runs of cheap operators merged, so that exact solvers see fewer nodes.

Groups are runs of consecutive operators of one phase, so the coarse order is topological by
construction. Tensors that only a group's own operators read become part of its workspace. Operators
that may not run twice, and those with a choice of implementations, stay alone. Only the counters of
batch norm, whose results nothing reads, are moved into one group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heappop, heappush

from memopt.models.graph import Graph, Operator, Phase
from memopt.models.variants import variant
from memopt.programs.instructions import Compute, Free, Instruction, OfTensor, Program
from memopt.reductions.stage_costs import stage_name


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
        """Expand a program for the coarse graph into one for the fine graph.

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
                continue
            effects = instruction.effects(self.graph)
            live.difference_update(self.tensors[tensor] for tensor in effects.ends)
            live.update(self.tensors[tensor] for tensor in effects.begins)
            if isinstance(instruction, OfTensor):
                instruction = replace(instruction, tensor=self.tensors[instruction.tensor])
            fine.append(instruction)
        return Program(fine)

    def _group(self, instruction: Compute, live: set[int]) -> list[Instruction]:
        """Expand one coarse Compute; free tensors that the group hides after their last reader."""
        group = self.groups[instruction.op]
        kept = {self.tensors[t] for t in instruction.outputs}
        last = {t: i for i in group for t in self.fine.operators[i].reads}
        fine: list[Instruction] = []
        passing: set[int] = set()
        for i in group:
            operator = variant(self.fine.operators[i], instruction.implementation)
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

    Cheapest merges come first: short operators, and groups that need little more memory than their
    parts. More operators are left where nothing else may be merged.

    Raises:
        ValueError: max_operators is not positive.
    """
    if max_operators < 1:
        raise ValueError(f"coarsen: max_operators must be at least 1, got {max_operators}")
    groups = _Merger(graph).merge(max_operators)
    used = {t for group in groups for t in (*group.reads, *group.writes)} | _chosen(graph)
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
        written_back=[index[t] for t in graph.written_back],
    )
    return Coarsening(graph, coarse, tuple(group.members for group in groups), tuple(kept))


@dataclass(frozen=True)
class _Group:
    """Consecutive operators merged into one."""

    graph: Graph
    members: tuple[int, ...]
    pinned: frozenset[int]
    """Tensors that no group may hide."""

    @cached_property
    def writes(self) -> tuple[int, ...]:
        """Return the tensors it writes that others read or the step ends with."""
        last = self.members[-1]
        if len(self.members) == 1:
            return self.graph.operators[last].writes
        return tuple(
            t
            for i in self.members
            for t in self.graph.operators[i].writes
            if t in self.pinned or (self.graph.readers[t] and self.graph.readers[t][-1] > last)
        )

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Return the tensors it reads but does not write."""
        own = {t for i in self.members for t in self.graph.operators[i].writes}
        reads = (t for i in self.members for t in self.graph.operators[i].reads)
        return tuple(t for t in dict.fromkeys(reads) if t not in own)

    @cached_property
    def time_s(self) -> float:
        return sum(self.graph.operators[i].time_s for i in self.members)

    @cached_property
    def peak_bytes(self) -> int:
        """Return the peak of running it, with its writes once computed, without its reads."""
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
        """Return the memory it needs while it runs, the computed tensors it reads included."""
        tensors = (self.graph.tensors[t] for t in self.reads)
        return self.peak_bytes + sum(t.size_bytes for t in tensors if not t.resident)

    def operator(self, index: dict[int, int]) -> Operator:
        """Return the group as one operator of the coarse graph."""
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
            recomputable=all(operator.recomputable for operator in operators),
            random=any(operator.random for operator in operators),
            module=stage_name(self.graph, self.members),
        )


def _renumbered(operator: Operator, index: dict[int, int]) -> Operator:
    """Return the operator with coarse tensor indices."""

    def coarse(tensors: Sequence[int] | None) -> tuple[int, ...] | None:
        return None if tensors is None else tuple(index[t] for t in tensors)

    return replace(
        operator,
        reads=tuple(index[t] for t in operator.reads),
        writes=tuple(index[t] for t in operator.writes),
        in_place=tuple(index[t] for t in operator.in_place),
        implementations=tuple(
            replace(
                choice,
                reads=coarse(choice.reads),
                writes=coarse(choice.writes),
                in_place=tuple(index[t] for t in choice.in_place),
            )
            for choice in operator.implementations
        ),
    )


def _chosen(graph: Graph) -> frozenset[int]:
    """Return the tensors that some implementation reads or writes."""
    choices = [choice for operator in graph.operators for choice in operator.implementations]
    return frozenset(t for c in choices for t in (*(c.reads or ()), *(c.writes or ())))


class _Merger:
    """Merges neighbours, cheapest pair first, in a doubly linked list of groups."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        pinned = graph.kept | _chosen(graph)
        # Batch norm's counters read resident tensors and feed no other: one group can run them.
        aside = {
            i
            for i, operator in enumerate(graph.operators[: graph.first_backward])
            if not (operator.recomputable or operator.random or operator.implementations)
            and graph.resident.issuperset(operator.reads)
            and not any(graph.readers[t] for t in operator.writes)
        }
        members: list[tuple[int, ...]] = [
            (i,) for i in range(len(graph.operators)) if i not in aside
        ]
        if aside:
            members = sorted([*members, tuple(sorted(aside))], key=lambda group: group[-1])
        self.groups = [_Group(graph, group, pinned) for group in members]
        count = len(self.groups)
        self.present = [True] * count
        self.after = list(range(1, count + 1))
        self.before = list(range(-1, count - 1))
        self.time_s = graph.compute_time_s or 1.0
        self.bytes = max((group.working_bytes for group in self.groups), default=0) or 1
        self.heap: list[tuple[float, int, int, int, _Group, _Group, _Group]] = []
        self.pushed = 0

    def merge(self, max_operators: int) -> list[_Group]:
        """Merge down to `max_operators`, if that is possible; return the groups in order."""
        count = len(self.groups)
        for i in range(count - 1):
            self._push(i, i + 1)
        while count > max_operators and self.heap:
            _, _, i, j, first, second, merged = heappop(self.heap)
            if not (self.present[i] and self.present[j]):
                continue
            if self.groups[i] is not first or self.groups[j] is not second:
                continue
            self.groups[i] = merged
            self.present[j] = False
            self.after[i] = self.after[j]
            if self.after[j] < len(self.groups):
                self.before[self.after[j]] = i
                self._push(i, self.after[i])
            if self.before[i] >= 0:
                self._push(self.before[i], i)
            count -= 1
        return [group for i, group in enumerate(self.groups) if self.present[i]]

    def _push(self, i: int, j: int) -> None:
        first, second = self.groups[i], self.groups[j]
        if not (self._mergeable(first) and self._mergeable(second)):
            return
        if self._phase(first) is not self._phase(second):
            return
        merged = _Group(self.graph, first.members + second.members, first.pinned)
        # Merging takes the shorter part's freedom to be recomputed alone. A larger working set
        # raises the smallest budget, most where it is near the graph's own largest one.
        larger = max(first.working_bytes, second.working_bytes) / self.bytes
        grown = max(0.0, (merged.working_bytes / self.bytes) ** 2 - larger**2)
        price = min(first.time_s, second.time_s) / self.time_s + grown
        self.pushed += 1
        heappush(self.heap, (price, self.pushed, i, j, first, second, merged))

    def _phase(self, group: _Group) -> Phase:
        return self.graph.operators[group.members[0]].phase

    def _mergeable(self, group: _Group) -> bool:
        operators = (self.graph.operators[i] for i in group.members)
        return all(operator.recomputable and not operator.implementations for operator in operators)
