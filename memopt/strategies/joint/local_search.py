"""Local search over runs and moves, judged by the replayed time.

Descent takes any change that makes the step faster. Annealing continues from there and also takes
slower changes, fewer and fewer. Both count the changes tried and not seconds, so that a search that
its time limit does not stop gives the same plan on any machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from random import Random

import numpy as np

from memopt.solvers.running import Deadline
from memopt.strategies.joint.moved import Moved, Mover
from memopt.strategies.joint.neighbours import Decisions, Neighbourhood
from memopt.strategies.shared.run_table import Ints
from memopt.strategies.shared.timing import TIMINGS
from memopt.strategies.shared.worth import LOOK_S, STEPS, Payback

FASTER = 1e-7
"""Share of a time by which a change must be faster to count as faster."""
COLD = 5e-6
"""Share of the step's time by which annealing accepts slower changes at its end."""
NEAR = 1e-4
"""Gap to the bound at which a search ends."""


@dataclass(eq=False)
class LocalSearch:
    """A local search from runs that fit.

    Attributes:
        mover: of the graph and its budget.
        deadline: asked now and then.
        bound_s: a lower bound on every program's time.
        seed: of the order in which changes are tried.
        most: the most changes tried; None: no limit.
        gap: to the bound, at which the search ends.
        payback: ends the search where it does not pay; None: nothing does.
        tried: how many changes were judged.
        best: the fastest decisions and their moved runs.
    """

    mover: Mover
    deadline: Deadline
    bound_s: float = 0.0
    seed: int = 0
    most: int | None = None
    gap: float = NEAR
    payback: Payback | None = None
    tried: int = field(default=0, init=False)
    best: tuple[Decisions, Moved] | None = field(default=None, init=False)

    def start(self, runs: Ints) -> Decisions:
        """Return the decision to run these, with every tensor free to move."""
        nothing = np.zeros(self.mover.arrays.size_bytes.size, dtype=np.bool_)
        return Decisions(runs, nothing, nothing)

    @property
    def time_s(self) -> float:
        """Return the time of the best so far, seconds."""
        return math.inf if self.best is None else self.best[1].time_s

    def judged(self, at: Decisions, most_s: float = math.inf) -> Moved:
        """Judge decisions: place their transfers, and keep them if they are the best so far. Those
        that take `most_s` or longer may count as not fitting."""
        self.tried += 1
        moved = self.mover.moved(at.runs, at.stays, TIMINGS[:1], at.first, most_s)
        if moved.time_s < self.time_s:
            self.best = Decisions(moved.runs, at.stays, at.first), moved
        return moved

    def finished(self) -> Moved:
        """Return the best, its copies and fetches under the best of all timings."""
        assert self.best is not None
        at, moved = self.best
        final = self.mover.moved(at.runs, at.stays, TIMINGS, at.first)
        return final if final.time_s < moved.time_s else moved

    def descend(self, at: Decisions) -> Decisions:
        """Descend by changes of many equal layers at once, then one by one, to a local optimum."""
        rng, moved = Random(self.seed), self.judged(at)
        for wide in (True, False):
            going = True
            while going and not self._ended():
                going = False
                near = Neighbourhood(self.mover, at, moved, rng)
                for change in near.changes(wide):
                    most_s = moved.time_s * (1 - FASTER)
                    found = self.judged(change, most_s)
                    if found.time_s < most_s:
                        at, moved = Decisions(found.runs, change.stays, change.first), found
                        going = True
                        break
                    if self._ended():
                        break
        return at

    def anneal(self, at: Decisions, changes: int, hot: float) -> None:
        """Anneal from decisions by so many changes. At first, changes that slow the step by about
        the share `hot` of its time are accepted."""
        rng, moved = Random(self.seed), self.judged(at)
        begin, seconds = self.tried, self.deadline.left_s
        while not self._ended():
            accepted = False
            for change in Neighbourhood(self.mover, at, moved, rng).changes():
                done = (self.tried - begin) / max(1, changes)
                if math.isfinite(seconds):
                    done = max(done, 1 - self.deadline.left_s / max(1e-9, seconds))
                if done >= 1 or self._ended():
                    return
                heat = moved.time_s * hot * (COLD / hot) ** done
                # Slower by s is taken with probability exp(-s / heat).
                most_s = moved.time_s - heat * math.log(max(1e-300, rng.random()))
                found = self.judged(change, most_s)
                if found.time_s <= moved.time_s or found.time_s < most_s:
                    at, moved = Decisions(found.runs, change.stays, change.first), found
                    accepted = True
                    break
            if not accepted:
                return

    def _ended(self) -> bool:
        if self.time_s <= self.bound_s * (1 + self.gap) or self.tried == self.most:
            return True
        if self.payback is not None and self.tried % 16 == 0 and self.payback.ended(self.time_s):
            return True
        return self.deadline.over or (
            self.tried % 16 == 0
            and self.deadline.passed(0.7, f"joint: local search, {self.time_s:.6g} s")
        )


HEATS = (3e-4, 1e-2, 3e-3)
"""Start temperatures, each from the best so far; the second suits large tensors."""
MOST_PASSES = 8
"""The most times that all of them are tried."""


def annealings(
    deadline: Deadline, began_s: float | None, best_s: Callable[[], float]
) -> Iterator[tuple[int, float, Deadline]]:
    """Yield (number, start temperature, deadline) of one annealing after the other.

    Args:
        deadline: of all.
        began_s: where the search must pay, when it began: all temperatures together take as long
            as the search so far, again and again, until the seconds of a pass do not come back in
            STEPS steps. None: each temperature once.
        best_s: returns the time of the best step so far, seconds.
    """
    if began_s is None:
        yield from ((number, hot, deadline) for number, hot in enumerate(HEATS))
        return
    for first in range(0, MOST_PASSES * len(HEATS), len(HEATS)):
        begin_s, before_s = time.monotonic(), best_s()
        each_s = max(LOOK_S, (begin_s - began_s) / len(HEATS))
        for number, hot in enumerate(HEATS):
            yield first + number, hot, deadline.within(each_s)
        if STEPS * (before_s - best_s()) < time.monotonic() - begin_s:
            return
