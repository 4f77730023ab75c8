"""Which tensors of given runs move to the host, and when: compiled.

`chosen_gaps` evicts, wherever memory is short, what is needed again last (Belady). `transfers`
keeps the time of the replay while it places copies, frees and fetches:

- a copy to the host starts when its tensor is made (or when its first gap begins);
- a device copy is freed where a time point needs the room, the copy that ends first first;
- a fetch comes as early as all points up to its reader have room for it, in the order of readers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from memopt.strategies.joint.run_table import Flags, Floats, Ints, VariantArrays


class Link(NamedTuple):
    """The link to the host: seconds for a copy and per byte, whether both directions overlap."""

    latency_s: float
    out_s_per_byte: float
    in_s_per_byte: float
    duplex: bool


class Rule(NamedTuple):
    """How early copies and fetches come.

    Attributes:
        lead: a fetch is issued when the compute until its reader is at most so many times the time
            of all fetches up to it; infinite: as soon as it fits.
        waits: whether a fetch may come where its room must first be freed for it.
        at_once: whether a copy starts when its tensor is made, not when its first gap begins.
    """

    lead: float
    waits: bool
    at_once: bool


@njit(cache=True, nogil=True)
def chosen_gaps(
    need: Ints, gaps: Ints, sizes: Ints, limit_bytes: int, never: Flags, order: Ints
) -> tuple[Flags, bool]:
    """(which gaps to use so that no time point needs more than the limit, whether they suffice).

    Args:
        need: bytes of each time point.
        gaps: as `memory_of` gives them.
        sizes: bytes of each gap.
        limit_bytes: total.
        never: which gaps are not to be used.
        order: of the gaps open at a point those with the largest figure go first.
    """
    points, count = need.size, gaps.shape[0]
    chosen = np.zeros(count, dtype=np.bool_)
    change = np.zeros(points + 1, dtype=np.int64)
    opening = np.argsort(gaps[:, 1])
    heap = np.empty(count, dtype=np.int64)
    held = opened = 0
    off = 0
    for p in range(points):
        while opened < count and gaps[opening[opened], 1] < p:
            g = opening[opened]
            opened += 1
            if not never[g]:
                heap[held] = g
                held += 1
                _up(heap, held - 1, order)
        off += change[p]
        while need[p] - off > limit_bytes and held:
            g = heap[0]
            held -= 1
            heap[0] = heap[held]
            _down(heap, held, order)
            if gaps[g, 2] > p:
                chosen[g] = True
                off += sizes[g]
                change[gaps[g, 2]] -= sizes[g]
        if need[p] - off > limit_bytes:
            return chosen, False
    return chosen, True


@njit(cache=True, nogil=True)
def _up(heap: Ints, i: int, order: Ints) -> None:
    while i and order[heap[(i - 1) // 2]] < order[heap[i]]:
        parent = (i - 1) // 2
        heap[i], heap[parent] = heap[parent], heap[i]
        i = parent


@njit(cache=True, nogil=True)
def _down(heap: Ints, held: int, order: Ints) -> None:
    i = 0
    while 2 * i + 1 < held:
        child = 2 * i + 1
        if child + 1 < held and order[heap[child + 1]] > order[heap[child]]:
            child += 1
        if order[heap[child]] <= order[heap[i]]:
            return
        heap[i], heap[child] = heap[child], heap[i]
        i = child


@njit(cache=True, nogil=True)
def transfers(
    v: VariantArrays, runs: Ints, need: Ints, gaps: Ints, chosen: Flags,
    limit_bytes: int, link: Link, rule: Rule,
) -> tuple[float, int, Ints]:  # fmt: skip
    """(time of the step in s, infinite if it does not fit; the most on the host, bytes; events).

    An event is a row (point, kind, tensor), in the order of the program: before the point's run
    kind 0 frees and kind 1 fetches; after it, 2 begins the copy to the host and 3 drops it.
    Chosen gaps that never free their tensor are left out, and the rest is placed anew.
    """
    chosen = chosen.copy()
    events = np.empty((0, 3), dtype=np.int64)
    while True:
        time_s, host_bytes, events, used = _one_pass(
            v, runs, need, gaps, chosen, limit_bytes, link, rule
        )
        if not np.isfinite(time_s) or used.sum() == chosen.sum():
            return time_s, host_bytes, events
        chosen = used


@njit(cache=True, nogil=True)
def _one_pass(
    v: VariantArrays, runs: Ints, need: Ints, gaps: Ints, chosen: Flags,
    limit_bytes: int, link: Link, rule: Rule,
) -> tuple[float, int, Ints, Flags]:  # fmt: skip
    points, count, tensors = need.size, gaps.shape[0], v.size_bytes.size
    events = np.empty((4 * count, 3), dtype=np.int64)
    noted = 0
    used = np.zeros(count, dtype=np.bool_)
    # Points at which something is to be done with a gap: a list for each point.
    starts = np.full(points + 1, -1)
    next_start = np.full(count, -1)
    copies = np.full(points + 1, -1)
    next_copy = np.full(count, -1)
    final = np.zeros(count, dtype=np.bool_)  # the last of its lifetime
    latest = np.full(tensors, -1)
    latest_made = np.full(tensors, -1)
    least = np.empty(points, dtype=np.int64)
    change = np.zeros(points + 1, dtype=np.int64)
    begin_s = np.zeros(points + 1)
    for p in range(points):
        begin_s[p + 1] = begin_s[p] + (v.time_s[runs[p]] if runs[p] >= 0 else 0.0)
    for g in range(count):
        if not chosen[g]:
            continue
        t, after, before, made = gaps[g]
        change[after + 1] += v.size_bytes[t]
        change[before] -= v.size_bytes[t]
        next_start[g], starts[after] = starts[after], g
        if latest_made[t] != made:
            point = made if rule.at_once else after
            next_copy[g], copies[point] = copies[point], g
        else:
            final[latest[t]] = False
        latest[t], latest_made[t], final[g] = g, made, True
    drops = np.full(points + 1, -1)
    next_drop = np.full(count, -1)
    for g in range(count):
        if final[g]:
            next_drop[g], drops[gaps[g, 2]] = drops[gaps[g, 2]], g
    off = 0
    for p in range(points):
        off += change[p]
        least[p] = need[p] - off
        if least[p] > limit_bytes:
            return np.inf, 0, events[:0], used
    open_gaps = np.empty(count, dtype=np.int64)
    away = np.empty(count, dtype=np.int64)
    fetching = np.empty(count, dtype=np.int64)
    blocked = np.full(count, -1)
    stored = np.zeros(tensors)
    arrival = np.zeros(tensors)
    opened = gone = 0
    now = out_free = in_free = 0.0
    off = host = most_host = 0
    for p in range(points):
        # Gaps that end here with their tensor still on the device need no transfer.
        kept = 0
        for n in range(opened):
            if gaps[open_gaps[n], 2] > p:
                open_gaps[kept] = open_gaps[n]
                kept += 1
        opened = kept
        fetched, coming, left = 0, 0, 0
        ready = max(0.0, in_free - now)
        early = True
        for n in range(gone):
            g = away[n]
            t, size = gaps[g, 0], v.size_bytes[gaps[g, 0]]
            before = gaps[g, 2]
            ready += link.latency_s + size * link.in_s_per_byte
            take = before == p
            if not take and early:
                take = blocked[g] < p and begin_s[before] - begin_s[p] <= rule.lead * ready
                if take and not rule.waits:
                    take = need[p] - off + fetched + size <= limit_bytes
                if take:
                    for q in range(before - 1, p - 1, -1):
                        if least[q] + size > limit_bytes:
                            blocked[g] = q
                            take = False
                            break
                if take:
                    for q in range(p, before):
                        least[q] += size
                else:
                    early = False
            if take:
                fetching[coming] = g
                coming += 1
                fetched += size
            else:
                away[left] = g
                left += 1
        gone = left
        while need[p] - off + fetched > limit_bytes:
            pick = -1
            for n in range(opened):
                g = open_gaps[n]
                if (
                    pick < 0
                    or stored[gaps[g, 0]] < stored[gaps[open_gaps[pick], 0]]
                    or (
                        stored[gaps[g, 0]] == stored[gaps[open_gaps[pick], 0]]
                        and gaps[g, 2] > gaps[open_gaps[pick], 2]
                    )
                ):
                    pick = n
            if pick < 0:
                return np.inf, 0, events[:0], used
            g = open_gaps[pick]
            opened -= 1
            open_gaps[pick] = open_gaps[opened]
            t = gaps[g, 0]
            now = max(now, stored[t], arrival[t])
            off += v.size_bytes[t]
            used[g] = True
            events[noted, 0], events[noted, 1], events[noted, 2] = p, 0, t
            noted += 1
            n = gone
            while n and gaps[away[n - 1], 2] > gaps[g, 2]:
                away[n] = away[n - 1]
                n -= 1
            away[n] = g
            gone += 1
        for n in range(coming):
            t = gaps[fetching[n], 0]
            off -= v.size_bytes[t]
            in_free = max(now, in_free) + link.latency_s + v.size_bytes[t] * link.in_s_per_byte
            arrival[t] = in_free
            if not link.duplex:
                out_free = in_free
            events[noted, 0], events[noted, 1], events[noted, 2] = p, 1, t
            noted += 1
        run = runs[p]
        if run >= 0:
            for k in range(v.reads_at[run], v.reads_at[run + 1]):
                now = max(now, arrival[v.reads[k]])
            now += v.time_s[run]
        g = drops[p]
        while g >= 0:
            host -= v.size_bytes[gaps[g, 0]]
            events[noted, 0], events[noted, 1], events[noted, 2] = p, 3, gaps[g, 0]
            noted += 1
            g = next_drop[g]
        g = copies[p]
        while g >= 0:
            t = gaps[g, 0]
            out_free = max(now, out_free) + link.latency_s + v.size_bytes[t] * link.out_s_per_byte
            stored[t] = out_free
            arrival[t] = 0.0
            if not link.duplex:
                in_free = out_free
            host += v.size_bytes[t]
            most_host = max(most_host, host)
            events[noted, 0], events[noted, 1], events[noted, 2] = p, 2, t
            noted += 1
            g = next_copy[g]
        g = starts[p]
        while g >= 0:
            open_gaps[opened] = g
            opened += 1
            g = next_start[g]
    return max(now, out_free, in_free), most_host, events[:noted], used
