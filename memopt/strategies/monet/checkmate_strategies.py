"""Checkmate, exact and rounded, as strategies on a coarsened graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memopt.models.checks import MOST_BYTES
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.instructions import Program
from memopt.solvers.running import Deadline
from memopt.strategies.base import Features
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.graph_strategy import GraphStrategy, SolvedExactly
from memopt.strategies.shared.incumbent import Incumbent
from memopt.strategies.shared.kernel_choice import fastest_kernels
from memopt.strategies.shared.time_point_search import TimePointSearch

CHECKMATE_PAPER = "Jain et al.: Checkmate: Breaking the Memory Wall, MLSys 2020"

STAGE_S = 5e-6
"""Seconds in which a turn of `CheckmateModel` is built, for each tensor that may be in memory."""


@dataclass(frozen=True)
class CheckmateStrategy(GraphStrategy):
    """A strategy that plans by Checkmate's program: one implementation of each operator.

    Attributes:
        fastest: -O: the plan's operators then run by the fastest kernels that fit; else -D.
    """

    fastest: bool = False
    max_operators: int = 24

    features: ClassVar[Features] = Features(recompute=True)
    references: ClassVar[tuple[str, ...]] = (CHECKMATE_PAPER,)

    def building_s(self, graph: Graph) -> float:
        # In every stage every operator has a turn, with all tensors.
        return STAGE_S * len(graph.operators) ** 3

    def bound(self, graph: Graph, budget_bytes: int, deadline: Deadline) -> float | None:
        if self.fastest:
            return None
        search = TimePointSearch(graph, lambda operator, name: False, budget_bytes, deadline)
        return search.run().bound_s

    def polish(self, graph: Graph, program: Program, budget_bytes: int | None) -> Program:
        return fastest_kernels(graph, program, budget_bytes) if self.fastest else program


@dataclass(frozen=True)
class Checkmate(CheckmateStrategy, SolvedExactly):
    """Recomputes any operators of any model, solved exactly; minutes for a large model.

    Checkmate's exact program: recomputation of any operator, one implementation each.
    """

    name: ClassVar[str] = "checkmate"

    def model(self, graph: Graph) -> CheckmateModel:
        """Build Checkmate's program of a graph."""
        return CheckmateModel(graph)

    def as_they_are(self, graph: Graph) -> bool:
        return not self.fastest or super().as_they_are(graph)

    def search(
        self, graph: Graph, budget_bytes: int, deadline: Deadline
    ) -> tuple[Status, Program | None, float | None]:
        status, program, bound_s = super().search(graph, budget_bytes, deadline)
        # Kernels are chosen after the program: its bound is that of the default ones.
        return status, program, None if self.fastest else bound_s


@dataclass(frozen=True)
class CheckmateRounding(CheckmateStrategy):
    """Recomputes any operators of any model; faster to plan than checkmate, slower steps.

    Checkmate's linear relaxation, rounded in two phases.

    Attributes:
        shares: the relaxation is solved for these shares of the budget, in turn, and the
            fastest rounded plan that fits is kept.
    """

    shares: tuple[float, ...] = (1.0, 0.9, 0.8, 0.7)

    name: ClassVar[str] = "checkmate-rounding"

    def search(
        self, graph: Graph, budget_bytes: int, deadline: Deadline
    ) -> tuple[Status, Program | None, float | None]:
        built = CheckmateModel(graph)
        best = Incumbent(graph, budget_bytes, tolerance=0.0)
        most_bytes = min(budget_bytes, MOST_BYTES) - graph.resident_bytes
        for share in self.shares:
            if deadline.passed(1.0 - share, f"relaxation for {share:.0%} of the budget"):
                break
            values = built.model.relax(int(share * most_bytes), deadline.left_s)
            if values:
                best.offer(built.rounded(values))
        status = Status.UNKNOWN if best.program is None else Status.FEASIBLE
        return status, best.program, None
