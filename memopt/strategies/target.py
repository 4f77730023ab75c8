"""A strategy applied to a cost model. A strategy for chains gets a graph's view as a chain: it
solves the chain, and its schedule is lowered to a program of the graph."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from memopt.models.bounds import overlapped_bound, relative_gap
from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.last_of import LastOf
from memopt.models.status import Status
from memopt.passes.early_collectives import with_early_collectives
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.solution import Solution
from memopt.programs.violations import Violation
from memopt.reductions.chain_to_graph import ChainGraph, chain_to_graph
from memopt.reductions.chain_view import ChainView
from memopt.reductions.linearize import linearize
from memopt.reductions.stage_map import has_updates
from memopt.reductions.step_linearization import linearize_step
from memopt.reductions.validate_and_replay import Figures, validate_and_replay
from memopt.solvers.running import Deadline
from memopt.strategies.base import CostModel, Strategy
from memopt.strategies.budget_search import FEWER_PROBES, MANY, PROBES, Attempt, best_that_fits
from memopt.strategies.checkpointed_blocks import or_checkpointed

_GRAPHS = LastOf[ChainView](kept=1)


def chain_view(cost_model: CostModel) -> ChainView:
    """Return the cost model, graph or chain, as a graph with its chain."""
    if isinstance(cost_model, Chain):
        return _GRAPHS.of((cost_model,), None, lambda: chain_to_graph(cost_model))
    return (linearize_step if has_updates(cost_model) else linearize)(cost_model)


def _last() -> LastOf[Any]:
    """Make a cache of one answer: planning asks for the same plan several times in a row, and
    lowering and checking it take long."""
    return LastOf(kept=1)


@dataclass(frozen=True)
class Target:
    """A strategy's cost model, and the lowering of its solution to a program.

    Attributes:
        strategy: the strategy that plans.
        graph: the graph its programs run; of a bare chain, one of the two made of it.
        view: the graph and its chain, where the chain is solved.
    """

    strategy: Strategy
    graph: Graph
    view: ChainView | None = None
    _lowered: LastOf[Program] = field(init=False, default_factory=_last, compare=False, repr=False)
    _early: LastOf[Program] = field(init=False, default_factory=_last, compare=False, repr=False)
    _checked: LastOf[tuple[Violation | None, Figures]] = field(
        init=False, default_factory=_last, compare=False, repr=False
    )
    _finished: deque[Program | None] = field(
        init=False, default_factory=partial(deque, maxlen=4), compare=False, repr=False
    )
    """The latest programs that run as they are."""

    @classmethod
    def of(
        cls, strategy: Strategy, cost_model: CostModel, known: ChainView | None = None
    ) -> Target:
        """Make the target; `known` is the cost model's view, if it was made before."""
        if isinstance(cost_model, Graph) and strategy.needs != "chain":
            return cls(strategy, cost_model)
        view = known or chain_view(cost_model)
        if isinstance(view, ChainGraph) and strategy.plans_operators:
            return cls(strategy, view.operators)
        return cls(strategy, view.graph, view)

    @property
    def solved(self) -> CostModel:
        """Return the cost model that the strategy's `solve` gets."""
        return self.graph if self.view is None else self.view.chain

    @property
    def bare_chain(self) -> Chain | None:
        """Return the chain, if there is no other cost model."""
        return self.view.chain if self.view is not None and self.view.exact else None

    @property
    def linearized(self) -> ChainView | None:
        """Return the view of a graph as a chain, whose accounting counts more memory than its
        programs need; None where the strategy's figures are those of its programs."""
        return None if self.view is None or self.view.exact else self.view

    def resolved(self, solution: Solution) -> Target:
        """Return the target of a solution's program: of a bare chain, a strategy that plans either
        may have planned its operators."""
        if isinstance(self.view, ChainGraph) and solution.steps is None and solution.program:
            return Target(self.strategy, self.view.operators)
        return self

    def why_not(self) -> str | None:
        """Return why the strategy cannot plan this; None if it can."""
        return self.strategy.why_not(self.solved)

    def solve(
        self, budget_bytes: int | None, attempt: Attempt, deadline: Deadline | None = None
    ) -> Solution:
        """Return the strategy's solution within a budget of the graph's, total bytes; after the
        deadline the strategy is asked nothing more than it must be."""
        if self.linearized is None or budget_bytes is None:
            return self._overlapped(attempt(budget_bytes))
        # One table of a recomputing strategy answers every budget; the others solve anew.
        probes = PROBES if len(self.graph.operators) < MANY else FEWER_PROBES
        probes *= self.strategy.features.recompute
        return best_that_fits(self.linearized, attempt, budget_bytes, probes, deadline)

    def fastest(
        self, solution: Solution, budget_bytes: int | None, device: Device | None
    ) -> Solution:
        """Return the solution, or, from a strategy that recomputes, checkpointed blocks if
        collectives make those faster, or if it has no plan and those fit."""
        again = self.strategy.features.recompute and self.graph.network_time_s > 0
        if budget_bytes is None or not again:
            return solution
        planned = self._as_planned(solution, budget_bytes) if solution.plans else None
        made = partial(self.program, solution, budget_bytes, device)
        found = or_checkpointed(
            self.graph, solution, planned, made, budget_bytes, device, self.view
        )
        if found is not solution:
            self._finished.append(found.program)
        return found

    def _overlapped(self, solution: Solution) -> Solution:
        """Correct a solution's claims where collectives overlap computation: strategies plan as if
        the compute stream waited for each."""
        bound_s = solution.lower_bound_s
        if not self.graph.network_time_s or bound_s is None or solution.time_s is None:
            return solution
        bound_s = min(overlapped_bound(self.graph, bound_s), solution.time_s)
        optimal = solution.status is Status.OPTIMAL and solution.time_s <= bound_s
        return replace(
            solution,
            status=solution.status if optimal or not solution.plans else Status.FEASIBLE,
            lower_bound_s=bound_s,
            gap=relative_gap(solution.time_s, bound_s),
        )

    def program(
        self, solution: Solution, budget_bytes: int | None = None, device: Device | None = None
    ) -> Program | None:
        """Return a solution's program as it runs: collectives early, and in-place outputs where
        possible, unless the strategy decided those; None without a plan.

        Args:
            solution: of `solve`.
            budget_bytes: of the device, see `ChainView.lower`.
            device: link rates.
        """
        if solution.program and any(solution.program is one for one in self._finished):
            return solution.program
        program = self._as_planned(solution, budget_bytes)
        if program is None or not self.graph.network_time_s:
            return program
        return self._early.of(
            (),
            (program, budget_bytes, device),
            lambda: with_early_collectives(self.graph, program, budget_bytes, device),
        )

    def _as_planned(self, solution: Solution, budget_bytes: int | None) -> Program | None:
        if self.view is not None and solution.steps is not None:
            view, steps = self.view, solution.steps
            return solution.program or self._lowered.of(
                (), (steps, budget_bytes), lambda: view.lower(steps, budget_bytes)
            )
        if solution.program is None or self.strategy.decides_in_place:
            return solution.program
        return with_in_place(self.graph, solution.program)

    def check(
        self, program: Program, budget: Budget, device: Device
    ) -> tuple[Violation | None, Figures]:
        """Validate and replay a program (`program`, or what passes made of it)."""
        return self._checked.of(
            (),
            (program, budget, device),
            lambda: validate_and_replay(self.graph, program, budget, device),
        )
