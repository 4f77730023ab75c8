"""Keeps the plans behind named budgets, so that a named budget can be planned again.

A strategy that has no plan names the smallest budget for which it has one. Planned at that budget,
a search under a time limit may find nothing; then the plan behind the name is used.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field, replace

from memopt.errors import InvalidProgramError
from memopt.models.bounds import memory_lower_bound
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.locks import ForkedLock
from memopt.programs.instructions import Program
from memopt.programs.solution import Solution
from memopt.solvers.running import Deadline
from memopt.strategies.base import CostModel, Strategy
from memopt.strategies.budget_search import Attempt, smallest_budget, smallest_plan
from memopt.strategies.target import Target

MOST_SEARCHES = 16
"""The most searches for a budget smaller than the smallest known."""
CAPACITY = 16
"""The most plans kept; the latest stay."""


class KeptPlans:
    """The latest plans of named budgets. Thread-safe."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._plans: deque[tuple[Strategy, CostModel, int, Solution]] = deque(maxlen=capacity)
        self._lock = ForkedLock()

    def keep(
        self, strategy: Strategy, cost_model: CostModel, budget_bytes: int, plan: Solution
    ) -> None:
        """Keep the plan that a strategy has for a cost model within a budget, total bytes, in place
        of the one that is kept, unless that one's budget is smaller."""
        with self._lock:
            known = next((x for x in self._plans if x[0] == strategy and x[1] == cost_model), None)
            if known is not None and known[2] < budget_bytes:
                return
            if known is not None:
                self._plans.remove(known)
            self._plans.append((strategy, cost_model, budget_bytes, plan))

    def least(self, strategy: Strategy, cost_model: CostModel) -> tuple[int, Solution] | None:
        """Return (the strategy's smallest kept budget for the cost model, its plan)."""
        with self._lock:
            plans = tuple(self._plans)
        return next((x[2:] for x in plans if x[0] == strategy and x[1] == cost_model), None)


KEPT = KeptPlans()


@dataclass(frozen=True)
class Planning:
    """One strategy's attempts at one cost model.

    Attributes:
        target: the strategy and its cost model.
        device: for the check of a named plan.
        attempt: solves for a budget.
        end_s: when all attempts together end, by time.monotonic's clock.
        known: programs of the smallest budgets found so far, which attempts may start from.
    """

    target: Target
    device: Device
    attempt: Attempt
    end_s: float = math.inf
    known: list[Program] = field(default_factory=list)

    def smallest(self) -> tuple[int, Solution] | None:
        """Return (the smallest budget that the strategy can meet, total bytes; the plan for it)."""
        budget_bytes = self.smallest_budget()
        if budget_bytes is None:
            return None
        solution = self._from_least(budget_bytes)
        searches = MOST_SEARCHES * self.target.strategy.refines_smallest(self.target.solved)
        # With in-place outputs, the plan may need less than the budget it was searched for; and a
        # search within less may find a plan that the one for the smallest budget missed.
        for number in range(searches + 1):
            peak_bytes = max(1, self._checked(budget_bytes, solution))
            if peak_bytes < budget_bytes:
                budget_bytes = self._kept(peak_bytes, solution)
            least_bytes = max(1, memory_lower_bound(self.target.graph))
            if budget_bytes <= least_bytes or number == searches:
                break
            lower = self._from_least(budget_bytes - 1)
            if not lower.plans:
                break
            budget_bytes, solution = budget_bytes - 1, lower
        # Whoever asks again gets this plan, also to reorder it.
        return self._kept(budget_bytes, solution), solution

    def smallest_budget(self) -> int | None:
        """Return the smallest budget that the strategy names, total bytes, if it knows any."""
        view = self.target.linearized
        if view is not None:
            found = smallest_budget(view, self.attempt)
            return None if found is None else self._kept(*found)
        # One byte will hardly suffice: the answer names the smallest budget that does.
        answer = self.attempt(1)
        least = smallest_plan(answer, self.attempt)
        if least is None or least is answer:
            return None if least is None else 1
        return self._kept(answer.smallest_budget_bytes or least.peak_bytes or 1, least)

    def _from_least(self, budget_bytes: int) -> Solution:
        """Solve as `within` does, from the plan of the smallest budget known."""
        least = KEPT.least(self.target.strategy, self.target.graph)
        program = None if least is None else least[1].program
        self.known[:] = [] if program is None else [program]
        return self.within(budget_bytes)

    def within(self, budget_bytes: int | None) -> Solution:
        """Return the strategy's solution; if it has none, its kept plan that fits, if any."""
        solution = self.target.solve(budget_bytes, self.attempt, Deadline(self.end_s))
        solution = self.target.fastest(solution, budget_bytes, self.device)
        if solution.plans or budget_bytes is None:
            return solution
        known = KEPT.least(self.target.strategy, self.target.graph)
        if solution.smallest is not None:
            named = solution.smallest_budget_bytes or solution.smallest.peak_bytes or 1
            if known is None or named < known[0]:
                known = self._kept(named, solution.smallest), solution.smallest
        if known is None:
            return solution
        if known[0] <= budget_bytes:
            return known[1]
        return replace(solution, smallest_budget_bytes=known[0], smallest=known[1])

    def _kept(self, budget_bytes: int, plan: Solution) -> int:
        """Return the budget, with its plan checked and kept."""
        self._checked(budget_bytes, plan)
        KEPT.keep(self.target.strategy, self.target.graph, budget_bytes, plan)
        return budget_bytes

    def _checked(self, budget_bytes: int, plan: Solution) -> int:
        """Return the replayed peak of a named plan, bytes, as it runs.

        Raises:
            InvalidProgramError: the strategy named a budget with a plan that is not valid.
        """
        target = self.target.resolved(plan)
        program = target.program(plan, budget_bytes, self.device)
        assert program is not None
        violation, figures = target.check(program, Budget(budget_bytes), self.device)
        if violation is not None:
            raise InvalidProgramError(
                f"{self.target.strategy.name} named {budget_bytes} bytes with an invalid plan: "
                f"{violation}"
            )
        return figures.peak_bytes
