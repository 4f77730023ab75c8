"""Compiled replay of TFLMS's schedules: nothing waits for memory, so each has its own peak."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from memopt.strategies.offload.problem import Arrays

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@njit(cache=True)
def backward_starts(
    data: Arrays, chosen: Ints, distance: int, made: Floats, out_end: Floats
) -> tuple[Floats, Floats, float]:
    """Start of every operation, start of every prefetch, and the makespan.

    made[i]: end of F_{i-1}; out_end[j]: end of the copy of x_j to the host.
    """
    n = len(data.sizes) - 1
    starts = np.zeros(2 * n)
    starts[:n] = made[:n]
    prefetch_start = np.full(n + 1, np.inf)
    arrival = np.zeros(n + 1)
    now, link = made[n], out_end.max()
    pending = len(chosen) - 1
    for i in range(n - 1, -1, -1):
        # Triggered when B_{j+distance} may start, by decreasing index.
        while pending >= 0 and chosen[pending] + distance >= i:
            j = chosen[pending]
            prefetch_start[j] = max(now, link)
            link = prefetch_start[j] + data.latency_s + data.sizes[j] / data.from_host
            arrival[j] = link
            pending -= 1
        now = max(now, arrival[i], arrival[i + 1])
        starts[2 * n - 1 - i] = now
        now += data.durations_s[2 * n - 1 - i]
    return starts, prefetch_start, now


@njit(cache=True)
def peak_and_time(data: Arrays, chosen: Ints, distance: int) -> tuple[int, float]:
    """Peak memory and makespan with these activations offloaded."""
    durations, used, sizes = data.durations_s, data.used, data.sizes
    n = len(sizes) - 1
    out_end = np.zeros(n + 1)
    made = np.concatenate((np.zeros(1), np.cumsum(durations[:n])))
    link = 0.0
    for j in chosen:
        link = max(link, made[j]) + data.latency_s + sizes[j] / data.to_host
        out_end[j] = link
    starts, back_start, end = backward_starts(data, chosen, distance, made, out_end)
    peak = 0
    for k in range(2 * n):
        i = k if k < n else 2 * n - 1 - k
        memory = used[k]
        for j in chosen:
            gone = j < i and out_end[j] <= starts[k]
            if gone and back_start[j] >= starts[k] + durations[k]:
                memory -= sizes[j]
        peak = max(peak, memory)
    return peak, end


@njit(cache=True)
def table(data: Arrays) -> tuple[Ints, Floats]:
    """(peak, time) for every number of tensors and every prefetch distance."""
    n = len(data.sizes) - 1
    movable = np.flatnonzero(data.movable)
    peaks = np.zeros((len(movable) + 1, n), np.int64)
    times = np.zeros((len(movable) + 1, n))
    for count in range(len(movable) + 1):
        for distance in range(n):
            found = peak_and_time(data, movable[:count], distance)
            peaks[count, distance], times[count, distance] = found
    return peaks, times
