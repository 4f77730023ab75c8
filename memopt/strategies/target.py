"""A strategy at a cost model. One for chains sees a graph through its linearization: the chain is
solved, and its schedule lowered to a program of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.violations import Violation
from memopt.reductions.linearize import Linearization, linearize
from memopt.reductions.stage_map import has_updates
from memopt.reductions.updates import linearize_step
from memopt.reductions.validate_and_replay import Figures, validate_and_replay
from memopt.strategies.base import CostModel, Solution, Strategy
from memopt.strategies.budget_search import PROBES, best_that_fits

Attempt = Callable[[int | None], Solution]
"""attempt(total bytes; None: no limit): the strategy's solution of `Target.solved`."""


@dataclass(frozen=True)
class Target:
    """What a strategy plans, and how its solution becomes a program.

    Attributes:
        strategy: who plans.
        cost_model: what: a graph, also where the strategy plans its chain, or a bare chain.
        view: the graph's linearization, for a strategy that plans its chain.
    """

    strategy: Strategy
    cost_model: CostModel
    view: Linearization | None = None

    @classmethod
    def of(
        cls, strategy: Strategy, cost_model: CostModel, known: Linearization | None = None
    ) -> Target:
        """The target; `known` is the graph's linearization, where it has been made before."""
        if strategy.needs != "chain" or not isinstance(cost_model, Graph):
            return cls(strategy, cost_model)
        made = known or (linearize_step if has_updates(cost_model) else linearize)(cost_model)
        return cls(strategy, cost_model, made)

    @property
    def solved(self) -> CostModel:
        """What the strategy's `solve` gets."""
        return self.cost_model if self.view is None else self.view.chain

    @property
    def chain(self) -> Chain | None:
        """The chain that is solved, if it is one."""
        return self.solved if isinstance(self.solved, Chain) else None

    def why_not(self) -> str | None:
        """Why the strategy cannot plan this; None if it can."""
        return self.strategy.why_not(self.solved)

    def solve(self, budget_bytes: int | None, attempt: Attempt) -> Solution:
        """The strategy's solution within a budget of the cost model's, total bytes."""
        if self.view is None or budget_bytes is None:
            return attempt(budget_bytes)
        # One table of a recomputing strategy answers every budget; the others solve anew.
        probes = PROBES if self.strategy.features.recompute else 0
        return best_that_fits(self.view.graph, self.view, attempt, budget_bytes, probes)

    def program(self, solution: Solution) -> Program | None:
        """A solution's program as it runs: in place where it can be, unless the strategy decided
        that; None for the schedule of a bare chain, and where there is no plan."""
        if self.view is not None and solution.steps is not None:
            return solution.program or self.view.lower(solution.steps)
        if solution.program is None or not isinstance(self.cost_model, Graph):
            return solution.program
        if self.strategy.decides_in_place:
            return solution.program
        return with_in_place(self.cost_model, solution.program)

    def check(
        self,
        solution: Solution,
        program: Program | None,
        budget: Budget,
        device: Device,
    ) -> tuple[Violation | None, Figures]:
        """Validate and replay a solution with its program (`Target.program`, or what passes made
        of it)."""
        return validate_and_replay(
            self.cost_model,
            solution.steps,
            program,
            budget,
            device,
            offloading=self.strategy.features.offload,
        )
