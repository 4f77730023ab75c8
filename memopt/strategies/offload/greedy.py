"""Greedy: the first activations, as many as the peak asks for (Offloading §4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memopt.strategies.offload.bounds import greedy_amounts
from memopt.strategies.offload.chain_offload import ChainOffload, Choice
from memopt.strategies.offload.problem import OffloadProblem
from memopt.strategies.offload.program import ordered_transfers


@dataclass(frozen=True)
class Greedy(ChainOffload):
    """Offload the first k activations, k the smallest with Σ|x_i| ≥ M_peak - M (Theorem 2,
    rounded up). Without rounding it is the optimum of the fractional problem, which is part of
    every Solution's statistics (`fractional_optimum_s`)."""

    name: ClassVar[str] = "greedy"

    def choose(self, problem: OffloadProblem, time_limit_s: float | None) -> Choice:
        amounts = greedy_amounts(problem)
        size = int(amounts.sum())
        if not self.within_host(size):
            self.refuse_host(problem, size)
        return Choice(ordered_transfers(np.flatnonzero(amounts).tolist()))
