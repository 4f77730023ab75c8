"""From chosen absences to a program: when to copy, when to free, when to fetch.

One pass over the points keeps the time of the replay beside the memory. Copies to the host queue
as their data are made. A device copy is freed only where a point needs the room, the copy that
ends first first. A fetch may come early where all the points up to its reader still fit, since
what must still leave can leave: so the pass never gets stuck if the absences cover the excess.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.link_clock import LinkClock
from memopt.programs.liveness import with_frees
from memopt.strategies.offload.graph_problem import Absence, GraphProblem


@dataclass(frozen=True, slots=True)
class Timing:
    """The rule by which copies and fetches come early; the replay chooses among a few.

    Attributes:
        lead: a fetch is issued when the compute until its reader is at most so many times the
            time of all fetches up to it; infinite: as soon as it fits.
        waits: whether a fetch may come where its room must first be freed for it.
        at_once: whether a copy starts when its tensor is made, not when its absence starts.
    """

    lead: float
    waits: bool
    at_once: bool


@dataclass(frozen=True)
class Scheduled:
    """A program with the absences that it really used and its time."""

    program: Program
    used: tuple[Absence, ...]
    time_s: float


@dataclass
class _Pass:
    problem: GraphProblem
    budget_bytes: int
    timing: Timing
    absences: tuple[Absence, ...]
    instructions: list[Instruction] = field(default_factory=list)
    off_bytes: int = 0
    open: dict[int, Absence] = field(default_factory=dict)
    """Tensor → its absence that has started, the tensor still on the device."""
    away: list[Absence] = field(default_factory=list)
    """Absences whose tensor is on the host only, by their end."""
    used: list[Absence] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = LinkClock(self.problem.device)
        self.starts_s = np.cumsum(self.problem.durations_s) - self.problem.durations_s
        self.least_bytes = self.problem.need_bytes - self.problem.relieved_bytes(self.absences)
        self.copies: dict[int, list[int]] = {}
        self.starts: dict[int, list[Absence]] = {}
        self.ends: dict[int, list[Absence]] = {}
        self.last: dict[int, int] = {}
        for absence in self.absences:
            first = absence.tensor not in self.last
            if first:
                made = self.problem.produced[absence.tensor]
                point = made if self.timing.at_once else absence.after
                self.copies.setdefault(point, []).append(absence.tensor)
            self.last[absence.tensor] = absence.before
            self.starts.setdefault(absence.after, []).append(absence)
            self.ends.setdefault(absence.before, []).append(absence)

    def run(self) -> None:
        """Fill in instructions, time and the absences used."""
        for point, operator in enumerate(self.problem.operators):
            due = [absence for absence in self.away if absence.before == point]
            for absence in self.ends.get(point, ()):
                self.open.pop(absence.tensor, None)
            early = self._early(point, due)
            fetched = sum(self.problem.size_bytes(absence) for absence in (*due, *early))
            self._release(point, self.off_bytes - fetched)
            for absence in (*due, *early):
                self._fetch(absence)
            self._run(point, operator)

    def _run(self, point: int, operator: int | None) -> None:
        if operator is None:
            self.instructions.append(LossBoundary())
        else:
            reads = self.problem.graph.operators[operator].reads
            self.clock.compute(reads, float(self.problem.durations_s[point]))
            self.instructions.append(Compute(operator, ()))
            for tensor in dict.fromkeys(reads):
                if self.last.get(tensor) == point and tensor in self.clock.stored_s:
                    self.instructions.append(DropHost(tensor))
        for tensor in self.copies.get(point, ()):
            self.clock.copy_out(tensor, self.problem.graph.tensors[tensor].size_bytes)
            self.instructions.append(SwapOut(tensor))
        for absence in self.starts.get(point, ()):
            self.open[absence.tensor] = absence

    def _release(self, point: int, off_bytes: int) -> None:
        """Free what must be off the device at a point."""
        lacking = int(self.problem.need_bytes[point]) - off_bytes - self.budget_bytes
        if lacking <= 0:
            return
        for absence in sorted(
            self.open.values(),
            key=lambda absence: (self.clock.stored_s[absence.tensor], -absence.before),
        ):
            if lacking <= 0:
                return
            del self.open[absence.tensor]
            self.instructions.append(Free(absence.tensor))
            self.clock.free(absence.tensor)
            self.off_bytes += self.problem.size_bytes(absence)
            lacking -= self.problem.size_bytes(absence)
            self.used.append(absence)
            self.away.append(absence)
        self.away.sort(key=lambda absence: (absence.before, absence.tensor))

    def _fetch(self, absence: Absence) -> None:
        self.away.remove(absence)
        self.off_bytes -= self.problem.size_bytes(absence)
        self.clock.copy_back(absence.tensor, self.problem.size_bytes(absence))
        self.instructions.append(SwapIn(absence.tensor))

    def _early(self, point: int, due: list[Absence]) -> list[Absence]:
        """Fetches that come before their readers' points, in the order of the readers."""
        chosen: list[Absence] = []
        size_of = self.problem.size_bytes
        ready_s = max(self.clock.now_s, self.clock.in_free_s) - self.clock.now_s
        ready_s += sum(self.problem.device.swap_in_time_s(size_of(absence)) for absence in due)
        fetched = sum(map(size_of, due))
        for absence in self.away:
            if absence.before == point:
                continue
            size = size_of(absence)
            ready_s += self.problem.device.swap_in_time_s(size)
            until_s = float(self.starts_s[absence.before] - self.starts_s[point])
            if until_s > self.timing.lead * ready_s:
                break
            span = slice(point, absence.before)
            if int(self.least_bytes[span].max()) + size > self.budget_bytes:
                break
            held = int(self.problem.need_bytes[point]) - self.off_bytes + fetched + size
            if held > self.budget_bytes and not self.timing.waits:
                break
            self.least_bytes[span] += size
            fetched += size
            chosen.append(absence)
        return chosen


def schedule(
    problem: GraphProblem, budget_bytes: int, absences: tuple[Absence, ...], timing: Timing
) -> Scheduled:
    """The program that uses these absences; those that it never had to free are left out.

    Args:
        problem: points and link.
        budget_bytes: at least what is left when all the absences are used.
        absences: ascending.
        timing: how early copies and fetches come.
    """
    while True:
        found = _Pass(problem, budget_bytes, timing, absences)
        found.run()
        used = tuple(sorted(found.used))
        if used == absences:
            program = Program(with_frees(problem.graph, found.instructions))
            clock = found.clock
            time_s = max(clock.now_s, clock.out_free_s, clock.in_free_s)
            return Scheduled(program, used, time_s)
        # A copy that is never followed by a free was for nothing: plan again without it.
        absences = used
