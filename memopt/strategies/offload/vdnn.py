"""VDNN: the yardstick of Offloading §6.1 after vDNN++: thresholds of u_F/|x_i|."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.strategies.offload.chain_offload import PAPER, ChainOffload, Choice, Limits
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

    def choose(
        self, chain: Chain, problem: OffloadProblem, device: Device, limits: Limits
    ) -> Choice:
        best: tuple[float, list[int]] | None = None
        tried = 0
        for offloaded in _candidates(problem):
            tried += 1
            amounts = problem.amounts(offloaded)
            if not self.within_host(int(amounts.sum())):
                continue
            time_s = makespan_s(problem, amounts)
            if np.isfinite(time_s) and (best is None or time_s < best[0]):
                best = time_s, offloaded
        if best is None:
            # Everything fits the budget (its floor was checked), so the host is what is short.
            self.refuse_host(problem, chain.resident_bytes, problem.excess_bytes + 1)
        assert best is not None
        return Choice(ordered_transfers(best[1]), stats={"candidates": tried})


def _candidates(problem: OffloadProblem) -> Iterator[list[int]]:
    movable = np.flatnonzero(problem.movable)
    ratios = problem.durations_s[movable] / problem.sizes[movable]
    for threshold in np.unique(ratios):
        above = movable[ratios >= threshold].tolist()
        yield above
        yield above[::2]
