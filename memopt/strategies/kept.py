"""The plans behind the budgets that were named, kept: who names a budget can plan for it again.

A strategy that has no plan names the smallest budget for which it has one. Planned at that budget,
a search under a time limit may find nothing; then the plan it was named for is used.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memopt.errors import InvalidProgramError
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.locks import ForkedLock
from memopt.programs.in_place import with_in_place
from memopt.reductions.validate_and_replay import judge
from memopt.strategies.base import CostModel, Solution, Strategy
from memopt.strategies.slack import PROBES, Attempt, best_that_fits, smallest_budget, smallest_plan

if TYPE_CHECKING:
    from memopt.reductions.linearize import Linearization

CAPACITY = 16
"""Plans kept at a time, the latest."""


class KeptPlans:
    """The latest plans of named budgets. Thread-safe."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self._plans: deque[tuple[Strategy, CostModel, int, Solution]] = deque(maxlen=capacity)
        self._lock = ForkedLock()

    def keep(
        self, strategy: Strategy, cost_model: CostModel, budget_bytes: int, plan: Solution
    ) -> None:
        """Keep the plan that a strategy has for a cost model within a budget, total bytes."""
        known = self.least(strategy, cost_model)
        if known is None or budget_bytes < known[0]:
            with self._lock:
                self._plans.append((strategy, cost_model, budget_bytes, plan))

    def least(self, strategy: Strategy, cost_model: CostModel) -> tuple[int, Solution] | None:
        """(the smallest budget of the strategy for the cost model, its plan) of those kept."""
        with self._lock:
            plans = tuple(self._plans)
        own = [x[2:] for x in plans if x[0] == strategy and x[1] == cost_model]
        return min(own, key=lambda x: x[0], default=None)


KEPT = KeptPlans()


@dataclass(frozen=True)
class Planning:
    """One strategy's attempts at one cost model.

    Attributes:
        strategy: who plans.
        cost_model: what: a graph, also where the strategy plans its chain, or a bare chain.
        view: the graph's linearization, for a strategy that plans its chain.
        device: for the check of a plan that is named.
        attempt: solves for a budget.
    """

    strategy: Strategy
    cost_model: CostModel
    view: Linearization | None
    device: Device
    attempt: Attempt

    def smallest(self) -> tuple[int, Solution] | None:
        """(the smallest budget that the strategy can meet, total bytes; the plan for it)."""
        budget_bytes = self._smallest_budget()
        if budget_bytes is None:
            return None
        solution = self.within(budget_bytes)
        if self.view is None and solution.program is not None:
            # In place afterwards, it may need less than it was searched for.
            peak_bytes = max(1, self._checked(budget_bytes, solution))
            if peak_bytes < budget_bytes:
                budget_bytes = self._kept(peak_bytes, solution)
        return budget_bytes, solution

    def _smallest_budget(self) -> int | None:
        if self.view is not None:
            found = smallest_budget(self.view.graph, self.view, self.attempt)
            return None if found is None else self._kept(*found)
        # One byte will hardly do: the answer names the smallest budget that does.
        answer = self.attempt(1)
        least = smallest_plan(answer, self.attempt)
        if least is None or least is answer:
            return None if least is None else 1
        return self._kept(answer.smallest_budget_bytes or least.peak_bytes or 1, least)

    def within(self, budget_bytes: int | None) -> Solution:
        """The strategy's solution; where it has none, the plan that was kept of it, if one fits."""
        if self.view is None or budget_bytes is None:
            solution = self.attempt(budget_bytes)
        else:
            # One table of a recomputing strategy answers every budget; the others solve anew.
            probes = PROBES if self.strategy.features.recompute else 0
            view = self.view
            solution = best_that_fits(view.graph, view, self.attempt, budget_bytes, probes)
        if solution.plans or budget_bytes is None:
            return solution
        if solution.smallest is not None:
            named = solution.smallest_budget_bytes or solution.smallest.peak_bytes or 1
            self._kept(named, solution.smallest)
        known = KEPT.least(self.strategy, self.cost_model)
        if known is None:
            return solution
        if known[0] <= budget_bytes:
            return known[1]
        return replace(solution, smallest_budget_bytes=known[0], smallest=known[1])

    def _kept(self, budget_bytes: int, plan: Solution) -> int:
        """The budget, its plan checked and kept."""
        self._checked(budget_bytes, plan)
        KEPT.keep(self.strategy, self.cost_model, budget_bytes, plan)
        return budget_bytes

    def _checked(self, budget_bytes: int, plan: Solution) -> int:
        """The replayed peak of a plan that is named, bytes, as it runs.

        Raises:
            InvalidProgramError: the strategy named a budget with a plan that is not valid.
        """
        program = plan.program
        if self.view is not None and plan.steps is not None:
            program = self.view.lower(plan.steps)
        elif isinstance(self.cost_model, Graph) and not self.strategy.decides_in_place:
            assert program is not None
            program = with_in_place(self.cost_model, program)
        violation, figures = judge(
            self.cost_model,
            plan.steps,
            program,
            budget_bytes,
            self.device,
            offloading=self.strategy.features.offload,
        )
        if violation is not None:
            raise InvalidProgramError(
                f"{self.strategy.name} named {budget_bytes} bytes with an invalid plan: {violation}"
            )
        return figures.peak_bytes
