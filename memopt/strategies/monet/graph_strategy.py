"""What MONeT, Checkmate and its rounding share: a graph coarsened for a solver, a plan to start
from, what is proved and what is not."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from memopt.models.bounds import memory_lower_bound, spared_operators, time_lower_bound
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.reductions.coarsen import Coarsening, coarsen
from memopt.strategies.base import CostModel, Progress, Solution, Status, Strategy
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.counting import counted_exactly
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.monet.incumbent import rotor_program, rotor_programs, smaller, stored
from memopt.strategies.monet.moment_search import CLOSE
from memopt.strategies.monet.solutions import solution, without_plan

DEFAULT_TIME_LIMIT_S = 60.0
SAME = 1e-9
LEAST_SHARE = 0.125
"""Share of the time limit for the plan of the smallest peak, in the solver's own time, of which a
second may take a few of the clock's; less than LEAST_S of it is none."""
LEAST_S = 0.01
PROVED = 1e-6
"""Gap at which a plan counts as optimal: the solver's whole numbers round costs."""


@dataclass(frozen=True)
class GraphStrategy(Strategy):
    """What they share: coarsening, the incumbent, polish, statuses.

    Attributes:
        max_operators: the graph is coarsened to about so many operators for the solver.
        exact_only: leave out implementations that change rounding.
        start: begin from Rotor's plan, and keep it where the solver finds none faster.
        workers: solver threads; with more than one the same input may give another plan.
        seed: the solver's.
    """

    max_operators: int = 48
    exact_only: bool = True
    start: bool = True
    workers: int = 1
    seed: int = 0

    needs: ClassVar[str] = "graph"

    def only_exact_implementations(self) -> bool | None:
        return self.exact_only

    @abstractmethod
    def search(
        self, graph: Graph, budget_bytes: int, limit_s: float, progress: Progress | None
    ) -> tuple[Status, Program | None, float | None]:
        """(status, program, a bound in s valid for the strategy's class) on the coarse graph."""

    def least(self, graph: Graph, limit_s: float, progress: Progress | None) -> Program | None:
        """The program of the smallest peak that the search's class finds; the same however fast
        the machine is, so that the budget it names can be planned again."""
        return None

    def hint(self, built: MonetModel | CheckmateModel, graph: Graph, budget_bytes: int) -> None:
        """Rotor's plan of the graph to be solved, if there is one, for the solver to start from."""
        program = rotor_program(graph, budget_bytes)[0] if self.start else None
        if program is not None:
            built.hint(program)

    def incumbent(self, graph: Graph, budget_bytes: int | None) -> tuple[Program | None, Program]:
        """(A program within the budget, if there is one; the program of the smallest peak known):
        the search starts there, and returns nothing slower."""
        return rotor_programs(graph, budget_bytes) if self.start else (None, stored(graph))

    def bound(
        self, graph: Graph, budget_bytes: int, deadline: float, progress: Progress | None
    ) -> float | None:
        """A bound in s for every plan of the strategy's class, where `search` proves none."""
        return None

    def polish(self, graph: Graph, program: Program, budget_bytes: int | None) -> Program:
        """The last step, on the whole graph."""
        return program

    def whole(
        self,
        graph: Graph,
        best: Program | None,
        budget_bytes: int,
        deadline: float,
        stats: dict[str, object],
        progress: Progress | None,
    ) -> tuple[Program | None, float | None]:
        """(the best program known, a bound in s for every plan of the strategy's class) of a graph
        that is too large for `search`."""
        return best, None

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
        limit_s = DEFAULT_TIME_LIMIT_S if time_limit_s is None else time_limit_s
        limit_bytes = 2**62 if budget_bytes is None else budget_bytes
        stats: dict[str, object] = {}
        best, smallest = self.incumbent(graph, budget_bytes)
        if best is not None:
            best = self.polish(graph, best, budget_bytes)
            stats["incumbent_s"] = replay(graph, best).time_s
        coarse = coarsen(graph, self.max_operators)
        stats["operators"] = len(coarse.graph.operators)
        # Of the merged graph a proof says nothing about plans that tear a group apart.
        merged = len(coarse.graph.operators) < len(graph.operators)
        exact = not merged and not spared_operators(graph)
        proves = exact and counted_exactly(graph)
        # A search that has nothing to start from leaves time for a plan of the smallest peak.
        search_s = limit_s if best is not None else limit_s * (1 - LEAST_SHARE)
        # Operators with implementations are not merged: a stage for each may be too many.
        too_large = len(coarse.graph.operators) > 2 * self.max_operators
        status, found, bound_s, whole_s = Status.UNKNOWN, None, None, None
        impossible = memory_lower_bound(graph) > limit_bytes
        if not (exact or impossible):
            # All of the graph in a coarser program: a bound, and often a plan close to it.
            best, whole_s = self.whole(graph, best, limit_bytes, begin + limit_s, stats, progress)
        left_s = search_s - (time.monotonic() - begin)
        if impossible:
            status, proves = Status.INFEASIBLE, True
        elif left_s > 0 and not (_close(graph, best, whole_s) or (whole_s and too_large)):
            status, found, bound_s = self.search(coarse.graph, limit_bytes, left_s, progress)
            stats["solver"] = str(status)
        if bound_s is not None and not proves:
            stats["coarse_lower_bound_s"] = bound_s
        bound_s = bound_s if proves and bound_s is not None else whole_s
        best = self._better(graph, coarse, found, best, budget_bytes, stats)
        if best is None:
            smallest = self._smallest(graph, coarse, smallest, limit_s, progress)
            if replay(graph, smallest).peak_bytes > limit_bytes:
                proved = proves and status is Status.INFEASIBLE
                proved = proved or (merged and bool(stats.get("relaxation_infeasible")))
                return without_plan(graph, smallest, proved, stats)
            best, stats["chosen"] = smallest, "least memory"
        searched = exact and not proves and found is not None
        if searched and not _close(graph, best, time_lower_bound(graph)):
            # The search's own bound is not one of plans that compute in place, say.
            bound_s = self.bound(graph, limit_bytes, begin + limit_s, progress)
        if "chosen" not in stats:
            # The solver's bound on memory may not be able to represent it: kept all the same.
            stats["chosen"] = stats.get("whole", "rotor")
            stats["outside_the_program"] = found is None and status is Status.INFEASIBLE
        stats["solve_s"] = time.monotonic() - begin
        # Plans outside the class (Rotor's, polished ones) may be faster than its bound.
        return solution(graph, best, max(time_lower_bound(graph), bound_s or 0.0), PROVED, stats)

    def _better(
        self,
        graph: Graph,
        coarse: Coarsening,
        found: Program | None,
        best: Program | None,
        budget_bytes: int | None,
        stats: dict[str, object],
    ) -> Program | None:
        """The best program so far, or what the search found, where that is faster."""
        if found is None:
            return best
        program = self.polish(graph, with_in_place(graph, coarse.expand(found)), budget_bytes)
        took_s = replay(graph, program).time_s
        stats["solver_s"] = took_s
        if best is not None and took_s >= replay(graph, best).time_s * (1 - SAME):
            return best
        stats["chosen"] = self.name
        return program

    def _smallest(
        self,
        graph: Graph,
        coarse: Coarsening,
        smallest: Program,
        limit_s: float,
        progress: Progress | None,
    ) -> Program:
        """The smallest peak known, or that of a search for it."""
        found = self.least(coarse.graph, LEAST_SHARE * limit_s, progress)
        if found is None:
            return smallest
        return smaller(graph, smallest, with_in_place(graph, coarse.expand(found)))


def _close(graph: Graph, best: Program | None, bound_s: float | None) -> bool:
    """Whether a plan is near a bound that holds for the whole graph."""
    return (
        best is not None
        and bound_s is not None
        and (replay(graph, best).time_s <= bound_s * (1 + CLOSE))
    )
