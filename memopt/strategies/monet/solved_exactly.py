"""A strategy that gives a coarsened graph's 0-1 program to a solver unchanged."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.instructions import Program
from memopt.solvers.binary_program import Answer
from memopt.solvers.running import Deadline, Solver, SolverOptions
from memopt.strategies.base import Progress
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.graph_strategy import LEAST_S, LEAST_SHARE, GraphStrategy
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.shared.chain_programs import rotor_programs


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
