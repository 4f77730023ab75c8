"""MONeT, and Checkmate exact and rounded, as strategies on a coarsened graph."""

from __future__ import annotations

import time
from abc import abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from memopt.models.graph import Graph, Operator
from memopt.models.variants import variant
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.strategies.base import Features, Progress, Status, stops
from memopt.strategies.monet.backend import Answer, Solver
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.graph_strategy import LEAST_S, LEAST_SHARE, GraphStrategy
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.monet.incumbent import fastest_kernels
from memopt.strategies.monet.moment_search import MomentSearch
from memopt.strategies.monet.whole import search_whole

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
class _SolvedExactly(GraphStrategy):
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

    def least(self, graph: Graph, limit_s: float, progress: Progress | None) -> Program | None:
        if limit_s < LEAST_S:
            return None
        built = self.model(graph)
        answer = built.model.solve(
            None,
            time_limit_s=limit_s / LEAST_SHARE,
            deterministic_s=limit_s,
            progress=progress,
            seed=self.seed,
        )
        return _program(built, answer)


@dataclass(frozen=True)
class Monet(_SolvedExactly):
    """Recomputation and operator implementations chosen together, exactly (MONeT).

    Attributes:
        choices: which implementations may be chosen, for the ablation.
    """

    choices: Choices = Choices.ALL

    name: ClassVar[str] = "monet"
    features: ClassVar[Features] = Features(recompute=True, implementations=True)
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

    def bound(
        self, graph: Graph, budget_bytes: int, deadline: float, progress: Progress | None
    ) -> float | None:
        search = MomentSearch(graph, self.allowed, budget_bytes, deadline, progress)
        search.run()
        return search.bound_s


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
    features: ClassVar[Features] = Features(recompute=True)
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
class CheckmateRounding(GraphStrategy):
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
    features: ClassVar[Features] = Features(recompute=True)
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
            if stops(progress, 1.0 - share, f"relaxation for {share:.0%} of the budget"):
                break
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
