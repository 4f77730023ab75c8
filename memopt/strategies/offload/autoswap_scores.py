"""The scores by which AutoSwap orders the activations that it may move."""

from __future__ import annotations

import numpy as np

from memopt.strategies.offload.problem import Bytes, OffloadProblem, Seconds

SCORES = ("doa", "aoa", "wdoa", "swdoa")


class Candidates:
    """The activations that may move, with the scores that do not depend on other choices."""

    def __init__(self, problem: OffloadProblem) -> None:
        self.problem = problem
        self.indices = np.flatnonzero(problem.movable)
        sizes = problem.sizes[self.indices].astype(np.float64)
        ends = np.cumsum(problem.durations_s)
        operations = np.arange(2 * problem.stages)
        # Away from the end of F_j to the start of B_j.
        first, last = self.indices + 1, 2 * problem.stages - 1 - self.indices
        self.absent = (operations >= first[:, None]) & (operations < last[:, None])
        transfers = sizes / problem.to_host_bytes_per_s + sizes / problem.from_host_bytes_per_s
        absence = (ends[last] - problem.durations_s[last]) - ends[self.indices]
        doa = absence - transfers - 2 * problem.latency_s
        aoa = np.where(doa >= 0, doa * sizes, doa / sizes)
        self.fixed = [_scaled(doa), _scaled(aoa), _scaled(self._weighted(problem.need_bytes))]

    def _weighted(self, need: Bytes) -> Seconds:
        """Integrate the excess over the budget over each absence, byte seconds."""
        # An operation that takes no time counts a little, so that its excess is not overlooked.
        weight = self.problem.durations_s + 1e-9 * (self.problem.compute_time_s + 1e-9)
        excess: Seconds = self.absent @ (np.maximum(need, 0) * weight)
        return excess

    def select(self, weights: Seconds) -> tuple[int, ...]:
        """Select indices by decreasing score until every operation fits."""
        need = self.problem.need_bytes.copy()
        base = sum((w * s for w, s in zip(weights[:3], self.fixed, strict=True)), np.zeros(1))
        left = np.ones(len(self.indices), dtype=np.bool_)
        chosen: list[int] = []
        while (need > 0).any():
            score = base + weights[3] * _scaled(self._weighted(need))
            # An activation that helps no operation which still lacks room is not moved.
            helps = left & (self.absent & (need > 0)).any(axis=1)
            pick = int(np.argmax(np.where(helps, score, -np.inf)))
            left[pick] = False
            need -= np.where(self.absent[pick], self.problem.sizes[self.indices[pick]], 0)
            chosen.append(int(self.indices[pick]))
        return tuple(sorted(chosen))


def _scaled(score: Seconds) -> Seconds:
    largest = float(np.abs(score).max(initial=0.0))
    return score / largest if largest > 0 else score
