"""Compiled local search over sets of offloads, by whole-transfer ordered schedules."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from memopt.strategies.offload.ordered_kernels import makespan

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@njit(cache=True)
def improve(
    chosen: Bools,
    movable: Bools,
    sizes: Ints,
    durations: Floats,
    need: Ints,
    rates: Floats,
    host: float,
    evaluations: int,
) -> tuple[Bools, float]:
    """Flip one activation, or exchange two, while that is faster; rates = (out, back, latency).

    At equal times the set that moves less is preferred. Stops after so many evaluations.
    """
    n = len(sizes)
    best = chosen.copy()
    amounts = np.where(best, sizes, 0)
    best_time = makespan(durations, need, amounts, True, rates[0], rates[1], rates[2])
    best_moved = amounts.sum()
    found, tried = True, 0
    while found and tried < evaluations:
        found = False
        for i in range(n):
            for j in range(i + 1):
                same = i != j and best[i] == best[j]
                if tried >= evaluations or same or not movable[i] or not movable[j]:
                    continue
                trial = best.copy()
                trial[i] = not trial[i]
                if i != j:
                    trial[j] = not trial[j]
                amounts = np.where(trial, sizes, 0)
                moved = amounts.sum()
                if moved > host:
                    continue
                tried += 1
                time = makespan(durations, need, amounts, True, rates[0], rates[1], rates[2])
                if time < best_time or (time == best_time and moved < best_moved):
                    best, best_time, best_moved = trial, time, moved
                    found = True
    return best, best_time
