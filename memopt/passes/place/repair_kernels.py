"""Compiled local search for offsets within a capacity: insert and eject.

Some buffers have an offset, the others wait. A move gives the heaviest waiting buffer the address
where the buffers in its way cost least; they are ejected and wait. The cost of a buffer is its
weight. A buffer placed by force gets a larger weight, so that buffers which are hard to place stay
where they are and easy ones go around them (after the ejection search of Nagata and Bräysy, *A
powerful route minimization heuristic*, Operations Research Letters 37, 2009).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.passes.place.buffers import Ints
from memopt.solvers.compiled import compiled

INFINITE = 1 << 60
JUST_PLACED = 50
"""Factor on the weight of a buffer that was placed a few moves ago."""
SORTING = 32
"""Units of work for an event of the sweep over addresses, which are sorted."""


class Buffers(NamedTuple):
    """The buffers to place: bytes, alignments, least offsets (multiples of the alignments), and
    which of them overlap (see `Layout.overlaps`)."""

    size: Ints
    alignment: Ints
    floor: Ints
    overlap_start: Ints
    overlaps: Ints


@compiled
def random_share(state: Ints) -> float:
    """Return the next number in [0, 1) of a linear congruential generator modulo 2³¹ - 1."""
    state[0] = state[0] * 48271 % 2147483647
    return float(state[0]) / 2147483647.0


@compiled
def _heaviest(waiting: Ints, count: int, weight: Ints) -> int:
    """Return the position of the heaviest of the waiting buffers."""
    best = 0
    for k in range(1, count):
        if weight[waiting[k]] > weight[waiting[best]]:
            best = k
    return best


@compiled
def _cheapest(
    step: int, floor: int, top: int, events: Ints, change: Ints, count: int, cost: int, rng: Ints
) -> tuple[int, int]:
    """Return (offset, cost) of the cheapest offset, from `floor` to `top`, to place a buffer at.

    `cost` is that of `floor`, `change[k]` its growth from offset `events[k]` on. Of equals, take an
    end of the shortest range of offsets (the tightest gap), one of them at random.
    """
    order = np.argsort(events[:count])
    best, best_key, offset = INFINITE, np.inf, floor
    start, k = floor, 0
    while True:
        end = events[order[k]] - step if k < count else top
        if end >= start and cost <= best:
            for candidate in (start, end):
                key = float(end - start) + random_share(rng)
                if cost < best or key < best_key:
                    best, best_key, offset = cost, key, candidate
        if k >= count:
            return int(offset), int(best)
        start = events[order[k]]
        while k < count and events[order[k]] == start:
            cost += change[order[k]]
            k += 1


@compiled
def _obstacles(
    buffers: Buffers, offset: Ints, cost: Ints, buffer: int, top: int, events: Ints, change: Ints
) -> tuple[int, int]:
    """Collect the obstacles of `buffer` from its least offset to `top`; return (number of events,
    the cost of that least offset), see `_cheapest`."""
    step, length, floor = buffers.alignment[buffer], buffers.size[buffer], buffers.floor[buffer]
    found, at_floor = 0, 0
    for k in range(buffers.overlap_start[buffer], buffers.overlap_start[buffer + 1]):
        other = buffers.overlaps[k]
        if offset[other] < 0:
            continue
        # Offsets from `low` to before `high` overlap it.
        low = -(-(offset[other] - length + 1) // step) * step
        high = -(-(offset[other] + buffers.size[other]) // step) * step
        if high <= floor:
            continue
        if low <= floor:
            at_floor += cost[other]
        elif low <= top:
            events[found], change[found] = low, cost[other]
            found += 1
        if high <= top:
            events[found], change[found] = high, -cost[other]
            found += 1
    return found, at_floor


@compiled
def _eject(buffers: Buffers, offset: Ints, buffer: int, waiting: Ints, waits: int) -> int:
    """Make the buffers that overlap `buffer` wait; return how many wait now."""
    bottom = offset[buffer]
    top = bottom + buffers.size[buffer]
    for k in range(buffers.overlap_start[buffer], buffers.overlap_start[buffer + 1]):
        other = buffers.overlaps[k]
        if offset[other] < 0 or offset[other] >= top:
            continue
        if offset[other] + buffers.size[other] > bottom:
            offset[other] = -1
            waiting[waits] = other
            waits += 1
    return waits


@compiled
def repair(
    buffers: Buffers,
    first_weight: Ints,
    offset: Ints,
    rng: Ints,
    capacity: int,
    tenure: int,
    work_limit: int,
) -> int:
    """Place all buffers within about `work_limit` units of work; write `offset` (-1: waits) and
    advance `rng`. Return the work: if an array were returned, numba would run Python code after the
    search, where an interrupt becomes a SystemError."""
    count, most = buffers.size.shape[0], 1
    for buffer in range(count):
        most = max(most, buffers.overlap_start[buffer + 1] - buffers.overlap_start[buffer])
    offset[:] = -1
    waiting, waits = np.arange(count), count
    events, change = np.empty(2 * most, np.int64), np.empty(2 * most, np.int64)
    # `cost` is the weight, or more for buffers in `recent`, a ring of those placed just now.
    weight, cost = first_weight.copy(), first_weight.copy()
    kept_until = np.zeros(count, np.int64)
    recent = np.full(3 * tenure + 2, -1, np.int64)
    work, move = 0, 0
    while waits > 0 and work < work_limit:
        move += 1
        for k in range(recent.shape[0]):
            if recent[k] >= 0 and kept_until[recent[k]] < move:
                cost[recent[k]] = weight[recent[k]]
                recent[k] = -1
        pick = _heaviest(waiting, waits, weight)
        buffer = waiting[pick]
        waits -= 1
        waiting[pick] = waiting[waits]
        step = buffers.alignment[buffer]
        top = (capacity - buffers.size[buffer]) // step * step
        found, at_floor = _obstacles(buffers, offset, cost, buffer, top, events, change)
        neighbours = buffers.overlap_start[buffer + 1] - buffers.overlap_start[buffer]
        work += waits + neighbours + SORTING * found
        floor = buffers.floor[buffer]
        offset[buffer], paid = _cheapest(step, floor, top, events, change, found, at_floor, rng)
        if paid > 0:
            weight[buffer] += first_weight[buffer]
            waits = _eject(buffers, offset, buffer, waiting, waits)
        kept_until[buffer] = move + tenure + int((2 * tenure + 1) * random_share(rng))
        cost[buffer] = JUST_PLACED * weight[buffer]
        recent[move % recent.shape[0]] = buffer
    return int(work)
