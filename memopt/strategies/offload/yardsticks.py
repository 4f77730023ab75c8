"""The yardsticks vDNN and TFLMS of Offloading §6.1: their transfers, in the paper's model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memopt.models.chain import Chain
from memopt.solvers.running import Deadline
from memopt.strategies.base import CostModel
from memopt.strategies.offload.chain_offload import PAPER, ChainOffload, OffloadChoice
from memopt.strategies.offload.ordered import makespan_s
from memopt.strategies.offload.problem import Bytes, OffloadProblem, Seconds
from memopt.strategies.offload.program import ordered_transfers

MOST_STAGES = 250
"""Of `tflms`, whose table takes the cube of the stages."""


@dataclass(frozen=True)
class Vdnn(ChainOffload):
    """Moves activations to the host by vDNN's rule: those with time to travel; a yardstick.

    For every threshold of u_{F_i}/|x_i|: offload all activations at or above it, or every
    other one of them; the best no-wait ordered schedule wins, in the paper's model."""

    name: ClassVar[str] = "vdnn"
    references: ClassVar[tuple[str, ...]] = (
        PAPER,
        "Dynamic memory management for GPU-based training of DNNs (vDNN++, 2019)",
    )

    def choose(self, problem: OffloadProblem, deadline: Deadline) -> OffloadChoice:
        time_s, best, count = np.inf, list[int](), 0
        for offloaded in _thresholds(problem):
            count += 1
            amounts = problem.amounts(offloaded)
            if self.within_host(int(amounts.sum())):
                found_s = makespan_s(problem, amounts)
                if found_s < time_s:
                    time_s, best = found_s, offloaded
            if np.isfinite(time_s) and deadline.passed(0.5, "thresholds"):
                break
        if not np.isfinite(time_s):
            # Everything fits the device budget (its floor was checked), so the host lacks room.
            self.refuse_host(problem, problem.excess_bytes + 1)
        return OffloadChoice(ordered_transfers(best), stats={"candidates": count})


def _thresholds(problem: OffloadProblem) -> Iterator[list[int]]:
    movable = np.flatnonzero(problem.movable)
    ratios = problem.durations_s[movable] / problem.sizes[movable]
    for threshold in np.unique(ratios):
        above = movable[ratios >= threshold].tolist()
        yield above
        yield above[::2]


@dataclass(frozen=True)
class Tflms(ChainOffload):
    """Moves the first activations to the host by TFLMS's rule; a yardstick.

    The first N activations go to the host as they are made. Each is fetched `distance` backward
    operations before it is read. The best N and `distance` for a budget are found by exhaustive
    search.

    Operations wait for the data that they read and never for room, so that every (N, distance) has
    one peak. The smallest of these is the smallest budget of this strategy, though not of others.
    (The program may wait for room all the same, at instruction boundaries.)
    """

    name: ClassVar[str] = "tflms"
    references: ClassVar[tuple[str, ...]] = (
        PAPER,
        "TFLMS: Large Model Support in TensorFlow by Graph Rewriting (2018)",
    )

    def why_not(self, cost_model: CostModel) -> str | None:
        if isinstance(cost_model, Chain) and len(cost_model) > MOST_STAGES:
            return (
                f"tflms tries every number of tensors and distance, of up to {MOST_STAGES} stages, "
                f"not {len(cost_model)}; use dynprog"
            )
        return super().why_not(cost_model)

    def smallest_capacity(self, problem: OffloadProblem) -> int:
        return max(problem.floor_bytes, int(self._table(problem)[0].min()))

    def least_choice(self, problem: OffloadProblem) -> OffloadChoice:
        return self.choose(problem, Deadline())

    def choose(self, problem: OffloadProblem, deadline: Deadline) -> OffloadChoice:
        peaks, times = self._table(problem)
        times = np.where(peaks <= problem.capacity_bytes, times, np.inf)
        count, distance = (int(x) for x in np.unravel_index(int(times.argmin()), times.shape))
        chosen = np.flatnonzero(problem.movable)[:count].tolist()
        n = problem.stages
        # B_{j + distance}, or the first backward operation.
        not_before = {j: max(n, 2 * n - 1 - (j + distance)) for j in chosen}
        return OffloadChoice(
            ordered_transfers(chosen, not_before),
            stats={
                "tensors": count,
                "prefetch_distance": distance,
                "tflms_time_s": float(times[count, distance]),
            },
        )

    def _table(self, problem: OffloadProblem) -> tuple[Bytes, Seconds]:
        """Return (peak, time) for every N that the host budget allows and every distance."""
        from memopt.strategies.offload.ordered_kernels import tflms_table

        peaks, times = tflms_table(problem.arrays)
        on_host = np.concatenate(([0], np.cumsum(problem.sizes[problem.movable])))
        host = np.inf if self.host_budget_bytes is None else self.host_budget_bytes
        allowed = on_host <= host
        return peaks[allowed], times[allowed]
