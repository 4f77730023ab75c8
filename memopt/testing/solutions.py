"""Checks of the laws of `Strategy.solve` on the solutions themselves."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping

from memopt.errors import InvalidProgramError, MemoptError
from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.status import Status
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.programs.violations import ViolationCode
from memopt.reductions.chain_replay import replay_chain
from memopt.strategies.base import CostModel, Progress
from memopt.strategies.host_budget import host_limit
from memopt.strategies.store_all import chain_steps
from memopt.strategies.target import Target
from memopt.testing.case import Case, Law, StrategyLawError

SHARES = (0.3, 1.0)
"""Budgets to check, as shares of the way from the smallest budget to the unplanned step's peak."""
AT_ONCE_S = 1e-6
SAME = 1e-6
"""Relative tolerance of equal times, since solvers round costs to whole numbers."""
_OVER = (ViolationCode.OVER_BUDGET, ViolationCode.OVER_HOST_BUDGET)


def store_all_peak(cost_model: CostModel) -> int:
    """Return the peak of the step in its own order with nothing recomputed, total bytes."""
    if isinstance(cost_model, Chain):
        return replay_chain(cost_model, chain_steps(cost_model)).peak_bytes
    return replay(cost_model, store_all(cost_model)).peak_bytes


def budgets_between(least_bytes: int, most_bytes: int) -> list[int | None]:
    """Return budgets from the smallest to the largest useful one, and None (no limit)."""
    above = (least_bytes + round(share * max(0, most_bytes - least_bytes)) for share in SHARES)
    return [*dict.fromkeys((least_bytes, *above)), None]


def check_solutions(case: Case) -> None:
    """Check the solutions of `solve` for the case's cost model; strategies that plan chains get a
    graph's chain."""
    cost_model = Target.of(case.strategy, case.model).solved
    check = SolutionCheck(case, Target.of(case.strategy, cost_model))
    answer = check.solved(1)
    least = answer.smallest_budget_bytes or store_all_peak(cost_model)
    times: dict[float, tuple[Solution, float]] = {}
    for budget in budgets_between(least, store_all_peak(cost_model)):
        solution = check.solved(budget)
        again = check.solved(budget)
        same = plan_of(solution) == plan_of(again)
        case.require(Law.DETERMINISTIC, same, budget, "the second solve gave another plan")
        case.require(Law.PLANS, solution.plans or budget is not None, budget, "there is no plan")
        times[math.inf if budget is None else budget] = solution, check.time_s(solution, budget)
    check_order(case, times)
    for budget in (1, least, None):
        check.stops(budget)


def plan_of(solution: Solution) -> tuple[object, ...]:
    """Return the parts of a solution that a repeated solve must return again."""
    return solution.steps, solution.program, solution.status


class SolutionCheck:
    """Solves a case's cost model, and checks each solution."""

    def __init__(self, case: Case, target: Target) -> None:
        self.case, self.target = case, target

    def solved(
        self,
        budget: int | None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        """Solve, and check the solution."""
        try:
            solution = self.case.strategy.solve(
                self.target.solved,
                budget,
                device=self.case.device,
                time_limit_s=time_limit_s,
                progress=progress,
            )
        except MemoptError as error:
            # If no plan fits, `solve` must return a solution without a plan, not raise.
            self.case.require(Law.REFUSAL, False, budget, f"{type(error).__name__}: {error}")
            raise
        self._check(solution, budget)
        return solution

    def time_s(self, solution: Solution, budget: int | None) -> float:
        """Check that a plan is valid and keeps the budgets; return its seconds, or infinity."""
        if not solution.plans:
            return math.inf
        case, target = self.case, self.target.resolved(solution)
        given = solution.steps if isinstance(target.solved, Chain) else solution.program
        case.require(
            Law.VALID, given is not None, budget, f"no schedule of a {case.strategy.needs}"
        )
        limits = Budget(budget, host_limit(case.strategy, None))
        try:
            program = target.program(solution, budget)
            assert program is not None
            violation, figures = target.check(program, limits, case.device)
        except InvalidProgramError as error:
            case.require(Law.VALID, False, budget, str(error))
            raise
        if violation is not None:
            law = Law.BUDGETS if violation.code in _OVER else Law.VALID
            case.require(law, False, budget, str(violation))
        return figures.time_s

    def _check(self, solution: Solution, budget: int | None) -> None:
        case, status, bound = self.case, solution.status, solution.lower_bound_s
        planned = status in (Status.OPTIMAL, Status.FEASIBLE)
        has = "a" if solution.plans else "no"
        case.require(Law.VALID, planned == solution.plans, budget, f"{has} plan, but {status}")
        time_s = self.time_s(solution, budget)
        if bound is not None:
            least_s = time_s
            if case.fastest is not None:
                least_s = case.fastest(self.target.solved, budget)
            found = f"bound {bound} s, but {least_s} s are possible"
            holds = 0 <= bound <= least_s * (1 + SAME) + SAME
            case.require(Law.BOUND, holds, budget, found)
        if case.fastest is not None and status in (Status.OPTIMAL, Status.INFEASIBLE):
            least_s = case.fastest(self.target.solved, budget)
            holds = time_s <= least_s * (1 + SAME)
            case.require(Law.OPTIMAL, holds, budget, f"{status} in {time_s} s, {least_s} s exist")
        if not solution.plans and budget is not None:
            self._check_smallest(solution, budget)
        self._check_stats(solution.stats, budget)

    def _check_smallest(self, solution: Solution, budget: int) -> None:
        """Check that the budget named by a solution without a plan is larger, and has a plan."""
        named, plan = solution.smallest_budget_bytes, solution.smallest
        case = self.case
        case.require(Law.SMALLEST, named is not None, budget, "no plan, and no budget named")
        assert named is not None
        case.require(Law.SMALLEST, named > budget, budget, f"no plan, but {named} bytes named")
        if plan is None:
            plan = self.solved(named)
        found = f"{named} bytes named, without a plan for them"
        case.require(Law.SMALLEST, plan.plans, budget, found)
        try:
            self.time_s(plan, named)
        except StrategyLawError as error:
            case.require(Law.SMALLEST, False, budget, str(error))

    def _check_stats(self, stats: Mapping[str, object], budget: int | None) -> None:
        try:
            json.dumps(dict(stats), allow_nan=False)
        except (TypeError, ValueError) as error:
            self.case.require(Law.STATS, False, budget, str(error))

    def stops(self, budget: int | None) -> None:
        """Check that a solve returns a valid solution if it is stopped at once."""

        def interrupt(_fraction: float, _what: str) -> None:
            raise KeyboardInterrupt

        self.solved(budget, time_limit_s=AT_ONCE_S)
        try:
            self.solved(budget, progress=interrupt)
        except KeyboardInterrupt:
            self.case.require(Law.STOPS, False, budget, "KeyboardInterrupt came through")


def check_order(case: Case, found: Mapping[float, tuple[Solution, float]]) -> None:
    """Check that no bound or proof for a budget is contradicted by a plan for a smaller one."""
    for larger, (solution, time_s) in found.items():
        budget = None if math.isinf(larger) else int(larger)
        best_s = min(time for other, (_, time) in found.items() if other <= larger)
        limit_s = best_s * (1 + SAME)
        shown = f"a smaller budget has a plan of {best_s} s"
        proof = solution.status in (Status.OPTIMAL, Status.INFEASIBLE)
        case.require(Law.OPTIMAL, time_s <= limit_s or not proof, budget, shown)
        case.require(Law.BOUND, (solution.lower_bound_s or 0) <= limit_s, budget, shown)
        case.require(Law.MONOTONE, time_s <= limit_s or not case.monotone, budget, shown)
