"""MONeT, and Checkmate exact and rounded, as strategies on a coarsened graph."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

from memopt.models.graph import Graph, Operator
from memopt.models.variants import variant
from memopt.programs.instructions import Program
from memopt.reductions.linearize import linearize
from memopt.reductions.stage_map import has_updates
from memopt.strategies.base import Features, Progress, Status
from memopt.strategies.monet.alternatives_table import SLOTS, AlternativesTable
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.graph_strategy import LEAST_S, LEAST_SHARE, GraphStrategy
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.monet.incumbent import Incumbent, rotor_programs
from memopt.strategies.monet.intervals import search_windows
from memopt.strategies.monet.kernel_choice import fastest_kernels
from memopt.strategies.monet.time_point_search import CLOSE, TimePointSearch
from memopt.strategies.solvers.binary_program import Answer
from memopt.strategies.solvers.running import Deadline, Solver, SolverOptions

RELAXATION_SHARE = 0.4

MONET_PAPER = (
    "Shah, Wu, Mohan, Chidambaram, Krähenbühl: Memory Optimization for Deep Networks, 2021"
)
CHECKMATE_PAPER = "Jain et al.: Checkmate: Breaking the Memory Wall, MLSys 2020"


class Choices(StrEnum):
    """Implementations that the solver may choose (MONeT figure 4's ablation)."""

    NONE = "none"
    CONV = "conv"
    OUTPUT = "output"
    INTERMEDIATE = "intermediate"
    ALL = "all"


@dataclass(frozen=True)
class _SolvedExactly(GraphStrategy):
    """A strategy whose 0-1 program is solved as it is.

    Attributes:
        solver: who solves it: "cp-sat", "highs" or "scip".
    """

    solver: Solver = Solver.CP_SAT

    def __post_init__(self) -> None:
        # A plan file, or a user, gives the name.
        object.__setattr__(self, "solver", Solver(self.solver))

    @abstractmethod
    def model(self, graph: Graph) -> MonetModel | CheckmateModel:
        """Build the 0-1 program of a graph."""

    def search(
        self, graph: Graph, budget_bytes: int, deadline: Deadline
    ) -> tuple[Status, Program | None, float | None]:
        built = self.model(graph)
        start = rotor_programs(graph, budget_bytes)[0] if self.start else None
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
        """Build the program of a graph under these choices."""
        return MonetModel(graph, self.allowed)

    def polish(self, graph: Graph, program: Program, budget_bytes: int | None) -> Program:
        if self.choices in (Choices.ALL, Choices.CONV):
            return fastest_kernels(graph, program, budget_bytes)
        return program

    def whole(
        self, best: Incumbent, budget_bytes: int, deadline: Deadline, stats: dict[str, object]
    ) -> float | None:
        graph = best.graph
        until = deadline.within(RELAXATION_SHARE * deadline.left_s)
        search = TimePointSearch(graph, self.allowed, budget_bytes, until).run()
        stats["relaxation_rounds"] = search.rounds
        stats["relaxation_infeasible"] = search.infeasible
        if search.best.program is not None:
            best.offer(search.best.program, "relaxation")
        if not best.near(search.bound_s, CLOSE) and not has_updates(graph):
            view = linearize(graph)
            table = AlternativesTable(view, budget_bytes, SLOTS, deadline, self.allowed)
            found = table.best(budget_bytes)[0] if table.complete else None
            if found is not None:
                best.offer(found, "rotor-menus")
        if best.program is not None and not best.near(search.bound_s, CLOSE):
            stats["windows"] = search_windows(
                best, self.allowed, budget_bytes, deadline, search.bound_s
            )
        if best.source in ("relaxation", "rotor-menus", "windows"):
            stats["whole"] = best.source
        return search.bound_s or None

    def bound(self, graph: Graph, budget_bytes: int, deadline: Deadline) -> float | None:
        return TimePointSearch(graph, self.allowed, budget_bytes, deadline).run().bound_s


def _kind(operator: Operator, name: str) -> Choices:
    """Tell which of the ablation's options an implementation belongs to."""
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
        """Build Checkmate's program of a graph."""
        return CheckmateModel(graph)

    def search(
        self, graph: Graph, budget_bytes: int, deadline: Deadline
    ) -> tuple[Status, Program | None, float | None]:
        status, program, bound_s = super().search(graph, budget_bytes, deadline)
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
        self, graph: Graph, budget_bytes: int, deadline: Deadline
    ) -> tuple[Status, Program | None, float | None]:
        built = CheckmateModel(graph)
        best = Incumbent(graph, budget_bytes, tolerance=0.0)
        most_bytes = min(budget_bytes, 2**50) - graph.resident_bytes
        for share in self.shares:
            if deadline.passed(1.0 - share, f"relaxation for {share:.0%} of the budget"):
                break
            values = built.model.relax(int(share * most_bytes), deadline.left_s)
            if values:
                best.offer(built.rounded(values))
        status = Status.UNKNOWN if best.program is None else Status.FEASIBLE
        return status, best.program, None

    def polish(self, graph: Graph, program: Program, budget_bytes: int | None) -> Program:
        return fastest_kernels(graph, program, budget_bytes) if self.fastest else program


def _program(built: MonetModel | CheckmateModel, answer: Answer) -> Program | None:
    return built.program(answer.values) if answer.values else None
