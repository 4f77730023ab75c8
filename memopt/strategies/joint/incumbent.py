"""The fastest program of a search so far, its bound, and the time that is left to beat it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from memopt.models.bounds import time_lower_bound
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.solvers.running import Deadline
from memopt.strategies.joint.local_search import NEAR
from memopt.strategies.shared.worth import worth_s

PROVED, CLOSE = 1e-6, 2e-3
"""Gaps at which a plan is optimal, and at which it is too good for slow searches."""

MUCH = 0.02
"""By how much of its time the best program must beat those that move nothing, so that more of
these are not looked for: in the same seconds the local search finds more."""


@dataclass(eq=False)
class JointIncumbent:
    """The fastest program so far.

    Attributes:
        graph, budget_bytes, device: as in `Strategy.solve`.
        host_bytes: the most that may be on the host; 0: nothing moves.
        deadline: of the whole solve.
        gap: share of the bound at which the search ends.
        pays: whether it also ends where more seconds would not come back in training.
        best: (program, seconds, where it is from).
        bound_s: a lower bound on every program's time, seconds.
        recomputed_s: the time of the fastest program that moves nothing.
    """

    graph: Graph
    budget_bytes: int | None
    device: Device
    host_bytes: float
    deadline: Deadline
    gap: float = 0.0
    pays: bool = False
    best: tuple[Program, float, str] | None = field(default=None, init=False)
    bound_s: float = field(default=0.0, init=False)
    recomputed_s: float = field(default=math.inf, init=False)

    def __post_init__(self) -> None:
        self.began_s = time.monotonic()
        self.bound_s = time_lower_bound(self.graph)

    @property
    def limit_bytes(self) -> int:
        """Return the budget; without one, more than any step needs."""
        return 2**60 if self.budget_bytes is None else self.budget_bytes

    @property
    def best_s(self) -> float:
        """Return the time of the best so far, seconds."""
        return math.inf if self.best is None else self.best[1]

    @property
    def near(self) -> bool:
        """Tell whether no program can be much faster."""
        return self.best_s <= self.bound_s * (1 + max(CLOSE, self.gap))

    @property
    def done(self) -> bool:
        """Tell whether no program can be faster by more than the gap."""
        return self.best_s <= self.bound_s * (1 + max(PROVED, self.gap))

    @property
    def moving_wins(self) -> bool:
        """Tell whether a program that moves tensors is much faster than all that move nothing."""
        return self.best_s * (1 + MUCH) <= self.recomputed_s and self.best is not None

    @property
    def near_gap(self) -> float:
        """Return the gap at which a local search ends."""
        return max(NEAR, self.gap)

    def offer(self, program: Program, source: str) -> None:
        """Take a program if it keeps the budgets and is the fastest so far."""
        timeline = replay(self.graph, program, self.device)
        fits = timeline.peak_bytes <= self.limit_bytes
        fits = fits and timeline.host_peak_bytes <= self.host_bytes
        if fits and timeline.time_s < self.recomputed_s and not program.has_transfers:
            self.recomputed_s = timeline.time_s
        if fits and timeline.time_s < self.best_s:
            self.best = program, timeline.time_s, source
            self.shorten()

    def raise_bound(self, bound_s: float) -> None:
        """Take a lower bound if it is above the one known."""
        self.bound_s = max(self.bound_s, bound_s)
        self.shorten()

    def shorten(self) -> None:
        """Leave no more time than a faster program could gain."""
        if self.pays and self.best is not None:
            worth = worth_s(self.best_s - self.bound_s)
            self.deadline.at_s = min(self.deadline.at_s, self.began_s + worth)
