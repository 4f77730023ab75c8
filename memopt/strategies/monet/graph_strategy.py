"""The solve shared by MONeT, Checkmate and its rounding: a graph coarsened for a solver, a plan to
start from, and what is proved."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from memopt.models.bounds import (
    as_they_are,
    memory_lower_bound,
    memory_upper_bound,
    needed_operators,
    spared_operators,
    time_lower_bound,
)
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator
from memopt.models.status import Status
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.reductions.coarsen import Coarsening, coarsen
from memopt.solvers.binary_program import Answer
from memopt.solvers.running import Deadline, Solver, SolverOptions
from memopt.strategies.base import CostModel, Progress, Strategy, solution_of
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.shared.chain_programs import rotor_programs
from memopt.strategies.shared.fastest_runs import fastest_program
from memopt.strategies.shared.incumbent import Incumbent, smaller, stored
from memopt.strategies.shared.time_point_search import CLOSE

DEFAULT_TIME_LIMIT_S = 60.0
LEAST_SHARE = 0.125
"""Share of the time limit for the plan of the smallest peak, in the solver's deterministic time (a
unit may take some seconds); below LEAST_S there is no such search."""
LEAST_S = 0.01
PROVED = 1e-6
"""Gap at which a plan counts as optimal: the solver rounds costs to whole numbers."""
SEARCH_SHARE, PAIR_S = 0.3, 2e-5
"""The most of the time left that building the solver's program may take, and its seconds for each
pair of operators: a larger one is not built."""
BOUND_SHARE, EXACT_SHARE = 0.4, 0.5
"""Shares of the time left, for a graph without a backward: for the relaxation; then, if it is
small, for the search."""


@dataclass(frozen=True)
class GraphStrategy(Strategy):
    """A strategy that solves a coarsened graph, starting from a known plan.

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
        self, graph: Graph, budget_bytes: int, deadline: Deadline
    ) -> tuple[Status, Program | None, float | None]:
        """Solve the coarse graph: (status, program, a bound in s for the strategy's class)."""

    def least(self, graph: Graph, limit_s: float, progress: Progress | None) -> Program | None:
        """Find the program of the smallest peak in the search's class. It does not depend on the
        machine's speed, so that the budget it names can be planned again."""
        return None

    def incumbent(
        self, graph: Graph, budget_bytes: int | None, deadline: Deadline
    ) -> tuple[Program | None, Program]:
        """Return a program within the budget, if there is one, and that of the smallest peak known:
        the search starts there, and returns nothing slower."""
        if not self.start:
            return None, stored(graph)
        return rotor_programs(graph, budget_bytes, deadline=deadline)

    def bound(self, graph: Graph, budget_bytes: int, deadline: Deadline) -> float | None:
        """Bound every plan of the strategy's class, in s, where `search` proves nothing."""
        return None

    def polish(self, graph: Graph, program: Program, budget_bytes: int | None) -> Program:
        """Improve a program of the whole graph as the last step."""
        return program

    def allowed(self, operator: Operator, name: str) -> bool:
        """Tell whether the plan may run `operator` by its implementation `name`."""
        return False

    def as_they_are(self, graph: Graph) -> bool:
        """Tell whether plans of the strategy's class run operators by their own implementation
        only."""
        return not any(operator.implementations for operator in graph.operators)

    def building_s(self, graph: Graph) -> float:
        """Return about how long it takes to build the solver's program of a graph, s."""
        return PAIR_S * len(graph.operators) ** 2

    def whole(
        self, best: Incumbent, budget_bytes: int, deadline: Deadline, stats: dict[str, object]
    ) -> float | None:
        """Search programs of a graph that is too large for `search`, and offer them to `best`.
        Return a bound in s for every plan of the strategy's class; None if there is none."""
        return None

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        graph = self.taken(cost_model, Graph)
        if budget_bytes is None:
            program, exact = fastest_program(graph, self.allowed)
            if exact:
                return unlimited(graph, self.polish(graph, program, None))
        limit_s = DEFAULT_TIME_LIMIT_S if time_limit_s is None else time_limit_s
        if graph.is_forward:
            deadline = Deadline(time.monotonic() + limit_s, progress)
            enough_bytes = memory_upper_bound(graph) if budget_bytes is None else budget_bytes
            return self._solve_forward(graph, enough_bytes, deadline)
        return self._solve_step(graph, budget_bytes, limit_s, progress)

    def _solve_step(
        self, graph: Graph, budget_bytes: int | None, limit_s: float, progress: Progress | None
    ) -> Solution:
        """Plan a training step, coarsened."""
        begin = time.monotonic()
        deadline = Deadline(begin + limit_s, progress)
        limit_bytes = 2**62 if budget_bytes is None else budget_bytes
        stats: dict[str, object] = {}
        least_s = time_lower_bound(graph)
        best, smallest = self._start(graph, budget_bytes, deadline, stats)
        coarse = coarsen(graph, self.max_operators)
        stats["operators"] = len(coarse.graph.operators)
        # A proof for the merged graph says nothing about plans that split a group.
        merged = len(coarse.graph.operators) < len(graph.operators)
        exact = not merged and not spared_operators(graph)
        proves = exact and counted_exactly(graph)
        # Operators with implementations are not merged: a stage for each may be too many.
        too_large = len(coarse.graph.operators) > 2 * self.max_operators
        too_slow = self.building_s(coarse.graph) > SEARCH_SHARE * deadline.left_s
        # Without a start, the search leaves time for a plan of the smallest peak.
        search_s = limit_s if best.program is not None else limit_s * (1 - LEAST_SHARE)
        search_s = 0.0 if too_slow else search_s
        status, found, bound_s, whole_s = Status.UNKNOWN, None, None, None
        impossible = memory_lower_bound(graph) > limit_bytes
        if not ((exact and not too_slow) or impossible):
            # The whole graph in a coarser program: a bound, and often a plan close to it.
            whole_s = self.whole(best, limit_bytes, deadline, stats)
        until = Deadline(begin + search_s, progress)
        if impossible:
            status, proves = Status.INFEASIBLE, True
        elif until.left_s and not (best.near(whole_s, CLOSE) or (whole_s and too_large)):
            status, found, bound_s = self.search(coarse.graph, limit_bytes, until)
            stats["solver"] = str(status)
        if bound_s is not None and not proves:
            stats["coarse_lower_bound_s"] = bound_s
        bound_s = bound_s if proves and bound_s is not None else whole_s
        if found is not None:
            expanded = self.polish(graph, _expanded(coarse, found), budget_bytes)
            stats["solver_s"] = best.offer(expanded, self.name).time_s
        if best.program is None:
            if not too_slow and self.building_s(coarse.graph) <= deadline.left_s:
                smallest = self._smallest(coarse, smallest, limit_s, progress)
            best.offer(smallest, "least memory")
        if best.program is None:
            relaxed = merged and bool(stats.get("relaxation_infeasible"))
            proved = relaxed or (proves and status is Status.INFEASIBLE)
            return without_plan(graph, smallest, proved, stats)
        stats["chosen"] = best.source
        unproved = exact and not proves and found is not None
        if (unproved or (merged and bound_s is None)) and not best.near(least_s, CLOSE):
            # The search's own bound may hold for merged graphs only, or not for in-place outputs.
            bound_s = self.bound(graph, limit_bytes, deadline)
        if best.source not in (self.name, "least memory"):
            # The start is kept even if the solver's bound on memory cannot represent it.
            stats["outside_the_program"] = found is None and status is Status.INFEASIBLE
        stats["solve_s"] = time.monotonic() - begin
        # Plans outside the class (Rotor's, polished ones) may be faster than its bound.
        return solution(graph, best.program, max(least_s, bound_s or 0.0), PROVED, stats)

    def _solve_forward(self, graph: Graph, budget_bytes: int, deadline: Deadline) -> Solution:
        """Plan a graph without a backward: whole, its operators run as they are."""
        from memopt.strategies.monet.forward import QUICK, RUNS, ForwardSearch

        begin, limit_s = time.monotonic(), deadline.left_s
        search = ForwardSearch(as_they_are(graph), self.seed)
        best = Incumbent(graph, budget_bytes)
        stats: dict[str, object] = {"operators": len(graph.operators)}
        bound_s, proves = time_lower_bound(graph), self.as_they_are(graph)
        smallest = stored(graph)
        best.offer(smallest, "stored")
        impossible = memory_lower_bound(graph) > budget_bytes
        if not (impossible or best.near(bound_s, PROVED)):
            search.search(best, bound_s, range(QUICK), deadline)
            relaxed = search.bound(best, deadline.within(BOUND_SHARE * deadline.left_s))
            stats["relaxation_rounds"] = relaxed.rounds
            impossible = proves and relaxed.infeasible
            bound_s = max(bound_s, relaxed.bound_s if proves else 0.0)
        if not (impossible or best.near(bound_s, PROVED)):
            if len(graph.operators) <= self.max_operators:
                until = deadline.within(EXACT_SHARE * deadline.left_s)
                status, found, least_s = self.search(graph, budget_bytes, until)
                if found is not None:
                    best.offer(with_in_place(graph, found), self.name)
                proves = proves and counted_exactly(graph)
                impossible = proves and status is Status.INFEASIBLE
                bound_s = max(bound_s, (least_s or 0.0) if proves else 0.0)
            runs = range(QUICK, len(RUNS))
            stats["annealings"] = search.search(best, bound_s, runs, deadline)
        if best.program is None:
            smallest = smaller(graph, smallest, search.smallest())
            least = self.least(graph, LEAST_SHARE * limit_s, deadline.progress)
            smallest = smallest if least is None else smaller(graph, smallest, least)
            best.offer(smallest, "least memory")
        if best.program is None:
            return without_plan(graph, smallest, impossible, stats)
        stats |= {"chosen": best.source, "solve_s": time.monotonic() - begin}
        program = self.polish(graph, best.program, budget_bytes)
        return solution(graph, program, bound_s, PROVED, stats)

    def _start(
        self,
        graph: Graph,
        budget_bytes: int | None,
        deadline: Deadline,
        stats: dict[str, object],
    ) -> tuple[Incumbent, Program]:
        """Return the plan to start from, polished, and the program of the smallest peak known."""
        best = Incumbent(graph, budget_bytes)
        if budget_bytes is None:
            best.offer(fastest_program(graph, self.allowed)[0], "no limit")
        program, smallest = self.incumbent(graph, budget_bytes, deadline)
        if program is not None:
            best.offer(self.polish(graph, program, budget_bytes), "rotor")
            stats["incumbent_s"] = best.time_s
        return best, smallest

    def _smallest(
        self, coarse: Coarsening, smallest: Program, limit_s: float, progress: Progress | None
    ) -> Program:
        """Search for a program of a smaller peak than the smallest one known; return the smaller of
        both."""
        found = self.least(coarse.graph, LEAST_SHARE * limit_s, progress)
        if found is None:
            return smallest
        return smaller(coarse.fine, smallest, _expanded(coarse, found))


def _expanded(coarse: Coarsening, program: Program) -> Program:
    """Return the whole graph's program of a coarse one, with in-place outputs where allowed."""
    return with_in_place(coarse.fine, coarse.expand(program))


@dataclass(frozen=True)
class SolvedExactly(GraphStrategy):
    """A strategy that gives its 0-1 program to a solver unchanged.

    Attributes:
        solver: "cp-sat", "highs" or "scip".
    """

    solver: Solver = Solver.CP_SAT

    def __post_init__(self) -> None:
        # The name may come from a plan file or a user.
        object.__setattr__(self, "solver", Solver(self.solver))

    @abstractmethod
    def model(self, graph: Graph) -> MonetModel | CheckmateModel:
        """Build the 0-1 program of a graph."""

    def search(
        self, graph: Graph, budget_bytes: int, deadline: Deadline
    ) -> tuple[Status, Program | None, float | None]:
        built = self.model(graph)
        chain = self.start and not graph.is_forward
        start = rotor_programs(graph, budget_bytes, deadline=deadline)[0] if chain else None
        if start is not None:
            built.hint(start)
        options = SolverOptions(
            self.solver,
            deadline.left_s,
            progress=deadline.progress,
            workers=self.workers,
            seed=self.seed,
        )
        answer = built.model.solve(budget_bytes - graph.resident_bytes, options)
        return answer.status, _program(built, answer), answer.bound

    def least(self, graph: Graph, limit_s: float, progress: Progress | None) -> Program | None:
        if limit_s < LEAST_S:
            return None
        built = self.model(graph)
        options = SolverOptions(
            time_limit_s=limit_s / LEAST_SHARE,
            deterministic_s=limit_s,
            progress=progress,
            seed=self.seed,
        )
        return _program(built, built.model.solve(None, options))


def _program(built: MonetModel | CheckmateModel, answer: Answer) -> Program | None:
    return built.program(answer.values) if answer.values else None


def counted_exactly(graph: Graph) -> bool:
    """Tell whether proofs by MONeT's and Checkmate's programs hold for all programs of a graph that
    run operators again in their way.

    Both papers' operators write one tensor each, into a storage of its own, and all of them run.
    Programs here may need less: they may run an operator with several outputs twice between two
    others, once for each output; let an output take over the storage of a tensor that dies there;
    and leave out operators whose results nothing needs. Plans of the two programs are always valid.
    """
    plain = all(
        len(operator.writes) <= 1
        and not operator.in_place
        and not any(choice.in_place for choice in operator.implementations)
        for operator in graph.operators
    )
    return plain and len(needed_operators(graph)) == len(graph.operators)


def solution(
    graph: Graph, program: Program, bound_s: float, proved: float, stats: dict[str, object]
) -> Solution:
    """Return the solution that consists of a program without transfers, see `solution_of` in
    `memopt.strategies.base`."""
    return solution_of(program, replay(graph, program), bound_s, proved, stats)


def unlimited(graph: Graph, program: Program) -> Solution:
    """Return the solution of the fastest program, whatever the memory, that moves nothing."""
    return solution(graph, program, math.inf, 0.0, {"chosen": "no limit"})


def without_plan(
    graph: Graph, smallest: Program, proved: bool, stats: dict[str, object]
) -> Solution:
    """Return a solution without a plan, infeasible if proved; name the smallest plan known."""
    least = solution(graph, smallest, time_lower_bound(graph), 0.0, {})
    return Solution(
        Status.INFEASIBLE if proved else Status.UNKNOWN,
        smallest_budget_bytes=least.peak_bytes,
        smallest=least,
        stats=stats,
    )
