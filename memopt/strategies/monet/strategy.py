"""MONeT, and Checkmate exact and rounded, as strategies on a coarsened graph."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from memopt.models.bounds import memory_lower_bound, spared_operators, time_lower_bound
from memopt.models.coarsen import Coarsening, coarsen
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator
from memopt.models.program import Program
from memopt.models.replay import replay
from memopt.models.variants import variant
from memopt.strategies.base import CostModel, Progress, Solution, Status, Strategy
from memopt.strategies.monet.backend import Answer, Solver
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.monet.incumbent import fastest_kernels, rotor_program
from memopt.strategies.monet.moment_search import CLOSE
from memopt.strategies.monet.whole import search_whole

DEFAULT_TIME_LIMIT_S = 60.0
SAME = 1e-9
PROVED = 1e-6
"""Gap at which a plan counts as optimal: the solver's whole numbers round costs."""
MONET_PAPER = (
    "Shah, Wu, Mohan, Chidambaram, Krähenbühl: Memory Optimization for Deep Networks, 2021"
)
CHECKMATE_PAPER = "Jain et al.: Checkmate: Breaking the Memory Wall, MLSys 2020"


class Choices(StrEnum):
    """Which implementations the solver may choose (MONeT figure 4's ablation)."""

    NONE = "none"
    CONV = "conv"
    OUTPUT = "output"
    INTERMEDIATE = "intermediate"
    ALL = "all"


@dataclass(frozen=True)
class _GraphStrategy(Strategy):
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

    @abstractmethod
    def search(
        self, graph: Graph, budget_bytes: int, limit_s: float, progress: Progress | None
    ) -> tuple[Status, Program | None, float | None]:
        """(status, program, a bound in s valid for the strategy's class) on the coarse graph."""

    def least(self, graph: Graph, limit_s: float) -> Program | None:
        """The program of the smallest peak the search's class finds."""
        return None

    def hint(self, built: MonetModel | CheckmateModel, graph: Graph, budget_bytes: int) -> None:
        """Rotor's plan of the graph to be solved, if there is one, for the solver to start from."""
        program = rotor_program(graph, budget_bytes)[0] if self.start else None
        if program is not None:
            built.hint(program)

    def incumbent(
        self, graph: Graph, budget_bytes: int | None
    ) -> tuple[Program | None, int | None]:
        """(A program within the budget, if there is one; the smallest budget known to be feasible):
        the search starts there, and returns nothing slower."""
        return rotor_program(graph, budget_bytes) if self.start else (None, None)

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
        exact = len(coarse.graph.operators) == len(graph.operators) and not spared_operators(graph)
        # Operators with implementations are not merged: a stage for each may be too many.
        too_large = len(coarse.graph.operators) > 2 * self.max_operators
        status, found, bound_s = Status.UNKNOWN, None, None
        whole_s: float | None = None
        impossible = memory_lower_bound(graph) > limit_bytes
        if not (exact or impossible):
            # All of the graph in a coarser program: a bound, and often a plan close to it.
            best, whole_s = self.whole(graph, best, limit_bytes, begin + limit_s, stats, progress)
        left_s = limit_s - (time.monotonic() - begin)
        if impossible:
            status, exact = Status.INFEASIBLE, True
        elif left_s > 0 and not (_close(graph, best, whole_s) or (whole_s and too_large)):
            status, found, bound_s = self.search(coarse.graph, limit_bytes, left_s, progress)
            stats["solver"] = str(status)
        if bound_s is not None and not exact:
            stats["coarse_lower_bound_s"], bound_s = bound_s, None
        bound_s = whole_s if bound_s is None else bound_s
        if found is not None:
            program = self.polish(graph, coarse.expand(found), budget_bytes)
            took_s = replay(graph, program).time_s
            stats["solver_s"] = took_s
            if best is None or took_s < replay(graph, best).time_s * (1 - SAME):
                best = program
                stats["chosen"] = self.name
        if best is None:
            left_s = max(1.0, limit_s - (time.monotonic() - begin))
            proved = bool(stats.get("relaxation_infeasible"))
            proved = proved or (exact and status is Status.INFEASIBLE)
            return self._none(graph, coarse, proved, smallest, left_s, stats)
        if "chosen" not in stats:
            # The solver's bound on memory may not be able to represent it: kept all the same.
            stats["chosen"] = stats.get("whole", "rotor")
            stats["outside_the_program"] = found is None and status is Status.INFEASIBLE
        timeline = replay(graph, best)
        stats["solve_s"] = time.monotonic() - begin
        return self._solution(graph, best, timeline.time_s, timeline.peak_bytes, bound_s, stats)

    def _solution(
        self,
        graph: Graph,
        program: Program,
        time_s: float,
        peak_bytes: int,
        bound_s: float | None,
        stats: dict[str, object],
    ) -> Solution:
        # Plans outside the class (Rotor's, polished ones) may be faster than its bound.
        bound_s = min(time_s, max(time_lower_bound(graph), bound_s or 0.0))
        gap = (time_s - bound_s) / bound_s if bound_s > 0 else 0.0
        return Solution(
            Status.OPTIMAL if gap <= PROVED else Status.FEASIBLE,
            program=program,
            peak_bytes=peak_bytes,
            time_s=time_s,
            lower_bound_s=bound_s,
            gap=gap,
            stats=stats,
        )

    def _none(
        self,
        graph: Graph,
        coarse: Coarsening,
        proved: bool,
        smallest: int | None,
        left_s: float,
        stats: dict[str, object],
    ) -> Solution:
        """Without a plan: INFEASIBLE only where that is proved for the whole graph."""
        program = self.least(coarse.graph, left_s)
        if program is not None:
            peak_bytes = replay(graph, coarse.expand(program)).peak_bytes
            smallest = peak_bytes if smallest is None else min(smallest, peak_bytes)
        status = Status.INFEASIBLE if proved else Status.UNKNOWN
        return Solution(status, smallest_budget_bytes=smallest, stats=stats)


@dataclass(frozen=True)
class _SolvedExactly(_GraphStrategy):
    """Those whose 0-1 program is solved as it is.

    Attributes:
        solver: who solves it: "cp-sat", "highs" or "scip".
    """

    solver: Solver = Solver.CP_SAT

    def __post_init__(self) -> None:
        # A plan file, or a user, gives the name.
        object.__setattr__(self, "solver", Solver(self.solver))

    @abstractmethod
    def model(self, graph: Graph) -> MonetModel | CheckmateModel:
        """The 0-1 program of a graph."""

    def search(
        self, graph: Graph, budget_bytes: int, limit_s: float, progress: Progress | None
    ) -> tuple[Status, Program | None, float | None]:
        begin = time.monotonic()
        built = self.model(graph)
        self.hint(built, graph, budget_bytes)
        answer = built.model.solve(
            budget_bytes - graph.resident_bytes,
            time_limit_s=limit_s - (time.monotonic() - begin),
            progress=progress,
            workers=self.workers,
            seed=self.seed,
            solver=self.solver,
        )
        return answer.status, _program(built, answer), answer.bound

    def least(self, graph: Graph, limit_s: float) -> Program | None:
        built = self.model(graph)
        return _program(built, built.model.solve(None, time_limit_s=limit_s, seed=self.seed))


@dataclass(frozen=True)
class Monet(_SolvedExactly):
    """Recomputation and operator implementations chosen together, exactly (MONeT).

    Attributes:
        choices: which implementations may be chosen, for the ablation.
    """

    choices: Choices = Choices.ALL

    name: ClassVar[str] = "monet"
    features: ClassVar[frozenset[str]] = frozenset({"recompute", "implementations"})
    references: ClassVar[tuple[str, ...]] = (MONET_PAPER,)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "choices", Choices(self.choices))

    def allowed(self, operator: Operator, name: str) -> bool:
        """Whether the solver may run `operator` by its implementation `name`.

        By what it does to the dependences: the same reads and writes (algorithms of a
        convolution), tensors of its own (intermediate-activated), or other operands.
        """
        choice = next(c for c in operator.implementations if c.name == name)
        if self.exact_only and not choice.exact:
            return False
        if self.choices is Choices.ALL:
            return True
        if self.choices is Choices.NONE:
            return False
        return _kind(operator, name) is self.choices

    def model(self, graph: Graph) -> MonetModel:
        """The program of a graph under these choices."""
        return MonetModel(graph, self.allowed)

    def polish(self, graph: Graph, program: Program, budget_bytes: int | None) -> Program:
        if self.choices in (Choices.ALL, Choices.CONV):
            return fastest_kernels(graph, program, budget_bytes)
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
        return search_whole(graph, self.allowed, best, budget_bytes, deadline, stats, progress)


def _close(graph: Graph, best: Program | None, bound_s: float | None) -> bool:
    """Whether a plan is near a bound that holds for the whole graph."""
    return (
        best is not None
        and bound_s is not None
        and (replay(graph, best).time_s <= bound_s * (1 + CLOSE))
    )


def _kind(operator: Operator, name: str) -> Choices:
    """Which of the ablation's options an implementation belongs to."""
    choice = variant(operator, name)
    if "convolution" in operator.target:
        # One gradient alone is another algorithm, whatever it reads.
        return Choices.CONV
    if set(choice.reads) == set(operator.reads) and set(choice.writes) == set(operator.writes):
        return Choices.CONV
    packed = any(word in name for word in ("mask", "index8", "intermediate"))
    if packed or set(choice.writes) != set(operator.writes):
        return Choices.INTERMEDIATE
    return Choices.OUTPUT


@dataclass(frozen=True)
class Checkmate(_SolvedExactly):
    """Checkmate's exact program: recomputation of any operator, one implementation each.

    Attributes:
        fastest: -O: the plan's operators then run by the fastest kernels that fit; else -D.
    """

    fastest: bool = False
    max_operators: int = 24

    name: ClassVar[str] = "checkmate"
    features: ClassVar[frozenset[str]] = frozenset({"recompute"})
    references: ClassVar[tuple[str, ...]] = (CHECKMATE_PAPER,)

    def model(self, graph: Graph) -> CheckmateModel:
        """Checkmate's program of a graph."""
        return CheckmateModel(graph)

    def search(
        self, graph: Graph, budget_bytes: int, limit_s: float, progress: Progress | None
    ) -> tuple[Status, Program | None, float | None]:
        status, program, bound_s = super().search(graph, budget_bytes, limit_s, progress)
        # Kernels are chosen after the program: its bound is of the default ones.
        return status, program, None if self.fastest else bound_s

    def polish(self, graph: Graph, program: Program, budget_bytes: int | None) -> Program:
        return fastest_kernels(graph, program, budget_bytes) if self.fastest else program


@dataclass(frozen=True)
class CheckmateRounding(_GraphStrategy):
    """Checkmate's linear relaxation, rounded in two phases.

    Attributes:
        fastest: as for Checkmate.
        shares: the relaxation is solved for these shares of the budget, in turn, and the
            fastest rounded plan that fits is kept.
    """

    fastest: bool = False
    max_operators: int = 24
    shares: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7)

    name: ClassVar[str] = "checkmate-rounding"
    features: ClassVar[frozenset[str]] = frozenset({"recompute"})
    references: ClassVar[tuple[str, ...]] = (CHECKMATE_PAPER,)

    def search(
        self, graph: Graph, budget_bytes: int, limit_s: float, progress: Progress | None
    ) -> tuple[Status, Program | None, float | None]:
        begin = time.monotonic()
        built = CheckmateModel(graph)
        best: Program | None = None
        best_s = float("inf")
        most_bytes = min(budget_bytes, 2**50) - graph.resident_bytes
        for share in self.shares:
            left_s = limit_s - (time.monotonic() - begin)
            if left_s <= 0:
                break
            if progress is not None:
                progress(1.0 - share, f"relaxation for {share:.0%} of the budget")
            values = built.model.relax(int(share * most_bytes), left_s)
            if not values:
                continue
            program = built.rounded(values)
            timeline = replay(graph, program)
            if timeline.peak_bytes <= budget_bytes and timeline.time_s < best_s:
                best, best_s = program, timeline.time_s
        return (Status.UNKNOWN if best is None else Status.FEASIBLE), best, None

    def polish(self, graph: Graph, program: Program, budget_bytes: int | None) -> Program:
        return fastest_kernels(graph, program, budget_bytes) if self.fastest else program


def _program(built: MonetModel | CheckmateModel, answer: Answer) -> Program | None:
    return built.program(answer.values) if answer.values else None
