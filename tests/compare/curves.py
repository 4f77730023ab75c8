"""Members of a portfolio that are curves of plans over time, and the clock that they move."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from memopt.models.status import Status
from memopt.programs.instructions import Program
from memopt.programs.solution import Solution
from memopt.strategies.shared.members import MemberOutcome


@dataclass
class Clock:
    """Seconds that pass only where a member works."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class Curve:
    """A member whose plan is the better the longer it may work.

    Attributes:
        least_s: seconds that it takes at least.
        most_s: seconds after which it ends.
        plan_s: working seconds → the time of its plan's step; None: it has none.
        check_s: seconds that its plan takes to be checked, beside.
        spent_s: what it took when it was last asked.
        without_plan: what it returns without a plan.
    """

    clock: Clock
    name: str
    quick: bool
    least_s: float
    most_s: float
    plan_s: Callable[[float], float | None]
    check_s: float = 0.0
    spent_s: float = field(default=-1.0)
    known: Sequence[Program] = ()
    without_plan: Solution = field(default_factory=lambda: Solution(Status.UNKNOWN))

    @property
    def strategy(self) -> Any:
        return SimpleNamespace(name=self.name)

    def run(self, *given: Any) -> MemberOutcome:
        _, _, share_s, _, self.known = given
        self.spent_s = max(self.least_s, min(share_s, self.most_s))
        self.clock.now_s += self.spent_s + self.check_s
        plan_s = self.plan_s(self.spent_s)
        if plan_s is None:
            return MemberOutcome(self.name, self.spent_s, self.without_plan)
        solution = Solution(Status.FEASIBLE, program=Program(()), peak_bytes=1, time_s=plan_s)
        spent_s = self.spent_s + self.check_s
        return MemberOutcome(self.name, spent_s, solution, check_s=self.check_s)
