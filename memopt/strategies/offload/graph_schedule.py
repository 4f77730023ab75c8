"""Makes a program from chosen absences: the mover's transfers under one timing."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from memopt.programs.instructions import Program
from memopt.programs.liveness import with_frees
from memopt.strategies.shared.graph_problem import Absence, GraphProblem
from memopt.strategies.shared.run_table import Ints
from memopt.strategies.shared.timing import Link, Timing


@dataclass(frozen=True, eq=False)
class Scheduled:
    """The scheduled transfers of some absences.

    Attributes:
        problem: the absences' problem.
        used: the absences in which a tensor really left the device.
        time_s: of the step, as the replay counts it.
        host_bytes: the peak on the host.
        events: the mover's.
    """

    problem: GraphProblem
    used: tuple[Absence, ...]
    time_s: float
    host_bytes: int
    events: Ints

    def program(self) -> Program:
        """Build the program."""
        steps = self.problem.table.instructions(self.problem.runs, self.events)
        return Program(with_frees(self.problem.graph, steps))


def schedule(
    problem: GraphProblem, budget_bytes: int, absences: tuple[Absence, ...], timing: Timing
) -> Scheduled:
    """Place the transfers of these absences; those that never had to free are left out.

    Args:
        problem: points and link.
        budget_bytes: at least the memory needed when all the absences are used.
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
    time_s, host_bytes, events, used = transfers(
        problem.table.arrays, problem.runs, problem.need_bytes, gaps, np.ones(len(gaps), np.bool_),
        budget_bytes, Link.of(problem.device), timing, math.inf,
    )  # fmt: skip
    kept = (one for one, is_used in zip(ordered, used, strict=True) if is_used)
    return Scheduled(problem, tuple(sorted(kept)), time_s, host_bytes, events)
