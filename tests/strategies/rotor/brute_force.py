"""Exhaustive search over all chain schedules of a class, for tiny chains.

Shares nothing with the strategies. A state is δ's index and three sets, as bits of one integer:
the activations held on their own, the ā held, and the stages whose F_ck or F_all has run and
whose backward has not (Rotor Definition 4.1). `successor` is Table 1; its costs are held equal to
`memopt.reductions.chain_replay` by a test. The search is Dijkstra's on (time, peak), once per
step of the memory-time trade-off.
"""

from __future__ import annotations

import heapq

import numpy as np
from numba import njit, typed, types

from memopt.models.chain import Chain

NO_SAVE, CHECKPOINT, ALL, BACKWARD, DROP_A, DROP_SAVED = range(6)
PERSISTENT, REVOLVE, OPTIMAL, FREE, LAZY = range(5)
"""Classes: Definition 4.1; that with F_all^ℓ only right before B^ℓ; Definition 4.3, without F_∅^ℓ
while ā^ℓ is held; any value may be dropped at any time (F_∅ is then F_ck and a drop); the same, but
a forward only runs on from the highest value below what the next backward lacks, and every ā is
there for its own backward."""

WIDTH = 12
"""Bits of a set: stages 0 to 11."""
MASK = (1 << WIDTH) - 1
LABEL = types.UniTuple(types.float64, 2)


def arrays(chain: Chain) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and seconds per stage 0..n; columns: a, ā, δ, o_f, o_f no save, o_b, g."""
    stages = chain.stages
    sizes = [[chain.input_bytes, 0, chain.input_gradient_bytes, 0, 0, 0, 0]]
    sizes += [
        [
            stage.output_bytes,
            stage.saved_bytes,
            stage.gradient_bytes,
            stage.forward_overhead_bytes,
            stage.no_save_overhead_bytes,
            stage.backward_overhead_bytes,
            stage.parameter_gradient_bytes,
        ]
        for stage in stages
    ]
    times = [[0.0, 0.0], *([stage.forward_time_s, stage.backward_time_s] for stage in stages)]
    return np.array(sizes, np.int64), np.array(times)


@njit(cache=True)
def start_state(n):
    return np.int64(n) << (3 * WIDTH) | 1


@njit(cache=True)
def live_bytes(n, sizes, state):
    held, saved = state & MASK, state >> WIDTH & MASK
    gradient = state >> (3 * WIDTH)
    total = sizes[gradient, 2]
    for k in range(n + 1):
        if held >> k & 1:
            total += sizes[k, 0]
        if saved >> k & 1:
            total += sizes[k, 1]
        if k > gradient:
            total += sizes[k, 6]
    return total


@njit(cache=True)
def successor(n, sizes, state, move, k, kind):
    """(new state, bytes during the step), or (-1, 0) if the step is invalid or not in the class."""
    held, saved = state & MASK, state >> WIDTH & MASK
    pinned, gradient = state >> (2 * WIDTH) & MASK, state >> (3 * WIDTH)
    live = live_bytes(n, sizes, state)
    here, before = 1 << k, 1 << (k - 1)
    if kind <= OPTIMAL and move <= BACKWARD and pinned >> (k + 1):
        return np.int64(-1), np.int64(0)
    if kind == REVOLVE and saved and move != BACKWARD:
        return np.int64(-1), np.int64(0)
    if kind == LAZY and move < BACKWARD:
        lacks_input = saved >> gradient & 1
        limit = gradient - 1 if lacks_input else n
        if ((held | saved) & ((1 << (limit + 1)) - 1)) >> k or k > limit:
            return np.int64(-1), np.int64(0)
    if move in (DROP_A, DROP_SAVED):
        if kind == LAZY and move == DROP_SAVED:
            return np.int64(-1), np.int64(0)
        if kind < FREE or not (held if move == DROP_A else saved) & here:
            return np.int64(-1), np.int64(0)
        if move == DROP_A:
            held ^= here
        else:
            saved ^= here
        during = live - sizes[k, move - DROP_A]
    else:
        if not (held | saved) & before:
            return np.int64(-1), np.int64(0)
        if move == BACKWARD:
            if gradient != k or not saved & here:
                return np.int64(-1), np.int64(0)
            during = live + sizes[k - 1, 2] + sizes[k, 5] + sizes[k, 6]
            saved ^= here
            pinned &= ~here
            gradient -= 1
            if k > 1:
                held &= ~before
        elif move == ALL:
            if saved & here:
                return np.int64(-1), np.int64(0)
            during = live + sizes[k, 1] + sizes[k, 3]
            saved |= here
            pinned |= here
        else:
            if held & here:
                return np.int64(-1), np.int64(0)
            during = live + sizes[k, 0] + sizes[k, 4]
            held |= here
            if move == CHECKPOINT:
                pinned |= here
            else:
                own = k > 1 and held & before
                if not own or saved & here or (kind <= REVOLVE and pinned & here):
                    return np.int64(-1), np.int64(0)
                held ^= before
                # Definition 4.3: what F_∅ discards pins no lower stage any longer.
                pinned &= ~here
    if kind > OPTIMAL:
        pinned = 0
    new = gradient << (3 * WIDTH) | pinned << (2 * WIDTH) | saved << WIDTH | held
    return np.int64(new), np.int64(during)


@njit(cache=True)
def fastest(n, sizes, times, kind, limit):
    """(time, peak) of the fastest schedule with peak ≤ limit, the least peak among those."""
    best = typed.Dict.empty(types.int64, LABEL)
    start = start_state(n)
    best[start] = (0.0, -1e18)
    queue = [(0.0, -1e18, start)]
    while len(queue):
        time, peak, state = heapq.heappop(queue)
        if best[state] < (time, peak):
            continue
        if state >> (3 * WIDTH) == 0:
            return time, peak
        for k in range(1, n + 1):
            for move in range(6):
                new, during = successor(n, sizes, state, move, k, kind)
                if new < 0 or during > limit:
                    continue
                seconds = 0.0 if move > BACKWARD else times[k, 1 if move == BACKWARD else 0]
                label = (time + seconds, max(peak, float(during)))
                if new not in best or label < best[new]:
                    best[new] = label
                    heapq.heappush(queue, (label[0], label[1], new))
    return np.inf, 0.0


def brute_force(chain: Chain, kind: int) -> list[tuple[int, float]]:
    """Every (smallest budget in bytes, makespan) of the class, by increasing budget."""
    sizes, times = arrays(chain)
    points: list[tuple[int, float]] = []
    limit = 1 << 60
    while True:
        time, peak = fastest(len(chain), sizes, times, kind, limit)
        if time == np.inf:
            return points[::-1]
        if points and points[-1][1] == time:
            points.pop()
        points.append((int(peak) + chain.resident_bytes, time))
        limit = int(peak) - 1
