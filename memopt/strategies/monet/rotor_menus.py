"""Rotor with stage alternatives: the whole step as one stage, and the chain's program with cheap
recomputation inside each backward and a choice of implementations."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import ClassVar

from memopt.models.bounds import memory_lower_bound, memory_upper_bound, time_lower_bound
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator
from memopt.programs.instructions import Program
from memopt.programs.solution import Solution
from memopt.reductions.linearize import Linearization, linearize
from memopt.reductions.stage_map import has_updates
from memopt.solvers.running import Deadline
from memopt.strategies.base import CostModel, Features, Progress, Strategy
from memopt.strategies.monet.graph_strategy import (
    PROVED,
    counted_exactly,
    solution,
    unlimited,
    without_plan,
)
from memopt.strategies.shared.alternatives_table import SLOTS, AlternativesTable
from memopt.strategies.shared.chain_programs import rotor_programs
from memopt.strategies.shared.fastest_runs import fastest_program
from memopt.strategies.shared.incumbent import SAME, Incumbent, smaller
from memopt.strategies.shared.kernel_choice import fastest_kernels
from memopt.strategies.shared.time_point_search import TimePointSearch

MERGED_SHARE = 0.5
"""The most of the time left that the whole step as one stage may take."""
CLOSE = 1e-3
"""Gap to the bound at which no alternatives are tried."""


@dataclass(frozen=True)
class RotorMenus(Strategy):
    """Rotor that also chooses how each layer saves what it needs; never slower than rotor.

    Rotor's persistent program with several ways to save each stage.

    Attributes:
        slots: memory is counted in so many slots of twice the budget, sizes rounded up.
        exact_only: leave out implementations that change rounding.
        merged_s: seconds for the whole step as one stage (`TimePointSearch`), which comes first:
            it gives the bound, and for deep models, whose table takes long, most often the plan.
    """

    slots: int = SLOTS
    exact_only: bool = True
    merged_s: float = 30.0

    name: ClassVar[str] = "rotor-menus"
    needs: ClassVar[str] = "graph"
    features: ClassVar[Features] = Features(recompute=True, implementations=True)

    def only_exact_implementations(self) -> bool | None:
        return self.exact_only

    def why_not(self, cost_model: CostModel) -> str | None:
        if isinstance(cost_model, Graph) and has_updates(cost_model):
            return "rotor-menus plans steps without parameter updates: profile without optimizer"
        return super().why_not(cost_model)

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        graph, begin = self.taken(cost_model, Graph), time.monotonic()
        deadline = Deadline(begin + (math.inf if time_limit_s is None else time_limit_s), progress)
        best, least_s = Incumbent(graph, budget_bytes), time_lower_bound(graph)
        if budget_bytes is None:
            fastest, exact = fastest_program(graph, self.allowed)
            if exact:
                return unlimited(graph, fastest)
            best.offer(fastest)
            budget_bytes = memory_upper_bound(graph)
        view = linearize(graph)
        program, smallest = rotor_programs(graph, budget_bytes, view, deadline)
        stats: dict[str, object] = {"rotor_found": program is not None}
        if program is not None:
            stats["rotor_s"] = best.offer(program).time_s
        searched, proved = False, False
        if not best.near(least_s, SAME):
            search = self._merged(graph, budget_bytes, deadline, stats)
            if search is not None:
                proved = search.infeasible and counted_exactly(graph)
                proved = proved or memory_lower_bound(graph) > budget_bytes
                least_s = max(least_s, search.bound_s)
                if search.best.program is not None:
                    stats["merged_s"] = best.offer(search.best.program).time_s
            if not best.near(least_s, CLOSE):
                found, least, searched = self._alternatives(view, budget_bytes, deadline, stats)
                smallest = smallest if least is None else smaller(graph, smallest, least)
                if found is not None:
                    stats["menus_s"] = best.offer(found).time_s
        if best.program is not None:
            best.offer(fastest_kernels(graph, best.program, best.budget_bytes))
        stats["searched"] = searched
        stats["solve_s"] = time.monotonic() - begin
        if best.program is None:
            return without_plan(graph, smallest, proved, stats)
        return solution(graph, best.program, least_s, PROVED, stats)

    @property
    def plans_forward(self) -> bool:
        return False

    def allowed(self, operator: Operator, name: str) -> bool:
        """Tell whether the plan may run `operator` by its implementation `name`."""
        return not self.exact_only or next(
            choice.exact for choice in operator.implementations if choice.name == name
        )

    def _alternatives(
        self, view: Linearization, budget_bytes: int, deadline: Deadline, stats: dict[str, object]
    ) -> tuple[Program | None, Program | None, bool]:
        """Return the best program of the stages' alternatives, that of the smallest peak, and
        whether the search ended."""
        if deadline.passed(0.0, "stage menus"):
            return None, None, False
        stats["stages"] = len(view.chain)
        table = AlternativesTable(view, budget_bytes, self.slots, deadline, self.allowed)
        stats["options"] = sum(map(len, table.alternatives))
        if not table.complete:
            return None, None, False
        return *table.best(budget_bytes), True

    def _merged(
        self, graph: Graph, budget_bytes: int, deadline: Deadline, stats: dict[str, object]
    ) -> TimePointSearch | None:
        """Plan the whole step as one stage, implementations included; None without time for it."""
        if self.merged_s <= 0 or deadline.passed(0.9, "stage menus"):
            return None
        # The table needs time, too.
        until = deadline.within(min(self.merged_s, MERGED_SHARE * deadline.left_s))
        search = TimePointSearch(graph, self.allowed, budget_bytes, until).run()
        stats["merged_rounds"] = search.rounds
        return search
