"""From chosen absences to a program: the mover's transfers under one timing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memopt.programs.instructions import Program
from memopt.programs.liveness import with_frees
from memopt.strategies.shared.graph_problem import Absence, GraphProblem
from memopt.strategies.shared.timing import Link, Timing


@dataclass(frozen=True)
class Scheduled:
    """A program with the absences that it really used and its time."""

    program: Program
    used: tuple[Absence, ...]
    time_s: float


def schedule(
    problem: GraphProblem, budget_bytes: int, absences: tuple[Absence, ...], timing: Timing
) -> Scheduled:
    """Build the program that uses these absences; those that never had to free are left out.

    Args:
        problem: points and link.
        budget_bytes: at least what is left when all the absences are used.
        absences: ascending.
        timing: how early copies and fetches come.
    """
    from memopt.strategies.shared.transfer_kernels import transfers

    # The kernel begins the copies of one point with the tensor that comes last.
    rank: dict[int, int] = {}
    for absence in absences:
        rank.setdefault(absence.tensor, -len(rank))
    ordered = sorted(absences, key=lambda one: (rank[one.tensor], one))
    rows = [(one.tensor, one.after, one.before, problem.produced[one.tensor]) for one in ordered]
    gaps = np.array(rows, dtype=np.int64).reshape(-1, 4)
    time_s, _, events, used = transfers(
        problem.table.arrays, problem.runs, problem.need_bytes, gaps, np.ones(len(gaps), np.bool_),
        budget_bytes, Link.of(problem.device), timing, math.inf,
    )  # fmt: skip
    steps = problem.table.instructions(problem.runs, events)
    program = Program(with_frees(problem.graph, steps))
    kept = (one for one, is_used in zip(ordered, used, strict=True) if is_used)
    return Scheduled(program, tuple(sorted(kept)), time_s)
