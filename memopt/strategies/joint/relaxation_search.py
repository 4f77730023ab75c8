"""Programs from the relaxation with the link: runs from its answer, transfers by the mover."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from memopt.models.status import Status
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.replay import Timeline, replay
from memopt.strategies.joint.moved import Mover
from memopt.strategies.joint.relaxation import LinkedModel
from memopt.strategies.shared.incumbent import Incumbent
from memopt.strategies.shared.run_table import Flags, Ints
from memopt.strategies.shared.time_point_search import TimePointSearch
from memopt.strategies.shared.timing import TIMINGS


@dataclass
class LinkedSearch(TimePointSearch):
    """Solves the relaxation, adding time points and slack where its program does not fit.

    Attributes:
        mover: makes runs fit by transfers; its budget is the search's.
        least_bytes: as for `LinkedModel`.
        gap: at which a solve may end.
        found: the runs of every answer.
    """

    mover: Mover = field(kw_only=True)
    least_bytes: int = 1
    gap: float = 3e-3
    found: list[Ints] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.best = Incumbent(
            self.graph, self.budget_bytes, tolerance=0.0, device=self.mover.device
        )

    def _solved(self, slack: dict[int, int]) -> tuple[Program, Timeline] | None:
        keys = sorted(slack)
        free = tuple(slack[key] for key in keys)
        built = LinkedModel(
            self.graph,
            self.allowed,
            tuple(keys[1:]),
            free,
            device=self.mover.device,
            least_bytes=self.least_bytes,
        )
        answer = self._answer(built, self.gap)
        if not any(free):
            self.bound_s = max(self.bound_s, answer.bound)
            self.infeasible = self.infeasible or answer.status is Status.INFEASIBLE
        if not answer.values:
            return None
        moves = {t for back in built.f for t, v in back.items() if answer.values[v]}
        stays = np.array([t not in moves for t in range(len(self.graph.tensors))])
        return self._offered(built.program(answer.values), stays)

    def _offered(self, program: Program, stays: Flags) -> tuple[Program, Timeline]:
        """Offer the program with the transfers it needs. Return it with the answer's transfers,
        which may leave it over the budget."""
        runs = self.mover.table.runs_of(program)
        moved = self.mover.moved(runs, timings=TIMINGS, first=~stays)
        if moved.fits:
            self.found.append(moved.runs)
            self._offer_within(self.mover.program(moved))
        least_bytes = max(self.budget_bytes, self.mover.floor_bytes(runs, stays))
        mover = replace(self.mover, budget_bytes=least_bytes)
        moved = mover.moved(runs, stays, TIMINGS)
        # If the host has no room for these moves, return the program without them.
        program = mover.program(moved) if moved.fits else with_in_place(self.graph, program)
        return program, self._offer_within(program)

    def _offer_within(self, program: Program) -> Timeline:
        """Offer a program if the host has room for its copies."""
        timeline = replay(self.graph, program, self.mover.device)
        if timeline.host_peak_bytes <= self.mover.host_bytes:
            self.best.offer(program)
        return timeline
