"""Compiled replay of no-wait ordered schedules (Offloading Proposition 1), and a search by it.

Ordered: data leave by increasing index and return by decreasing index, so that all offloads
precede all prefetches, and every constraint says that one event waits for another: an operation
for the offloads that make its room and the prefetches that it reads, a prefetch for the last
operation that leaves no room for it. No-wait is then the longest path, in one pass.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memopt.solvers.compiled import compiled, compiled_unlocked
from memopt.strategies.offload.problem import ProblemArrays

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@compiled
def fits(need: Ints, amounts: Ints) -> bool:
    """Tell whether every operation has room once all amounts that it does not touch are on the
    host."""
    n = len(amounts) - 1
    before = 0
    for i in range(n):
        if need[i] > before or need[2 * n - 1 - i] > before:
            return False
        before += amounts[i]
    return True


@compiled
def allowances(need: Ints, amounts: Ints, last: int, total: int) -> Ints:
    """Return, for each operation, the most bytes that may be back once its predecessor has ended.

    Before F_last, nothing is back: x_last returns first, and leaves when F_last starts at the
    earliest. While F_last runs, x_last is still on the device (correction of eq. 10).
    """
    n = len(amounts) - 1
    allowed = np.empty(2 * n, np.int64)
    bound = total
    for k in range(2 * n - 1, -1, -1):
        away = total - amounts[last] if k == last else total
        bound = min(bound, away - need[k])
        allowed[k] = bound if k >= last else 0
    return allowed


@compiled
def prefetch_until(
    state: Ints,
    clock: Floats,
    allowed: int,
    whole: bool,
    amounts: Ints,
    prefetches: Floats,
    from_host: float,
    latency_s: float,
) -> None:
    """Prefetch as far as `allowed` lets, no earlier than clock[0]; state = (bytes back, next x,
    bytes of it back), clock = (earliest start, link free)."""
    while state[1] >= 0:
        j = state[1]
        size = amounts[j]
        if size == 0:
            state[1] -= 1
            continue
        left = size - state[2]
        step = min(left, allowed - state[0])
        if step <= 0 or (whole and step < left):
            return
        start = max(clock[0], clock[1])
        if state[2] == 0:
            prefetches[j, 0] = start
            start += latency_s
        clock[1] = start + step / from_host
        prefetches[j, 1] = clock[1]
        state[0] += step
        state[2] += step
        if state[2] == size:
            state[1] -= 1
            state[2] = 0


@compiled
def room_time(
    need: int,
    whole: bool,
    amounts: Ints,
    sums: Ints,
    offloads: Floats,
    to_host: float,
    latency_s: float,
) -> float:
    """Return when `need` bytes have left the device, whole activations or any part of them.

    sums[j]: amounts[0] + … + amounts[j].
    """
    if need <= 0:
        return 0.0
    j = np.searchsorted(sums, need)
    if j == len(amounts):
        return np.inf
    if whole:
        return float(offloads[j, 1])
    left = need - (sums[j] - amounts[j])
    return float(offloads[j, 0] + latency_s + left / to_host)


@compiled
def replay(data: ProblemArrays, amounts: Ints, whole: bool) -> tuple[Floats, Floats, Floats, float]:
    """Return the start of each operation, (start, end) of each copy out and back, and the makespan.

    Infinite if it does not fit. `whole`: memory moves at the ends of whole transfers (§3.1 E);
    otherwise continuously, and prefetches may be interrupted (§5).
    """
    need, to_host, from_host, latency_s = data.need, data.to_host, data.from_host, data.latency_s
    n = len(amounts) - 1
    starts = np.zeros(2 * n)
    offloads = np.zeros((n + 1, 2))
    prefetches = np.zeros((n + 1, 2))
    if not fits(need, amounts):
        return starts, offloads, prefetches, np.inf
    last, total = -1, 0
    for j in range(n + 1):
        if amounts[j] > 0:
            last, total = j, total + amounts[j]
    allowed = allowances(need, amounts, max(last, 0), total)
    state = np.array([0, last, 0])
    clock = np.zeros(2)
    sums = np.cumsum(amounts)
    now = 0.0
    for k in range(2 * n):
        if k <= last and amounts[k] > 0:
            offloads[k, 0] = max(now, clock[1])
            offloads[k, 1] = offloads[k, 0] + latency_s + amounts[k] / to_host
            clock[1] = offloads[k, 1]
        clock[0] = now
        if k >= last >= 0:
            prefetch_until(
                state, clock, allowed[k], whole, amounts, prefetches, from_host, latency_s
            )
        now = max(now, room_time(need[k], whole, amounts, sums, offloads, to_host, latency_s))
        # B_i reads x_i and x_{i+1}; the latter is back since B_{i+1}.
        if k >= n:
            now = max(now, prefetches[2 * n - 1 - k, 1])
            if k == n:
                now = max(now, prefetches[n, 1])
        starts[k] = now
        now += data.durations_s[k]
    return starts, offloads, prefetches, now


@compiled
def makespan(data: ProblemArrays, amounts: Ints, whole: bool) -> float:
    """Return the makespan alone; infinite if the schedule does not fit."""
    return replay(data, amounts, whole)[3]


@compiled_unlocked
def improve(
    data: ProblemArrays, chosen: Bools, host: float, evaluations: int, stop: Bools
) -> tuple[Bools, float]:
    """Flip one activation, or exchange two, while that makes whole transfers faster.

    At equal times the set that moves less is preferred. Stops after so many evaluations,
    or where `stop[0]` is set meanwhile.
    """
    n = len(data.sizes)
    best = chosen.copy()
    amounts = np.where(best, data.sizes, 0)
    best_time = makespan(data, amounts, True)
    best_moved = amounts.sum()
    found, tried = True, 0
    while found and tried < evaluations and not stop[0]:
        found = False
        for i in range(n):
            for j in range(i + 1):
                if tried >= evaluations or stop[0]:
                    break
                same = i != j and best[i] == best[j]
                if same or not data.movable[i] or not data.movable[j]:
                    continue
                trial = best.copy()
                trial[i] = not trial[i]
                if i != j:
                    trial[j] = not trial[j]
                amounts = np.where(trial, data.sizes, 0)
                moved = amounts.sum()
                if moved > host:
                    continue
                tried += 1
                time = makespan(data, amounts, True)
                if time < best_time or (time == best_time and moved < best_moved):
                    best, best_time, best_moved = trial, time, moved
                    found = True
    return best, best_time


@compiled
def tflms_backward(
    data: ProblemArrays, chosen: Ints, distance: int, made: Floats, out_end: Floats
) -> tuple[Floats, Floats, float]:
    """Return the start of every operation, the start of every prefetch, and the makespan.

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


@compiled
def tflms_peak_and_time(data: ProblemArrays, chosen: Ints, distance: int) -> tuple[int, float]:
    """Return peak memory and makespan with these activations offloaded."""
    durations, used, sizes = data.durations_s, data.used, data.sizes
    n = len(sizes) - 1
    out_end = np.zeros(n + 1)
    made = np.concatenate((np.zeros(1), np.cumsum(durations[:n])))
    link = 0.0
    for j in chosen:
        link = max(link, made[j]) + data.latency_s + sizes[j] / data.to_host
        out_end[j] = link
    starts, back_start, end = tflms_backward(data, chosen, distance, made, out_end)
    peak = used[0]
    for k in range(2 * n):
        i = k if k < n else 2 * n - 1 - k
        memory = used[k]
        for j in chosen:
            gone = j < i and out_end[j] <= starts[k]
            if gone and back_start[j] >= starts[k] + durations[k]:
                memory -= sizes[j]
        peak = max(peak, memory)
    return peak, end


@compiled
def tflms_table(data: ProblemArrays) -> tuple[Ints, Floats]:
    """Return (peak, time) for every number of tensors and every prefetch distance."""
    n = len(data.sizes) - 1
    movable = np.flatnonzero(data.movable)
    peaks = np.zeros((len(movable) + 1, n), np.int64)
    times = np.zeros((len(movable) + 1, n))
    for count in range(len(movable) + 1):
        for distance in range(n):
            found = tflms_peak_and_time(data, movable[:count], distance)
            peaks[count, distance], times[count, distance] = found
    return peaks, times
