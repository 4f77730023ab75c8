"""TFLMS: the yardstick that never delays an operation for memory (Offloading §6.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memopt.strategies.offload.chain_offload import PAPER, ChainOffload, Choice
from memopt.strategies.offload.problem import Bytes, OffloadProblem, Seconds
from memopt.strategies.offload.program import ordered_transfers


@dataclass(frozen=True)
class Tflms(ChainOffload):
    """Offload the first N activations as they are made and fetch each one `distance` backward
    operations before it is read; the best N and distance per budget, by exhaustive search.

    Operations wait for the data they read and never for room, so every pair of parameters has
    one peak: low budgets are out of reach, and infeasible says what is not. The program may
    wait for room all the same, at instruction boundaries.
    """

    name: ClassVar[str] = "tflms"
    references: ClassVar[tuple[str, ...]] = (
        PAPER,
        "TFLMS: Large Model Support in TensorFlow by Graph Rewriting (2018)",
    )

    def smallest_capacity(self, problem: OffloadProblem) -> int:
        return max(problem.floor_bytes, int(self._table(problem)[0].min()))

    def least_choice(self, problem: OffloadProblem) -> Choice:
        return self.choose(problem, None)

    def choose(self, problem: OffloadProblem, time_limit_s: float | None) -> Choice:
        peaks, times = self._table(problem)
        times = np.where(peaks <= problem.capacity_bytes, times, np.inf)
        count, distance = (int(x) for x in np.unravel_index(int(times.argmin()), times.shape))
        chosen = np.flatnonzero(problem.movable)[:count].tolist()
        n = problem.stages
        # B_{j + distance}, or the first backward operation.
        not_before = {j: max(n, 2 * n - 1 - (j + distance)) for j in chosen}
        return Choice(
            ordered_transfers(chosen, not_before),
            stats={
                "tensors": count,
                "prefetch_distance": distance,
                "tflms_time_s": float(times[count, distance]),
            },
        )

    def _table(self, problem: OffloadProblem) -> tuple[Bytes, Seconds]:
        """(peak, time) for every N that the host budget allows and every distance."""
        from memopt.strategies.offload import tflms_kernels

        peaks, times = tflms_kernels.table(problem.arrays)
        on_host = np.concatenate(([0], np.cumsum(problem.sizes[problem.movable])))
        host = np.inf if self.host_budget_bytes is None else self.host_budget_bytes
        allowed = on_host <= host
        return peaks[allowed], times[allowed]
