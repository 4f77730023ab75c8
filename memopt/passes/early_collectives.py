"""Decides when collectives start and when a step waits for them: a pass over finished programs.

A collective overlaps the compute stream from its start to its first reader, and the tensors it
reads are held until it is over. Both take memory. This pass starts collectives earlier (prefetch)
and frees what they read later, wherever the step waits for the network and the budget has room.

Each round replays the program. Where a reader waited, the collective's start moves earlier by that
time, with the computations only it needs. If the network was busy with other collectives until
then, their starts move earlier, too. Where a Free waited, or a collective for the result of
another, it moves later. Moves that would exceed the budget go as far as fits. The fastest program
of all rounds is kept.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from memopt.models.device import Device
from memopt.models.graph import Graph, Phase
from memopt.programs.instructions import (
    Compute,
    Effects,
    Free,
    Instruction,
    LossBoundary,
    Program,
)
from memopt.programs.replay import Timeline, replay

ROUNDS = 12
_HIDDEN = 1e-4
"""Waiting for less than this share of a step is not worth another round."""


def with_early_collectives(
    graph: Graph, program: Program, budget_bytes: int | None, device: Device | None = None
) -> Program:
    """Start a program's collectives as early as helps and its budget allows.

    Programs with a placement stay as they are: their tensors have addresses already.

    Args:
        graph: the program's graph.
        program: a valid program.
        budget_bytes: total device memory, resident included; None: no limit.
        device: link rates; None: transfers take no time.

    Laws: the same instructions run, with first runs of collectives in the same order; the replayed
    peak is at most the budget, or the program's own if that is more; the replay is never slower.
    """
    sends = any(graph.operators[run.op].collective for _, run in program.computes)
    if program.offsets is not None or not sends:
        return program
    timeline = replay(graph, program, device)
    limit = None if budget_bytes is None else max(budget_bytes, timeline.peak_bytes)
    best, best_s = program, timeline.time_s
    for _ in range(ROUNDS):
        if sum(timeline.stall_s) <= _HIDDEN * timeline.time_s:
            break
        moved = _Round(graph, program, timeline, limit).moved()
        if moved == program:
            break
        program, timeline = moved, replay(graph, moved, device)
        if timeline.time_s < best_s:
            best, best_s = program, timeline.time_s
    return best


@dataclass(frozen=True, slots=True)
class _Sent:
    """A collective: its position, and when the compute stream and the network reach it."""

    position: int
    issued_s: float
    start_s: float
    end_s: float


class _Round:
    """The moves that one replay asks for."""

    def __init__(
        self, graph: Graph, program: Program, timeline: Timeline, limit_bytes: int | None
    ) -> None:
        self.graph, self.timeline, self.limit_bytes = graph, timeline, limit_bytes
        self.instructions = list(program)
        self.effects = [x.effects(graph) for x in self.instructions]
        self.sizes = [tensor.size_bytes for tensor in graph.tensors]
        self.live = [graph.resident_bytes, *timeline.live_bytes]
        self.origin = list(range(len(self.instructions)))
        """Position of each instruction before any move."""
        self.first_runs = self._first_runs()
        self.sent = [
            _Sent(x.instruction, timeline.end_s[x.instruction], x.start_s, x.end_s)
            for x in timeline.collectives
        ]
        self.wanted = self._starts()

    def moved(self) -> Program:
        """Return the program with its frees later and its collectives earlier."""
        for position in reversed(range(len(self.instructions))):
            if self.timeline.stall_s[position] > 0 and self._may_wait(position):
                self._later(position)
        now_at = {origin: position for position, origin in enumerate(self.origin)}
        for origin, until_s in sorted(self.wanted.items()):
            self._earlier(now_at[origin], until_s)
        return Program(self.instructions)

    def _first_runs(self) -> set[int]:
        """Return the positions where a collective runs for the first time."""
        first: dict[int, int] = {}
        for position, run in enumerate(self.instructions):
            if isinstance(run, Compute) and self._sends(position):
                first.setdefault(run.op, position)
        return set(first.values())

    def _may_wait(self, position: int) -> bool:
        return isinstance(self.instructions[position], Free) or self._sends(position)

    def _sends(self, position: int) -> bool:
        run = self.instructions[position]
        return isinstance(run, Compute) and bool(self.graph.operators[run.op].collective)

    def _updates(self, position: int) -> bool:
        run = self.instructions[position]
        return isinstance(run, Compute) and self.graph.operators[run.op].phase is Phase.UPDATE

    def _starts(self) -> dict[int, float]:
        """Map positions of collectives to the times when they should start. Those whose readers
        waited should start earlier by that time, and with them those before them on the network."""
        wanted: dict[int, float] = {}
        result: dict[int, int] = {}
        started = {one.position: index for index, one in enumerate(self.sent)}
        for position in range(len(self.instructions)):
            effects, stall_s = self.effects[position], self.timeline.stall_s[position]
            if stall_s > 0 and not self._may_wait(position):
                until_s = self.timeline.start_s[position]
                for tensor in effects.reads:
                    index = result.get(tensor)
                    if index is not None and self.sent[index].end_s > until_s - stall_s:
                        self._sooner(index, stall_s, wanted)
            if position in started:
                result.update(dict.fromkeys(effects.begins, started[position]))
        return wanted

    def _sooner(self, index: int, by_s: float, wanted: dict[int, float]) -> None:
        """Ask that a collective start `by_s` seconds earlier, and with it those that are queued
        before it on the network."""
        while True:
            one = self.sent[index]
            until_s = one.start_s - by_s
            if one.issued_s > until_s:
                wanted[one.position] = min(until_s, wanted.get(one.position, until_s))
            if index == 0 or one.issued_s >= one.start_s:
                return
            index -= 1

    def _earlier(self, position: int, until_s: float) -> None:
        """Start a collective at `until_s` of the compute stream, or as soon after as possible."""
        goal = bisect_right(self.timeline.end_s, until_s, hi=position)
        group, lowest = self._group(position, goal)
        while lowest < position:
            members = {i for i in group if i >= lowest}
            others = [i for i in range(lowest, position + 1) if i not in members]
            if self._reordered(lowest, [*sorted(members), *others]):
                return
            lowest = (lowest + position + 1) // 2
            if any(i < lowest for i in group):
                group, lowest = self._group(position, lowest)

    def _group(self, position: int, goal: int) -> tuple[set[int], int]:
        """Return the positions that must move with a collective if it moves towards `goal`, and the
        position where it must stop."""
        group, member = {position}, self.effects[position]
        touched, changed = set(member.touches), _changed(member)
        is_first = self.origin[position] in self.first_runs
        for i in range(position - 1, goal - 1, -1):
            instruction, effects = self.instructions[i], self.effects[i]
            ordered = is_first and self.origin[i] in self.first_runs
            if isinstance(instruction, LossBoundary) or ordered:
                return group, i + 1
            if touched.isdisjoint(_changed(effects)) and changed.isdisjoint(effects.touches):
                continue
            if not self._joins(instruction):
                return group, i + 1
            group.add(i)
            touched |= effects.touches
            changed |= _changed(effects)
        return group, goal

    def _joins(self, instruction: Instruction) -> bool:
        """Tell whether an instruction may move along with a collective that needs it."""
        if not isinstance(instruction, Compute):
            return False
        operator = self.graph.operators[instruction.op]
        return not (operator.collective or operator.random or operator.phase is Phase.UPDATE)

    def _later(self, position: int) -> None:
        """Move an instruction that waits for a collective, a Free or another start, to where the
        collective is over."""
        until_s = self.timeline.start_s[position] + self.timeline.stall_s[position]
        goal = bisect_left(self.timeline.start_s, until_s, lo=position + 1)
        own = self.effects[position]
        sends = self._sends(position)
        last = position
        for i in range(position + 1, min(goal, len(self.instructions))):
            effects = self.effects[i]
            free = own.touches.isdisjoint(_changed(effects)) and _changed(own).isdisjoint(
                effects.touches
            )
            # A collective keeps its place among others, and reads parameters before updates do.
            kept = sends and (self._sends(i) or self._updates(i))
            if kept or not free or isinstance(self.instructions[i], LossBoundary):
                break
            last = i
        while last > position:
            if self._reordered(position, [*range(position + 1, last + 1), position]):
                return
            last = (position + last) // 2

    def _reordered(self, begin: int, order: Sequence[int]) -> bool:
        """Reorder a window of instructions if the memory suffices."""
        live = self.live[begin]
        levels = []
        for i in order:
            effects = self.effects[i]
            if self.limit_bytes is not None and self._during(live, effects) > self.limit_bytes:
                return False
            made = sum([self.sizes[t] for t in effects.begins])
            live = live + made - sum([self.sizes[t] for t in effects.ends])
            levels.append(live)
        end = begin + len(order)
        self.instructions[begin:end] = [self.instructions[i] for i in order]
        self.origin[begin:end] = [self.origin[i] for i in order]
        self.effects[begin:end] = [self.effects[i] for i in order]
        self.live[begin + 1 : end + 1] = levels
        return True

    def _during(self, live_bytes: int, effects: Effects) -> int:
        """Return device memory while an instruction runs, as `replay` counts it."""
        taken = 0 if effects.overwrites is None else self.sizes[effects.overwrites]
        made = sum([self.sizes[t] for t in effects.writes])
        return live_bytes + made - taken + effects.workspace_bytes


def _changed(effects: Effects) -> set[int]:
    """Return tensors that an instruction writes or ends, or whose host copy begins or ends."""
    return {*effects.writes, *effects.ends, *effects.host_begins, *effects.host_ends}
