"""The yardstick AutoSwap of Offloading §6.1: its choice of transfers, in the paper's model."""

from __future__ import annotations

import importlib.util
import logging
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memopt.solvers.running import Deadline
from memopt.strategies.base import CostModel
from memopt.strategies.offload.chain_offload import PAPER, ChainOffload, OffloadChoice
from memopt.strategies.offload.ordered import makespan_s
from memopt.strategies.offload.problem import Bytes, OffloadProblem, Seconds
from memopt.strategies.offload.program import ordered_transfers


@dataclass(frozen=True)
class AutoSwap(ChainOffload):
    """Moves activations to the host by AutoSwap's scores until the step fits; a yardstick.

    The scores are those of Zhang et al. (2019): duration of absence (between F_j and B_j, less
    both transfers), area of absence (times the size), weighted duration of absence (the excess
    over the budget, integrated over the absence), and the same with the excess that is left
    after the choices made so far.

    Attributes:
        trials: weights that are tried.
        seed: of the optimiser.
    """

    trials: int = 60
    seed: int = 0

    name: ClassVar[str] = "autoswap"
    references: ClassVar[tuple[str, ...]] = (
        PAPER,
        "Efficient memory management for GPU-based deep learning systems (AutoSwap, 2019)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.trials < 1:
            raise ValueError(f"AutoSwap: trials must be at least 1, got {self.trials}")

    def why_not(self, cost_model: CostModel) -> str | None:
        if importlib.util.find_spec("optuna") is None:
            return "autoswap needs optuna: pip install optuna"
        return super().why_not(cost_model)

    def choose(self, problem: OffloadProblem, deadline: Deadline) -> OffloadChoice:
        import optuna

        candidates = Candidates(problem)
        results: dict[tuple[int, ...], float] = {}

        def objective(trial: optuna.Trial) -> float:
            weights = np.array([trial.suggest_float(name, 0.0, 1.0) for name in SCORES])
            offloaded = candidates.select(weights)
            if offloaded not in results:
                amounts = problem.amounts(offloaded)
                results[offloaded] = makespan_s(problem, amounts)
            return results[offloaded]

        def stops(study: optuna.Study, _trial: object) -> None:
            if deadline.passed(len(study.trials) / self.trials, "scores"):
                study.stop()

        left_s = None if math.isinf(deadline.at_s) else deadline.left_s
        optuna.logging.get_logger("optuna").setLevel(logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.seed))
        for name in SCORES:
            study.enqueue_trial({other: float(other == name) for other in SCORES})
        study.optimize(objective, n_trials=self.trials, timeout=left_s, callbacks=[stops])
        if not results:
            # Even without time: one set of weights.
            study.optimize(objective, n_trials=1)
        allowed = {
            offloaded: time_s
            for offloaded, time_s in results.items()
            if self.within_host(int(problem.sizes[list(offloaded)].sum()))
        }
        if not allowed:
            smallest = min(int(problem.sizes[list(offloaded)].sum()) for offloaded in results)
            self.refuse_host(problem, smallest)
        best = min(allowed, key=lambda offloaded: (allowed[offloaded], offloaded))
        return OffloadChoice(
            ordered_transfers(best),
            stats={"trials": len(study.trials), "sets_tried": len(results)},
        )


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
