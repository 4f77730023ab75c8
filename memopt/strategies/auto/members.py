"""One strategy as a member of auto: solved, lowered, validated and replayed as `plan` does it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from memopt.errors import MemoptError
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.steps import ChainStep
from memopt.programs.instructions import Program
from memopt.reductions.chain_view import ChainView
from memopt.strategies.base import CostModel, Features, Progress, Solution, Status, Strategy
from memopt.strategies.host_budget import host_limit
from memopt.strategies.target import Target


@dataclass(frozen=True)
class Outcome:
    """What one member did. Byte figures are totals, as replayed.

    Attributes:
        name: the strategy's.
        status: as its solution says, UNKNOWN also where it failed.
        seconds: how long it took.
        given_s: how long it might take.
        time_s: replayed step time; 0 without a plan.
        peak_bytes: replayed peak; 0 without a plan.
        bound_s: no schedule of its class within the budget is faster; infinity if there is none.
            None: no bound, as for a graph's chain, whose accounting counts more memory than the
            program needs: a faster program may still fit.
        smallest_budget_bytes: when there is no plan, the smallest budget known to be feasible.
        smallest: the plan of that budget: of a graph as a program.
        steps: the schedule of a bare chain's plan.
        program: the plan; None: there is none.
        note: why there is no valid plan.
        stats: the solver's own.
    """

    name: str
    status: Status
    seconds: float
    given_s: float
    time_s: float = 0.0
    peak_bytes: int = 0
    bound_s: float | None = None
    smallest_budget_bytes: int | None = None
    steps: tuple[ChainStep, ...] | None = None
    program: Program | None = None
    smallest: Solution | None = None
    note: str = ""
    stats: Mapping[str, object] = field(default_factory=dict)

    @property
    def plans(self) -> bool:
        """Whether there is a valid plan within the budget."""
        return self.program is not None

    @property
    def line(self) -> tuple[str, str, float | None, float, str]:
        """(name, status, step time in s, seconds spent, note), for the stats."""
        time_s = self.time_s if self.plans else None
        return self.name, str(self.status), time_s, self.seconds, self.note


@dataclass(frozen=True)
class Member:
    """A strategy that fits."""

    target: Target

    @property
    def strategy(self) -> Strategy:
        """Who plans."""
        return self.target.strategy

    def run(
        self,
        budget_bytes: int | None,
        device: Device,
        share_s: float,
        progress: Progress | None,
    ) -> Outcome:
        """Solve within `share_s` seconds, as far as the strategy can stop, and judge the plan."""
        begin = time.monotonic()
        name = self.strategy.name

        def attempt(limit_bytes: int | None) -> Solution:
            # The probes of one member share its time.
            left_s = max(0.0, begin + share_s - time.monotonic())
            return self.strategy.solve(
                self.target.solved,
                limit_bytes,
                device=device,
                time_limit_s=left_s,
                progress=progress,
            )

        try:
            solution = self.target.solve(budget_bytes, attempt)
        except (MemoptError, MemoryError) as error:
            # One member that gives up (a host budget, a table too large) does not stop the rest.
            seconds = time.monotonic() - begin
            return Outcome(name, Status.UNKNOWN, seconds, share_s, note=str(error))
        return self._judged(solution, budget_bytes, device, begin, share_s)

    @property
    def quick(self) -> bool:
        """Whether it has a plan at once, whatever the time: its least memory in one pass."""
        return (
            self.strategy.features in (Features(), Features(recompute=True))
            and self.strategy.needs != "graph"
        )

    def _lowered(self, smallest: Solution | None) -> Solution | None:
        """The plan of the smallest budget, of a graph as a program."""
        view = self.target.linearized
        if smallest is None or view is None or smallest.steps is None:
            return smallest
        return replace(smallest, program=view.lower(smallest.steps), steps=None)

    def _judged(
        self,
        solution: Solution,
        budget_bytes: int | None,
        device: Device,
        begin: float,
        share_s: float,
    ) -> Outcome:
        name, program = self.strategy.name, self.target.program(solution, budget_bytes)
        view = self.target.linearized
        if program is None:
            status = solution.status
            proved = status is Status.INFEASIBLE and view is None
            return Outcome(
                name,
                status,
                time.monotonic() - begin,
                share_s,
                bound_s=float("inf") if proved else None,
                smallest_budget_bytes=solution.smallest_budget_bytes,
                smallest=self._lowered(solution.smallest),
                stats=solution.stats,
            )
        budget = Budget(budget_bytes, host_limit(self.strategy, None))
        violation, figures = self.target.check(program, budget, device)
        seconds = time.monotonic() - begin
        if violation is not None:
            note = f"invalid plan: {violation}"
            return Outcome(name, Status.UNKNOWN, seconds, share_s, note=note, stats=solution.stats)
        return Outcome(
            name,
            solution.status,
            seconds,
            share_s,
            time_s=figures.time_s,
            peak_bytes=figures.peak_bytes,
            bound_s=None if view is not None else solution.lower_bound_s,
            steps=solution.steps if view is None else None,
            program=program,
            stats=solution.stats,
        )


def fitting(
    cost_model: CostModel, strategies: Sequence[Strategy]
) -> tuple[tuple[Member, ...], tuple[str, ...]]:
    """The strategies that can plan this cost model, and why the others cannot."""
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
