"""Compiled replay of TFLMS's schedules: nothing waits for memory, so each has its own peak."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@njit(cache=True)
def backward_starts(
    durations: Floats,
    sizes: Ints,
    count_out: int,
    distance: int,
    out_end: Floats,
    to_read: Ints,
    from_host: float,
    latency: float,
) -> tuple[Floats, Floats, float]:
    """Start of every operation, and start of every prefetch in `prefetch_start`."""
    n = len(sizes) - 1
    starts = np.zeros(2 * n)
    prefetch_start = np.full(n + 1, np.inf)
    arrival = np.zeros(n + 1)
    now = 0.0
    for k in range(n):
        starts[k] = now
        now += durations[k]
    link = 0.0
    for j in range(n + 1):
        link = max(link, out_end[j])
    pending = count_out - 1
    for i in range(n - 1, -1, -1):
        # Triggered when B_{j+distance} may start, by decreasing index.
        while pending >= 0 and to_read[pending] + distance >= i:
            j = to_read[pending]
            prefetch_start[j] = max(now, link)
            link = prefetch_start[j] + latency + sizes[j] / from_host
            arrival[j] = link
            pending -= 1
        now = max(now, arrival[i], arrival[i + 1])
        starts[2 * n - 1 - i] = now
        now += durations[2 * n - 1 - i]
    return starts, prefetch_start, now


@njit(cache=True)
def peak_and_time(
    durations: Floats,
    used: Ints,
    sizes: Ints,
    movable: Ints,
    count_out: int,
    distance: int,
    to_host: float,
    from_host: float,
    latency: float,
) -> tuple[int, float]:
    """Peak memory and makespan with the first `count_out` movable activations offloaded."""
    n = len(sizes) - 1
    out_end = np.zeros(n + 1)
    chosen = movable[:count_out]
    made = np.concatenate((np.zeros(1), np.cumsum(durations[:n])))
    link = 0.0
    for j in chosen:
        link = max(link, made[j]) + latency + sizes[j] / to_host
        out_end[j] = link
    starts, back_start, end = backward_starts(
        durations, sizes, count_out, distance, out_end, chosen, from_host, latency
    )
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
def table(
    durations: Floats,
    used: Ints,
    sizes: Ints,
    movable: Ints,
    to_host: float,
    from_host: float,
    latency: float,
) -> tuple[Ints, Floats]:
    """(peak, time) for every number of tensors and every prefetch distance."""
    n = len(sizes) - 1
    peaks = np.zeros((len(movable) + 1, n), np.int64)
    times = np.zeros((len(movable) + 1, n))
    for count_out in range(len(movable) + 1):
        for distance in range(n):
            peaks[count_out, distance], times[count_out, distance] = peak_and_time(
                durations, used, sizes, movable, count_out, distance, to_host, from_host, latency
            )
    return peaks, times
