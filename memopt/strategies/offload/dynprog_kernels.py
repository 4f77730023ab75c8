"""Compiled dynamic program of Offloading §5 (Algorithm 1), with corrected recurrences.

A label is a state of the paper's hash table IDLE_i: (kept, Δ_F, Δ_B) and its idle time, where
kept = Σ|x_j| over j < i not offloaded, so that M_F = kept + |x_i| + Δ_F⁺ and
M_B = M_F - Δ_F⁺ + |y_i| + Δ_B⁺. Room is what an operation leaves for kept data. Sizes and times
are in slots, or in bytes when nothing is rounded; a time is the slots that the link moves to the
host in it. Two things keep the tables small:

Dominance: of two labels with the same kept data, one is dropped if idling until its Δ are those
of the other costs it no more than its lead (waiting is allowed, so it can follow the other).

Bounds: a label is dropped if its idle time, and what the link has still to move beyond the
computations left, exceed the idle time of a schedule that is known.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memopt.solvers.compiled import compiled, compiled_unlocked
from memopt.strategies.offload.rounding import RecurrenceData

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Links = npt.NDArray[np.int32]

KEPT, OUT, BACK, IDLE = 0, 1, 2, 3
NO_LAST = -1


@compiled
def advance(data: RecurrenceData, state: Floats, i: int, offloaded: bool, new: Floats) -> None:
    """Advance label `state` of i to label `new` of i+1: (2)-(5), (7), (8).

    It waits for ε^F_i (1) and ε^B_i (6, with ex^B_i), in data of their own direction.
    """
    size = data.sizes[i]
    wait_f = max(0.0, state[KEPT] + max(0.0, state[OUT]) - data.room_f[i])
    wait_b = max(0.0, state[KEPT] + max(0.0, state[BACK]) - data.room_b[i])
    moved_f, moved_b = wait_f + data.moved_f[i], wait_b + data.moved_b[i]
    new[IDLE] = state[IDLE] + wait_f + wait_b * data.ratio
    if offloaded:
        new[KEPT] = state[KEPT]
        new[OUT] = max(0.0, state[OUT]) + size - moved_f
        new[BACK] = size + max(0.0, state[BACK] - moved_b)
    else:
        new[KEPT] = state[KEPT] + size
        new[OUT] = state[OUT] - moved_f
        new[BACK] = state[BACK] - moved_b


@compiled
def turning_idle(data: RecurrenceData, state: Floats, last: int) -> float:
    """Return ε_G, the idle time between F_L and B_L (9, 10)."""
    ratio = data.ratio
    out, back = state[OUT], state[BACK]
    if out <= 0 and back <= 0:
        return 0.0
    if out > 0 and back > 0:
        return float(out + back * ratio)
    n = len(data.moved_f)
    passed = 0.0
    if out > 0:
        spare = -back * ratio
        idle = max(0.0, out - spare)
        for j in range(n - 1, -1, -1):
            if passed >= spare:
                break
            idle = max(idle, state[KEPT] + out + data.peak_b[j] - passed)
            passed += data.moved_b[j] * ratio
        return float(idle)
    spare = -out / ratio
    idle = max(0.0, back - spare)
    for j in range(n - 1, -1, -1):
        if passed >= spare:
            break
        # F_j still needs x_j when its copy has ended.
        own = data.sizes[j] if j == last else 0.0
        idle = max(idle, state[KEPT] + back + data.peak_f[j] + own - passed)
        passed += data.moved_f[j] / ratio
    return float(idle * ratio)


@compiled
def remaining(state: Floats, i: int, excess: Floats, left: Floats, ratio: float) -> float:
    """Return a lower bound on the idle time still to come.

    excess[i]: bytes that the later operations lack, all of x_i.. counted as kept; left[i]: time of
    the operations from F_i to B_i.
    """
    more = state[KEPT] + excess[i]
    if more > 0:
        out, back = max(0.0, state[OUT]) + more, max(0.0, state[BACK]) + more
    else:
        # Without further offloads, those in progress may use the link's spare time outside.
        out, back = state[OUT], state[BACK]
    return float(max(0.0, out + back * ratio - left[i]))


@compiled
def evaluate(data: RecurrenceData, offloaded: Bools) -> float:
    """Return the total idle time of one set of offloads; infinite if it does not fit."""
    state, new = np.zeros(4), np.zeros(4)
    last = NO_LAST
    for i in range(len(data.sizes)):
        if state[KEPT] > min(data.room_f[i], data.room_b[i]):
            return np.inf
        advance(data, state, i, offloaded[i], new)
        if offloaded[i]:
            last = i if new[OUT] < 0 else NO_LAST
        state, new = new, state
    return float(state[IDLE] + turning_idle(data, state, last))


@compiled
def dominates(
    a: Floats, last_a: int, b: Floats, last_b: int, ratio: float, exact: bool, tolerance: float
) -> bool:
    """Tell whether label a makes label b superfluous, up to `tolerance`; kept(a) ≤ kept(b)."""
    lead = b[IDLE] - a[IDLE]
    if lead < 0:
        return False
    if exact and last_a != NO_LAST and last_a != last_b:
        return False
    follow = max(0.0, a[OUT] - b[OUT]) + max(0.0, a[BACK] - b[BACK]) * ratio
    return bool(follow <= lead + tolerance)


@compiled
def thin(
    states: Floats, lasts: Ints, links: Links, start: int, begin: int, end: int,
    exact: bool, ratio: float, tolerance: float,
) -> int:  # fmt: skip
    """Drop in place the labels begin..end, sorted by idle time, that one from `start` on dominates.

    Returns the end of the labels kept.
    """
    left = begin
    for k in range(begin, end):
        beaten = False
        for other in range(start, left):
            if dominates(states[other], lasts[other], states[k], lasts[k], ratio, exact, tolerance):
                beaten = True
                break
        if not beaten:
            states[left] = states[k]
            lasts[left], links[left] = lasts[k], links[k]
            left += 1
    return left


@compiled
def select(
    states: Floats, lasts: Ints, links: Links, count: int, width: int, exact: bool, ratio: float,
    free_kept: float,
) -> tuple[int, int]:  # fmt: skip
    """Drop dominated labels in place; return how many are left and how many `width` cut off.

    The labels are sorted by kept data. A label that keeps less has more on the host: it may
    dominate one that keeps more only if it keeps at least `free_kept`, since the host then has room
    for all that can still move. When not exact, only labels of equal kept data are compared, and
    the last offloaded index is ignored. If more than `width` of them are left, nearly dominated
    ones are dropped, too, so that those that stay are spread over the front.
    """
    left, cut, position, free = 0, 0, 0, 0
    while position < count:
        end = position
        while end < count and states[end, KEPT] == states[position, KEPT]:
            end += 1
        order = position + np.argsort(states[position:end, IDLE], kind="mergesort")
        group, size = left, end - position
        moved, moved_lasts, moved_links = states[order], lasts[order], links[order]
        states[group : group + size] = moved
        lasts[group : group + size], links[group : group + size] = moved_lasts, moved_links
        while free < group and (not exact or states[free, KEPT] < free_kept):
            free += 1
        left = thin(states, lasts, links, free, group, group + size, exact, ratio, 0.0)
        tolerance = 1.0
        while not exact and left - group > width:
            before = left
            left = thin(states, lasts, links, group, group, left, exact, ratio, tolerance)
            cut += before - left
            tolerance *= 2
        position = end
    return left, cut


@compiled
def expand(
    data: RecurrenceData,
    i: int,
    states: Floats,
    lasts: Ints,
    count: int,
    excess: Floats,
    left: Floats,
    limit: float,
    least_kept: float,
    new_states: Floats,
    new_lasts: Ints,
    links: Links,
) -> int:
    """Write the labels of i+1, sorted by kept data; return how many.

    Those that keep x_i and those that offload it are two sorted lists, merged. Labels with less
    than `least_kept` on the device are over the host budget.
    """
    room = min(data.room_f[i], data.room_b[i])
    new = np.zeros(4)
    size = 0
    keeping, leaving = 0, 0 if data.movable[i] else count
    while keeping < count or leaving < count:
        offloaded = leaving < count and (
            keeping >= count or states[leaving, KEPT] <= states[keeping, KEPT] + data.sizes[i]
        )
        k = leaving if offloaded else keeping
        leaving += offloaded
        keeping += not offloaded
        if states[k, KEPT] > room:
            continue
        advance(data, states[k], i, offloaded, new)
        idle = new[IDLE] + remaining(new, i + 1, excess, left, data.ratio)
        if new[KEPT] < least_kept or idle > limit:
            continue
        new_states[size] = new
        new_lasts[size] = (i if new[OUT] < 0 else NO_LAST) if offloaded else lasts[k]
        links[size] = 2 * k + offloaded
        size += 1
    return size


@compiled
def future(data: RecurrenceData) -> tuple[Floats, Floats]:
    """Return `excess` and `left` of `remaining`, for every i."""
    n = len(data.sizes)
    excess = np.full(n + 1, -np.inf)
    left = np.zeros(n + 1)
    for i in range(n - 1, -1, -1):
        excess[i] = max(excess[i + 1] + data.sizes[i], -min(data.room_f[i], data.room_b[i]))
        left[i] = left[i + 1] + data.moved_f[i] + data.moved_b[i] * data.ratio
    return excess, left


@compiled_unlocked
def solve(
    data: RecurrenceData, limit: float, host: float, width: int, exact: bool, stop: Bools
) -> tuple[Bools, float, int, int]:
    """Find the set of offloads with the least idle time.

    Labels that cannot come below `limit` are not followed. Returns (offloaded, idle time, labels
    made, labels cut off by `width`); the idle time is infinite if no label is left, or
    `stop[0]` was set meanwhile.
    """
    n = len(data.sizes)
    excess, left = future(data)
    states, lasts, count = np.zeros((1, 4)), np.full(1, NO_LAST), 1
    links = np.empty(0, np.int32)
    offsets = np.zeros(n + 1, np.int64)
    seen, every, total_cut = 0.0, data.sizes.sum(), 0
    for i in range(n):
        new_states = np.empty((2 * count, 4))
        new_lasts = np.empty(2 * count, np.int64)
        new_links = np.empty(2 * count, np.int32)
        seen += data.sizes[i]
        size = expand(
            data, i, states, lasts, count, excess, left, limit, seen - host,
            new_states, new_lasts, new_links,
        )  # fmt: skip
        count, cut = select(
            new_states, new_lasts, new_links, size, width, exact, data.ratio, every - host
        )
        total_cut += cut
        if count == 0 or stop[0]:
            return np.zeros(n, np.bool_), np.inf, offsets[i], total_cut
        states, lasts = new_states, new_lasts
        offsets[i + 1] = offsets[i] + count
        if offsets[i + 1] > len(links):
            longer = np.empty(2 * offsets[i + 1], np.int32)
            longer[: offsets[i]] = links[: offsets[i]]
            links = longer
        links[offsets[i] : offsets[i + 1]] = new_links[:count]
    best, best_idle = 0, np.inf
    for k in range(count):
        idle = states[k, IDLE] + turning_idle(data, states[k], lasts[k])
        # At equal times, the one that moves less.
        if idle <= best_idle:
            best, best_idle = k, idle
    offloaded = np.zeros(n, np.bool_)
    for i in range(n - 1, -1, -1):
        link = links[offsets[i] + best]
        offloaded[i] = link % 2 == 1
        best = link // 2
    return offloaded, best_idle, offsets[n], total_cut
