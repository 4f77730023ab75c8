"""The program of least memory: runs that need little once everything movable is on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from memopt.errors import InvalidProgramError
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.solvers.running import Deadline
from memopt.strategies.joint.moved import Mover
from memopt.strategies.joint.neighbours import Decisions, Neighbourhood
from memopt.strategies.shared.run_table import Ints

CHANGES = 4000
"""The most changes tried; a count, so that the budget named in time does not depend on the
machine."""
BELOW = (0.01, 0.0)
"""What is above the least peak, less these shares of it, is lowered: most steps have their peak at
several time points, of which a change lowers one."""


def least_memory(
    mover: Mover, starts: Iterable[Ints], deadline: Deadline | None = None
) -> tuple[Ints, int]:
    """Return the runs that can meet the smallest budget found, and that budget, total bytes."""
    until = deadline or Deadline()
    found: list[tuple[Ints, int]] = []
    for runs in starts:
        if found and not until.left_s:
            break
        found.append((runs, mover.floor_bytes(runs)))
    search = _LeastSearch(mover, until, *min(found, key=lambda pair: pair[1]))
    for below in BELOW:
        search.descend(below)
    return search.runs, search.least_bytes


@dataclass(eq=False)
class _LeastSearch:
    """A descent to less memory."""

    mover: Mover
    deadline: Deadline
    runs: Ints
    least_bytes: int
    tried: int = 0

    def __post_init__(self) -> None:
        self.rng = Random(0)
        self.nothing = np.zeros(self.mover.arrays.size_bytes.size, dtype=np.bool_)

    def descend(self, below: float) -> None:
        """Take changes that lower the bytes above a target, summed over all time points. The target
        lies a share of the least peak so far below it."""
        runs, needs = self.mover.used(self.runs), self.mover.needs(self.runs)
        while needs is not None and not self._ended():
            target = min(self.least_bytes - 1, int(self.least_bytes * (1 - below)))
            above, at = _above(needs, target), Decisions(runs, self.nothing, self.nothing)
            needs = None
            for change in Neighbourhood(self.mover, at, None, self.rng).changes():
                self.tried += 1
                found = self.mover.needs(change.runs)
                if found is not None and _above(found, target) < above:
                    runs, needs = self.mover.used(change.runs), found
                    break
                if self._ended():
                    return
            if needs is not None and needs.max() < self.least_bytes:
                self.runs, self.least_bytes = runs, int(needs.max())

    def _ended(self) -> bool:
        return self.tried >= CHANGES or (self.tried % 16 == 0 and not self.deadline.left_s)


def _above(needs: Ints, target_bytes: int) -> int:
    """Return the bytes above a target in all time points together."""
    return int((needs - target_bytes).clip(0).sum())


def program_within(mover: Mover, runs: Ints, budget_bytes: int) -> Program | None:
    """Return the fastest program of runs within total bytes; None if the host has no room."""
    moved = replace(mover, budget_bytes=budget_bytes).thorough(runs)
    return mover.program(moved) if moved.fits else None


def smaller(mover: Mover, programs: Iterable[Program | None]) -> Program:
    """Return the program of the smallest peak, of those whose host copies find room.

    Raises:
        InvalidProgramError: there is none.
    """
    best: tuple[int, Program] | None = None
    for program in programs:
        if program is None:
            continue
        timeline = replay(mover.table.graph, program, mover.device)
        fits = timeline.host_peak_bytes <= mover.host_bytes
        if fits and (best is None or timeline.peak_bytes < best[0]):
            best = timeline.peak_bytes, program
    if best is None:
        raise InvalidProgramError("no program keeps the host's budget")
    return best[1]
