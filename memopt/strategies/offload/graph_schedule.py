"""From chosen gaps to a program: when to copy, when to free, when to fetch.

One pass over the slots keeps the time of the replay beside the memory. Copies to the host queue
as their data are made. A device copy is freed only where a slot needs the room, the copy that
ends first first. A fetch may come early where all the slots up to its reader still fit, since
what must still leave can leave: so the pass never gets stuck if the gaps cover the excess.
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
from memopt.programs.liveness import with_frees
from memopt.strategies.offload.graph_problem import Gap, GraphProblem
from memopt.strategies.offload.link_clock import LinkClock


@dataclass(frozen=True, slots=True)
class Timing:
    """How early things happen; the replay chooses among a few.

    Attributes:
        lead: a fetch is issued when the compute until its reader is at most so many times the
            time of all fetches up to it; infinite: as soon as it fits.
        waits: whether a fetch may come where its room must first be freed for it.
        at_once: whether a copy starts when its tensor is made, not when its gap starts.
    """

    lead: float
    waits: bool
    at_once: bool


@dataclass(frozen=True)
class Scheduled:
    """A program with the gaps that it really used and its time."""

    program: Program
    used: tuple[Gap, ...]
    time_s: float


@dataclass
class _Pass:
    problem: GraphProblem
    budget_bytes: int
    timing: Timing
    gaps: tuple[Gap, ...]
    instructions: list[Instruction] = field(default_factory=list)
    off_bytes: int = 0
    open: list[Gap] = field(default_factory=list)
    """Gaps that have started, their tensor still on the device."""
    away: list[Gap] = field(default_factory=list)
    """Gaps whose tensor is on the host only, by their end."""
    used: list[Gap] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.clock = LinkClock(self.problem.device)
        self.starts_s = np.cumsum(self.problem.durations_s) - self.problem.durations_s
        self.least_bytes = self.problem.need_bytes - self.problem.relieved_bytes(self.gaps)
        self.copies: dict[int, list[int]] = {}
        self.starts: dict[int, list[Gap]] = {}
        self.last: dict[int, int] = {}
        for gap in self.gaps:
            first = gap.tensor not in self.last
            if first:
                made = self.problem.produced[gap.tensor]
                slot = made if self.timing.at_once else gap.after
                self.copies.setdefault(slot, []).append(gap.tensor)
            self.last[gap.tensor] = gap.before
            self.starts.setdefault(gap.after, []).append(gap)

    def run(self) -> None:
        """Fill in instructions, time and the gaps used."""
        for slot, operator in enumerate(self.problem.operators):
            due = [gap for gap in self.away if gap.before == slot]
            self.open = [gap for gap in self.open if gap.before > slot]
            early = self._early(slot, due)
            fetched = sum(self.problem.size_bytes(gap) for gap in (*due, *early))
            self._release(slot, self.off_bytes - fetched)
            for gap in (*due, *early):
                self._fetch(gap)
            self._run(slot, operator)

    def _run(self, slot: int, operator: int | None) -> None:
        if operator is None:
            self.instructions.append(LossBoundary())
        else:
            reads = self.problem.graph.operators[operator].reads
            self.clock.compute(reads, float(self.problem.durations_s[slot]))
            self.instructions.append(Compute(operator, ()))
            for tensor in dict.fromkeys(reads):
                if self.last.get(tensor) == slot and tensor in self.clock.stored_s:
                    self.instructions.append(DropHost(tensor))
        for tensor in self.copies.get(slot, ()):
            self.clock.copy_out(tensor, self.problem.graph.tensors[tensor].size_bytes)
            self.instructions.append(SwapOut(tensor))
        self.open += self.starts.get(slot, [])

    def _release(self, slot: int, off_bytes: int) -> None:
        """Free what must be off the device at a slot."""
        lacking = int(self.problem.need_bytes[slot]) - off_bytes - self.budget_bytes
        if lacking <= 0:
            return
        for gap in sorted(
            self.open, key=lambda gap: (self.clock.stored_s[gap.tensor], -gap.before)
        ):
            if lacking <= 0:
                return
            self.open.remove(gap)
            self.instructions.append(Free(gap.tensor))
            self.clock.free(gap.tensor)
            self.off_bytes += self.problem.size_bytes(gap)
            lacking -= self.problem.size_bytes(gap)
            self.used.append(gap)
            self.away.append(gap)
        self.away.sort(key=lambda gap: (gap.before, gap.tensor))

    def _fetch(self, gap: Gap) -> None:
        self.away.remove(gap)
        self.off_bytes -= self.problem.size_bytes(gap)
        self.clock.copy_back(gap.tensor, self.problem.size_bytes(gap))
        self.instructions.append(SwapIn(gap.tensor))

    def _early(self, slot: int, due: list[Gap]) -> list[Gap]:
        """Fetches that come before their readers' slots, in the order of the readers."""
        chosen: list[Gap] = []
        size_of = self.problem.size_bytes
        ready_s = max(self.clock.now_s, self.clock.in_free_s) - self.clock.now_s
        ready_s += sum(self.problem.device.swap_in_time_s(size_of(gap)) for gap in due)
        fetched = sum(map(size_of, due))
        for gap in self.away:
            if gap.before == slot:
                continue
            size = size_of(gap)
            ready_s += self.problem.device.swap_in_time_s(size)
            until_s = float(self.starts_s[gap.before] - self.starts_s[slot])
            if until_s > self.timing.lead * ready_s:
                break
            span = slice(slot, gap.before)
            if int(self.least_bytes[span].max()) + size > self.budget_bytes:
                break
            held = int(self.problem.need_bytes[slot]) - self.off_bytes + fetched + size
            if held > self.budget_bytes and not self.timing.waits:
                break
            self.least_bytes[span] += size
            fetched += size
            chosen.append(gap)
        return chosen


def schedule(
    problem: GraphProblem, budget_bytes: int, gaps: tuple[Gap, ...], timing: Timing
) -> Scheduled:
    """The program that uses these gaps; those that it never had to free are left out.

    Args:
        problem: slots and link.
        budget_bytes: at least what is left when all the gaps are used.
        gaps: ascending.
        timing: how early copies and fetches come.
    """
    while True:
        found = _Pass(problem, budget_bytes, timing, gaps)
        found.run()
        used = tuple(sorted(found.used))
        if used == gaps:
            program = Program(with_frees(problem.graph, found.instructions))
            clock = found.clock
            time_s = max(clock.now_s, clock.out_free_s, clock.in_free_s)
            return Scheduled(program, used, time_s)
        # A copy that is never followed by a free was for nothing: plan again without it.
        gaps = used
