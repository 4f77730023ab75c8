"""The paper's own strategies: Greedy (Offloading §4) and DynProg (§5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memopt.solvers.running import Deadline
from memopt.strategies.offload.chain_offload import ChainOffload, OffloadChoice
from memopt.strategies.offload.dynprog_search import solve_dynprog
from memopt.strategies.offload.ordered import greedy_amounts, searched_amounts, stopped_at
from memopt.strategies.offload.problem import OffloadProblem
from memopt.strategies.offload.program import ordered_transfers


@dataclass(frozen=True)
class DynProg(ChainOffload):
    """Moves activations to the host, chosen to slow the step least; plans in seconds.

    Algorithm 1 in slots of memory, then the no-wait ordered schedule of its set.

    Attributes:
        slots: slots of the capacity (§5.3.2); None: nothing is rounded, for short chains.
        refine: improve the set by local search for whole transfers, which is what a program
            does; False: exactly the paper's set.
    """

    slots: int | None = 500
    refine: bool = True

    name: ClassVar[str] = "dynprog"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"DynProg: slots must be at least 1 or None, got {self.slots}")

    def choose(self, problem: OffloadProblem, deadline: Deadline) -> OffloadChoice:
        result = stopped_at(
            deadline,
            lambda stop: solve_dynprog(problem, self.slots, self.host_budget_bytes, stop),
        )
        amounts = result.amounts
        # The rounded problem may have no schedule where the real one has.
        fallback = amounts is None
        if amounts is None:
            eager = greedy_amounts(problem)
            amounts = eager if self.within_host(int(eager.sum())) else None
        if amounts is None:
            self.refuse_host(problem, problem.excess_bytes + 1)
        planned = np.flatnonzero(amounts).tolist()
        if self.refine:
            refined, time_s = stopped_at(
                deadline,
                lambda stop: searched_amounts(problem, amounts, self.host_budget_bytes, stop),
            )
            amounts = refined if np.isfinite(time_s) else amounts
        return OffloadChoice(
            ordered_transfers(np.flatnonzero(amounts).tolist()),
            stats={
                "dynprog_set": tuple(planned),
                "rounds": result.rounds,
                "labels": result.labels,
                "labels_cut": result.cut,
                "greedy_fallback": fallback,
            },
        )


@dataclass(frozen=True)
class Greedy(ChainOffload):
    """Moves the first activations to the host, as many as the budget asks for; plans at once.

    The first k activations, k the smallest with Σ|x_i| ≥ M_peak - M (Theorem 2,
    rounded up). Without rounding it is the optimum of the fractional problem, which is part of
    every Solution's statistics (`fractional_optimum_s`)."""

    name: ClassVar[str] = "greedy"

    def choose(self, problem: OffloadProblem, deadline: Deadline) -> OffloadChoice:
        amounts = greedy_amounts(problem)
        size = int(amounts.sum())
        if not self.within_host(size):
            self.refuse_host(problem, size)
        return OffloadChoice(ordered_transfers(np.flatnonzero(amounts).tolist()))
