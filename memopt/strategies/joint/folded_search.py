"""Local search over a folded step's decisions, with the whole step as the judge."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from memopt.strategies.joint.local_search import LocalSearch
from memopt.strategies.joint.moved import Moved, Mover
from memopt.strategies.joint.neighbours import Decisions
from memopt.strategies.joint.unfolding import Unfolding
from memopt.strategies.shared.timing import TIMINGS


@dataclass(eq=False)
class FoldedSearch(LocalSearch):
    """Searches the decisions of a folded step; `mover` is that step's, whatever its budget.

    Attributes:
        unfolding: to the whole step.
        judge: makes the whole step's runs fit.
    """

    unfolding: Unfolding = field(kw_only=True)
    judge: Mover = field(kw_only=True)

    def judged(self, at: Decisions, most_s: float = math.inf) -> Moved:
        self.tried += 1
        whole = self.unfolding.decisions(at)
        moved = self.judge.moved(whole.runs, whole.stays, TIMINGS[:1], whole.first, most_s)
        events = moved.events
        if events is not None:
            events = events.copy()
            events[:, 2] = self.unfolding.image[events[:, 2]]
        found = replace(moved, runs=self.mover.used(at.runs), events=events)
        if moved.time_s < self.time_s:
            self.best = Decisions(found.runs, at.stays, at.first), found
        return found

    def whole(self) -> Decisions:
        """The best, as the whole step's."""
        assert self.best is not None
        return self.unfolding.decisions(self.best[0])
