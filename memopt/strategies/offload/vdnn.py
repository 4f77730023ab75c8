"""VDNN: the yardstick of Offloading §6.1 after vDNN++: thresholds of u_F/|x_i|."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memopt.strategies.offload.chain_offload import PAPER, ChainOffload, Choice
from memopt.strategies.offload.ordered import makespan_s
from memopt.strategies.offload.problem import OffloadProblem
from memopt.strategies.offload.program import ordered_transfers


@dataclass(frozen=True)
class Vdnn(ChainOffload):
    """For every threshold of u_{F_i}/|x_i|: offload all activations at or above it, or every
    other one of them; the best no-wait ordered schedule wins, in the paper's model."""

    name: ClassVar[str] = "vdnn"
    references: ClassVar[tuple[str, ...]] = (
        PAPER,
        "Dynamic memory management for GPU-based training of DNNs (vDNN++, 2019)",
    )

    def choose(self, problem: OffloadProblem, time_limit_s: float | None) -> Choice:
        candidates = [(one, problem.amounts(one)) for one in _candidates(problem)]
        timed = [
            (makespan_s(problem, amounts), offloaded)
            for offloaded, amounts in candidates
            if self.within_host(int(amounts.sum()))
        ]
        time_s, best = min(timed, key=lambda entry: entry[0], default=(np.inf, []))
        if not np.isfinite(time_s):
            # Everything fits the budget (its floor was checked), so the host is what is short.
            self.refuse_host(problem, problem.excess_bytes + 1)
        return Choice(ordered_transfers(best), stats={"candidates": len(candidates)})


def _candidates(problem: OffloadProblem) -> Iterator[list[int]]:
    movable = np.flatnonzero(problem.movable)
    ratios = problem.durations_s[movable] / problem.sizes[movable]
    for threshold in np.unique(ratios):
        above = movable[ratios >= threshold].tolist()
        yield above
        yield above[::2]
