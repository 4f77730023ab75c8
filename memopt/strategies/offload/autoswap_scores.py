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
        # Away from the end of F_j to the start of B_j: during the operations first ≤ k < last.
        first, last = self.indices + 1, 2 * problem.stages - 1 - self.indices
        self.first, self.last = first, last
        transfers = sizes / problem.to_host_bytes_per_s + sizes / problem.from_host_bytes_per_s
        absence = (ends[last] - problem.durations_s[last]) - ends[self.indices]
        doa = absence - transfers - 2 * problem.latency_s
        aoa = np.where(doa >= 0, doa * sizes, doa / sizes)
        self.fixed = [_scaled(doa), _scaled(aoa), _scaled(self._weighted(problem.need_bytes))]

    def _weighted(self, need: Bytes) -> Seconds:
        """Integrate the excess over the budget over each absence, byte seconds."""
        # An operation that takes no time counts a little, so that its excess is not overlooked.
        weight = self.problem.durations_s + 1e-9 * (self.problem.compute_time_s + 1e-9)
        return self._during(np.maximum(need, 0) * weight)

    def _during(self, values: Seconds) -> Seconds:
        """Return the sum of what each operation has, over each absence."""
        before = np.concatenate(([0.0], np.cumsum(values)))
        found: Seconds = before[self.last] - before[self.first]
        return found

    def select(self, weights: Seconds) -> tuple[int, ...]:
        """Select indices by decreasing score until every operation fits."""
        need = self.problem.need_bytes.copy()
        base = sum((w * s for w, s in zip(weights[:3], self.fixed, strict=True)), np.zeros(1))
        left = np.ones(len(self.indices), dtype=np.bool_)
        chosen: list[int] = []
        while (need > 0).any():
            score = base + weights[3] * _scaled(self._weighted(need))
            # An activation that helps no operation which still lacks room is not moved.
            helps = left & (self._during((need > 0).astype(np.float64)) > 0)
            pick = int(np.argmax(np.where(helps, score, -np.inf)))
            left[pick] = False
            need[self.first[pick] : self.last[pick]] -= self.problem.sizes[self.indices[pick]]
            chosen.append(int(self.indices[pick]))
        return tuple(sorted(chosen))


def _scaled(score: Seconds) -> Seconds:
    largest = float(np.abs(score).max(initial=0.0))
    return score / largest if largest > 0 else score
