"""The yardsticks of Offloading §6.1: other tools' choices of what to move, in the paper's model."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memopt.strategies.base import CostModel
from memopt.strategies.offload.chain_offload import PAPER, ChainOffload, Choice
from memopt.strategies.offload.ordered import makespan_s
from memopt.strategies.offload.problem import Bytes, OffloadProblem, Seconds
from memopt.strategies.offload.program import ordered_transfers

SCORES = ("doa", "aoa", "wdoa", "swdoa")


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
        candidates = [(one, problem.amounts(one)) for one in _thresholds(problem)]
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


def _thresholds(problem: OffloadProblem) -> Iterator[list[int]]:
    movable = np.flatnonzero(problem.movable)
    ratios = problem.durations_s[movable] / problem.sizes[movable]
    for threshold in np.unique(ratios):
        above = movable[ratios >= threshold].tolist()
        yield above
        yield above[::2]


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
        from memopt.strategies.offload.ordered_kernels import tflms_table

        peaks, times = tflms_table(problem.arrays)
        on_host = np.concatenate(([0], np.cumsum(problem.sizes[problem.movable])))
        host = np.inf if self.host_budget_bytes is None else self.host_budget_bytes
        allowed = on_host <= host
        return peaks[allowed], times[allowed]


@dataclass(frozen=True)
class AutoSwap(ChainOffload):
    """Offload by decreasing weighted score until every operation fits.

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
            return "autoswap needs optuna: pip install 'memopt[autoswap]'"
        return super().why_not(cost_model)

    def choose(self, problem: OffloadProblem, time_limit_s: float | None) -> Choice:
        import optuna

        candidates = _Candidates(problem)
        results: dict[tuple[int, ...], float] = {}

        def objective(trial: optuna.Trial) -> float:
            weights = np.array([trial.suggest_float(name, 0.0, 1.0) for name in SCORES])
            offloaded = candidates.select(weights)
            if offloaded not in results:
                amounts = problem.amounts(offloaded)
                results[offloaded] = makespan_s(problem, amounts)
            return results[offloaded]

        optuna.logging.get_logger("optuna").setLevel(logging.WARNING)
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=self.seed))
        for name in SCORES:
            study.enqueue_trial({other: float(other == name) for other in SCORES})
        study.optimize(objective, n_trials=self.trials, timeout=time_limit_s)
        if not results:
            # However little time there is: one set of weights.
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
        return Choice(
            ordered_transfers(best),
            stats={"trials": len(study.trials), "sets_tried": len(results)},
        )


class _Candidates:
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
        """The excess over the budget integrated over each absence, byte seconds."""
        # An operation that takes no time counts a little, so that its excess is not overlooked.
        weight = self.problem.durations_s + 1e-9 * (self.problem.compute_time_s + 1e-9)
        excess: Seconds = self.absent @ (np.maximum(need, 0) * weight)
        return excess

    def select(self, weights: Seconds) -> tuple[int, ...]:
        """Indices by decreasing score until every operation fits."""
        need = self.problem.need_bytes.copy()
        base = sum((w * s for w, s in zip(weights[:3], self.fixed, strict=True)), np.zeros(1))
        left = np.ones(len(self.indices), dtype=np.bool_)
        chosen: list[int] = []
        while (need > 0).any():
            score = base + weights[3] * _scaled(self._weighted(need))
            # What helps no operation that still lacks room is not moved.
            helps = left & (self.absent & (need > 0)).any(axis=1)
            pick = int(np.argmax(np.where(helps, score, -np.inf)))
            left[pick] = False
            need -= np.where(self.absent[pick], self.problem.sizes[self.indices[pick]], 0)
            chosen.append(int(self.indices[pick]))
        return tuple(sorted(chosen))


def _scaled(score: Seconds) -> Seconds:
    largest = float(np.abs(score).max(initial=0.0))
    return score / largest if largest > 0 else score
