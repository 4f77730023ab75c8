"""A strategy that draws its programs: every path of the executor, not those that pay alone."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar

from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.solution import Solution
from memopt.strategies.base import CostModel, Features, Strategy
from tests.random_programs import random_program


@dataclass(frozen=True)
class Drawn(Strategy):
    """A random valid program, whatever it costs: recomputations, transfers, another order.

    Attributes:
        seed: what the program is drawn from.
        recomputations: how many operators run again.
        swaps: how many tensors leave the device and come back, at most.
        reorder: whether the operators' order is drawn, too.
    """

    seed: int
    recomputations: int = 0
    swaps: int = 0
    reorder: bool = False

    name: ClassVar[str] = "drawn"
    needs: ClassVar[str] = "graph"
    features: ClassVar[Features] = Features(recompute=True, offload=True, order=True)

    def solve(self, cost_model: CostModel, budget_bytes: int | None, **_: Any) -> Solution:
        program = random_program(
            Random(self.seed),
            self.taken(cost_model, Graph),
            recomputations=self.recomputations,
            swaps=self.swaps,
            reorder=self.reorder,
        )
        return Solution(Status.FEASIBLE, program=program, lower_bound_s=0.0)
