"""One strategy as a member of auto: solved, lowered, validated and replayed as `plan` does it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from memopt.errors import MemoptError
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.status import Status
from memopt.programs.instructions import Program
from memopt.programs.solution import Solution
from memopt.reductions.chain_view import ChainView
from memopt.solvers.running import Deadline
from memopt.strategies.base import CostModel, Features, Progress, Strategy
from memopt.strategies.host_budget import host_limit
from memopt.strategies.target import Target


@dataclass(frozen=True)
class MemberOutcome:
    """The result of one member.

    Attributes:
        name: the strategy's.
        seconds: how long it took.
        solution: the strategy's, of a graph as a program, with the replayed peak and time; UNKNOWN
            where it failed. `lower_bound_s` is infinity if its class has no schedule within the
            budget, and None for a graph's chain, whose accounting counts more memory than the
            program needs: a faster program may still fit.
        note: why there is no valid plan.
        check_s: how much of `seconds` lowering and checking the plan took.
    """

    name: str
    seconds: float
    solution: Solution
    note: str = ""
    check_s: float = 0.0

    @property
    def plans(self) -> bool:
        """Tell whether there is a valid plan within the budget."""
        return self.solution.plans

    @property
    def time_s(self) -> float:
        """Return the replayed step time, seconds; 0 without a plan."""
        return self.solution.time_s or 0.0

    @property
    def line(self) -> tuple[str, str, float | None, float, str]:
        """Return (name, status, step time in s, seconds spent, note), for the stats."""
        time_s = self.time_s if self.plans else None
        return self.name, str(self.solution.status), time_s, self.seconds, self.note


@dataclass(frozen=True)
class Member:
    """A strategy that can plan the cost model."""

    target: Target

    @property
    def strategy(self) -> Strategy:
        """Return the strategy that plans."""
        return self.target.strategy

    def run(
        self,
        budget_bytes: int | None,
        device: Device,
        share_s: float,
        progress: Progress | None,
        known: Sequence[Program] = (),
    ) -> MemberOutcome:
        """Solve within `share_s` seconds and check the plan; `known` are programs within the budget
        that a strategy may start from."""
        begin = time.monotonic()

        def attempt(limit_bytes: int | None) -> Solution:
            # The probes of one member share its time.
            left_s = max(0.0, begin + share_s - time.monotonic())
            return self.strategy.solve_from(
                known,
                self.target.solved,
                limit_bytes,
                device=device,
                time_limit_s=left_s,
                progress=progress,
            )

        note, solved_s = "", begin
        try:
            solution = self.target.solve(budget_bytes, attempt, Deadline(begin + share_s))
            solved_s = time.monotonic()
            solution, note = self._checked(solution, budget_bytes, device)
        except (MemoptError, MemoryError) as error:
            # One member that gives up (a host budget, a table too large) does not stop the rest.
            solution, note = Solution(Status.UNKNOWN), str(error)
        end = time.monotonic()
        checked_s = end - solved_s if solution.plans else 0.0
        return MemberOutcome(self.strategy.name, end - begin, solution, note, checked_s)

    @property
    def quick(self) -> bool:
        """Tell whether it has a plan at once, whatever the time: its least memory in one pass."""
        return (
            self.strategy.features in (Features(), Features(recompute=True))
            and self.strategy.needs != "graph"
        )

    def _lowered(self, smallest: Solution | None) -> Solution | None:
        """Return the plan of the smallest budget, of a graph as a program."""
        view = self.target.linearized
        if smallest is None or view is None or smallest.steps is None:
            return smallest
        return replace(smallest, program=view.lower(smallest.steps), steps=None)

    def _checked(
        self, solution: Solution, budget_bytes: int | None, device: Device
    ) -> tuple[Solution, str]:
        """Validate and replay a solution. Return it in the form that `MemberOutcome.solution` has,
        and why its plan is not valid ("" if it is)."""
        program = self.target.program(solution, budget_bytes, device)
        linearized = self.target.linearized is not None
        if program is None:
            proved = solution.status is Status.INFEASIBLE and not linearized
            smallest = self._lowered(solution.smallest)
            bound_s = math.inf if proved else None
            return replace(solution, lower_bound_s=bound_s, smallest=smallest), ""
        budget = Budget(budget_bytes, host_limit(self.strategy, None))
        violation, figures = self.target.check(program, budget, device)
        if violation is not None:
            return Solution(Status.UNKNOWN, stats=solution.stats), f"invalid plan: {violation}"
        bare = self.target.bare_chain is not None
        checked = replace(
            solution,
            steps=solution.steps if bare else None,
            program=program,
            peak_bytes=figures.peak_bytes,
            time_s=figures.time_s,
            lower_bound_s=None if linearized else solution.lower_bound_s,
        )
        return checked, ""


def fitting(
    cost_model: CostModel, strategies: Sequence[Strategy]
) -> tuple[tuple[Member, ...], tuple[str, ...]]:
    """Return the strategies that can plan this cost model, and why the others cannot."""
    view: ChainView | None = None
    members: list[Member] = []
    refused: list[str] = []
    for strategy in strategies:
        target = Target.of(strategy, cost_model, view)
        view = view or target.view
        reason = target.why_not()
        if reason is None:
            members.append(Member(target))
        else:
            refused.append(reason)
    return tuple(members), tuple(refused)


def for_forward(members: Sequence[Member]) -> tuple[tuple[Member, ...], tuple[str, ...]]:
    """Select members for a graph without a backward: those that may lower its memory, recomputing
    ones before those that only move or reorder. Also return why the others are left out."""
    fit = [member for member in members if member.strategy.plans_forward]
    fit.sort(key=lambda m: (m.strategy.needs == "graph", not m.strategy.features.recompute))
    refused = tuple(
        f"{member.strategy.name} lowers no memory where there is no backward"
        for member in members
        if not member.strategy.plans_forward
    )
    return tuple(fit), refused
