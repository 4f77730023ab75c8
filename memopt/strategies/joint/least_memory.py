"""The program of least memory: runs that need little once everything movable is on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from random import Random

import numpy as np

from memopt.errors import InvalidProgramError
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.solvers.running import Deadline
from memopt.strategies.joint.moved import Mover
from memopt.strategies.joint.neighbours import Decisions, Neighbourhood
from memopt.strategies.shared.run_table import Ints

CHANGES = 3000
"""The most changes tried; a count, so that the budget named in time does not depend on the
machine."""


def least_memory(
    mover: Mover, starts: Iterable[Ints], deadline: Deadline | None = None
) -> tuple[Ints, int]:
    """Return the runs that can meet the smallest budget found, and that budget, total bytes.

    Args:
        mover: says what may move; its own budget does not count.
        starts: runs to begin from, at least one.
        deadline: of the search.
    """
    until = deadline or Deadline()
    found: list[tuple[Ints, int]] = []
    for runs in starts:
        if found and not until.left_s:
            break
        found.append((runs, mover.floor_bytes(runs)))
    runs, least_bytes = min(found, key=lambda pair: pair[1])
    rng, tried = Random(0), 0
    nothing = np.zeros(mover.arrays.size_bytes.size, dtype=np.bool_)
    going = True
    while going and tried < CHANGES and until.left_s:
        going = False
        at = Decisions(mover.used(runs), nothing, nothing)
        for change in Neighbourhood(mover, at, None, rng).changes():
            tried += 1
            size_bytes = mover.floor_bytes(change.runs)
            if size_bytes < least_bytes:
                runs, least_bytes, going = change.runs, size_bytes, True
                break
            if tried >= CHANGES or (tried % 16 == 0 and not until.left_s):
                return runs, least_bytes
    return runs, least_bytes


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
