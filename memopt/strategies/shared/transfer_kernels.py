"""Compiled: which tensors of given runs move to the host, and when.

`chosen_gaps` evicts, wherever memory is short, the tensor needed again last (Belady). `transfers`
keeps the time of the replay while it places copies, frees and fetches:

- a copy to the host starts when its tensor is made (or when its first gap begins);
- a device copy is freed where a time point needs the room, the copy that ends first first;
- a fetch comes as early as all points up to its reader have room for it, in the order of readers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solvers.compiled import compiled_inline, compiled_unlocked
from memopt.strategies.shared.run_table import Flags, Floats, Ints, VariantArrays
from memopt.strategies.shared.timing import Link, Timing


@compiled_unlocked
def chosen_gaps(
    need: Ints, gaps: Ints, sizes: Ints, limit_bytes: int, never: Flags, order: Ints
) -> tuple[Flags, bool]:
    """Choose gaps so that no time point needs more than the limit; return (which, whether they
    suffice).

    Args:
        need: bytes of each time point.
        gaps: as `memory_of` gives them.
        sizes: bytes of each gap.
        limit_bytes: total.
        never: gaps that must not be used.
        order: of the gaps open at a point, those with the largest value here go first.
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


@compiled_unlocked
def _up(heap: Ints, i: int, order: Ints) -> None:
    while i and order[heap[(i - 1) // 2]] < order[heap[i]]:
        parent = (i - 1) // 2
        heap[i], heap[parent] = heap[parent], heap[i]
        i = parent


@compiled_unlocked
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


NOW, OUT_FREE, IN_FREE = 0, 1, 2
"""Indices of `Pass.clock`: when the compute stream, and each way of the link, is free."""
OPEN, AWAY, COMING, FETCHED, OFF, HOST, MOST_HOST, NOTED = range(8)
"""Indices of `Pass.figures`: lengths of the lists `open`, `away` and `coming`, bytes of `coming`,
bytes off the device, bytes on the host, their maximum, and the number of events."""
ALLOWANCE = 1.01
FREE, FETCH, COPY, DROP = range(4)
"""Kinds of events."""


class Pass(NamedTuple):
    """The state of one pass over the time points; lists of gaps are chained by index, -1 ends one.

    Attributes:
        starts, next_start: gaps by the point that they begin after.
        copies, next_copy: one gap of each lifetime, by the point after which its copy starts.
        drops, next_drop: the last gap of each lifetime, by its reader's point.
        least: bytes of each point while all gaps are used to the full, less what comes early.
        begin_s: start of each point where nothing waits.
        open: gaps that have begun, their tensor still on the device.
        away: gaps whose tensor is on the host only, in the order of their readers.
        coming: gaps whose tensor is fetched at this point.
        blocked: until which point a fetch has no room.
        stored, arrival: of each tensor, when its copy to the host and the one back end.
        used: gaps that have freed their tensor.
        events: see `transfers`.
        clock, figures: see the constants.
    """

    starts: Ints
    next_start: Ints
    copies: Ints
    next_copy: Ints
    drops: Ints
    next_drop: Ints
    least: Ints
    begin_s: Floats
    open: Ints
    away: Ints
    coming: Ints
    blocked: Ints
    stored: Floats
    arrival: Floats
    used: Flags
    events: Ints
    clock: Floats
    figures: Ints


@compiled_unlocked
def transfers(
    v: VariantArrays, runs: Ints, need: Ints, gaps: Ints, chosen: Flags,
    limit_bytes: int, link: Link, timing: Timing, most_s: float,
) -> tuple[float, int, Ints, Flags]:  # fmt: skip
    """Place the transfers of chosen gaps; return (time of the step in s, infinite if it does not
    fit; most bytes on the host; events; gaps used).

    An event is a row (point, kind, tensor), in the order of the program: before the point's run
    kind 0 frees and kind 1 fetches; after it, 2 begins the copy to the host and 3 drops it. Chosen
    gaps that never free their tensor are left out, and the rest is placed anew. A step that proves
    on the way to take `most_s` or longer does not fit, either: at first with some allowance, as the
    copies that are left out may have been in the way.
    """
    allowed_s = ALLOWANCE * most_s
    reads_at, reads, seconds = v.reads_at, v.reads, v.time_s
    while True:
        at = _begun(v, runs, need, gaps, chosen, timing.at_once)
        if at.least.max() > limit_bytes:
            return np.inf, 0, at.events[:0], at.used
        # Most points neither free nor fetch: reading a field of `at` takes longer than they do.
        count, clock, away, blocked, arrival = at.figures, at.clock, at.away, at.blocked, at.arrival
        begin_s, drops, copies, starts = at.begin_s, at.drops, at.copies, at.starts
        for p in range(need.size):
            count[COMING] = count[FETCHED] = 0
            if count[AWAY] and (blocked[away[0]] < p or gaps[away[0], 2] == p):
                _choose_fetches(at, v, need, gaps, p, limit_bytes, link, timing)
            if need[p] - count[OFF] + count[FETCHED] > limit_bytes and not _release(
                at, v, need, gaps, p, limit_bytes
            ):
                return np.inf, 0, at.events[:0], at.used
            if count[COMING]:
                _fetch(at, v, gaps, p, link)
            run = runs[p]
            if run >= 0:
                for k in range(reads_at[run], reads_at[run + 1]):
                    clock[NOW] = max(clock[NOW], arrival[reads[k]])
                clock[NOW] += seconds[run]
            if max(drops[p], copies[p], starts[p]) >= 0:
                _after(at, v, gaps, p, link)
            if clock[NOW] + begin_s[-1] - begin_s[p + 1] >= allowed_s:
                return np.inf, 0, at.events[:0], at.used
        if at.used.sum() == chosen.sum():
            events = at.events[: at.figures[NOTED]]
            return at.clock.max(), at.figures[MOST_HOST], events, at.used
        chosen, allowed_s = at.used, most_s


@compiled_unlocked
def _begun(
    v: VariantArrays, runs: Ints, need: Ints, gaps: Ints, chosen: Flags, at_once: bool
) -> Pass:
    points, count, tensors = need.size, gaps.shape[0], v.size_bytes.size
    # Rows: by beginning, by copy, by drop.
    heads, following = np.full((3, points + 1), -1), np.full((3, count), -1)
    last, made_at = np.full(tensors, -1), np.full(tensors, -1)
    final = np.zeros(count, dtype=np.bool_)
    change = np.zeros(points + 1, dtype=np.int64)
    for g in range(count):
        if not chosen[g]:
            continue
        t, after, before, made = gaps[g]
        change[after + 1] += v.size_bytes[t]
        change[before] -= v.size_bytes[t]
        following[0, g], heads[0, after] = heads[0, after], g
        if made_at[t] != made:
            point = made if at_once else after
            following[1, g], heads[1, point] = heads[1, point], g
        else:
            final[last[t]] = False
        last[t], made_at[t], final[g] = g, made, True
    for g in range(count):
        if final[g]:
            following[2, g], heads[2, gaps[g, 2]] = heads[2, gaps[g, 2]], g
    begin_s = np.zeros(points + 1)
    for p in range(points):
        begin_s[p + 1] = begin_s[p] + (v.time_s[runs[p]] if runs[p] >= 0 else 0.0)
    return Pass(
        heads[0], following[0], heads[1], following[1], heads[2], following[2],
        need - np.cumsum(change[:-1]), begin_s,
        np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.int64),
        np.full(count, -1), np.zeros(tensors), np.zeros(tensors), np.zeros(count, np.bool_),
        np.empty((4 * count, 3), np.int64), np.zeros(3), np.zeros(8, np.int64),
    )  # fmt: skip


@compiled_inline
def _note(at: Pass, point: int, kind: int, tensor: int) -> None:
    row = at.events[at.figures[NOTED]]
    row[0], row[1], row[2] = point, kind, tensor
    at.figures[NOTED] += 1


@compiled_inline
def _choose_fetches(
    at: Pass, v: VariantArrays, need: Ints, gaps: Ints, p: int,
    limit_bytes: int, link: Link, timing: Timing,
) -> None:  # fmt: skip
    """Choose the tensors to fetch at this point: all that it reads itself; then those that later
    points read, in order, as long as the next one has room until it is read."""
    count = at.figures
    away, count[AWAY] = count[AWAY], 0
    ready_s = max(0.0, at.clock[IN_FREE] - at.clock[NOW])
    early = True
    for n in range(away):
        g = at.away[n]
        before, size = gaps[g, 2], v.size_bytes[gaps[g, 0]]
        take = before == p
        if not take and not early:
            # The list is in the order of readers: nothing after this one is read here.
            if count[AWAY] < n:
                at.away[count[AWAY] : count[AWAY] + away - n] = at.away[n:away].copy()
            count[AWAY] += away - n
            return
        ready_s += link.latency_s + size / link.in_bytes_per_s
        if not take:
            take = at.blocked[g] < p and at.begin_s[before] - at.begin_s[p] <= timing.lead * ready_s
            if take and not timing.waits:
                take = need[p] - count[OFF] + count[FETCHED] + size <= limit_bytes
            take = take and _reserved(at, g, p, before, size, limit_bytes)
            early = take
        if take:
            at.coming[count[COMING]] = g
            count[COMING] += 1
            count[FETCHED] += size
        else:
            at.away[count[AWAY]] = g
            count[AWAY] += 1


@compiled_inline
def _reserved(at: Pass, g: int, p: int, before: int, size: int, limit_bytes: int) -> bool:
    """Reserve room for a tensor from p until its reader; tell whether there is enough."""
    least = at.least
    for q in range(before - 1, p - 1, -1):
        if least[q] + size > limit_bytes:
            at.blocked[g] = q
            return False
    least[p:before] += size
    return True


@compiled_inline
def _release(at: Pass, v: VariantArrays, need: Ints, gaps: Ints, p: int, limit_bytes: int) -> bool:
    """Free enough room for this point; tell whether that succeeded."""
    count = at.figures
    opened, count[OPEN] = count[OPEN], 0
    for n in range(opened):
        # Gaps that have ended with their tensor still on the device need no transfer.
        if gaps[at.open[n], 2] > p:
            at.open[count[OPEN]] = at.open[n]
            count[OPEN] += 1
    while need[p] - count[OFF] + count[FETCHED] > limit_bytes:
        pick = _stored_first(at, gaps)
        if pick < 0:
            return False
        g = at.open[pick]
        count[OPEN] -= 1
        at.open[pick] = at.open[count[OPEN]]
        t = gaps[g, 0]
        at.clock[NOW] = max(at.clock[NOW], at.stored[t], at.arrival[t])
        count[OFF] += v.size_bytes[t]
        at.used[g] = True
        _note(at, p, FREE, t)
        n = count[AWAY]
        while n and gaps[at.away[n - 1], 2] > gaps[g, 2]:
            at.away[n] = at.away[n - 1]
            n -= 1
        at.away[n] = g
        count[AWAY] += 1
    return True


@compiled_inline
def _stored_first(at: Pass, gaps: Ints) -> int:
    """Return the place in `open` of the gap whose copy ends first, then the longest; -1 if none."""
    pick, least, last = -1, np.inf, -1
    begun, stored = at.open, at.stored
    for n in range(at.figures[OPEN]):
        g = begun[n]
        end, before = stored[gaps[g, 0]], gaps[g, 2]
        if end < least or (end == least and before > last):
            pick, least, last = n, end, before
    return pick


@compiled_inline
def _fetch(at: Pass, v: VariantArrays, gaps: Ints, p: int, link: Link) -> None:
    clock = at.clock
    for n in range(at.figures[COMING]):
        t = gaps[at.coming[n], 0]
        at.figures[OFF] -= v.size_bytes[t]
        seconds = link.latency_s + v.size_bytes[t] / link.in_bytes_per_s
        clock[IN_FREE] = max(clock[NOW], clock[IN_FREE]) + seconds
        at.arrival[t] = clock[IN_FREE]
        if not link.duplex:
            clock[OUT_FREE] = clock[IN_FREE]
        _note(at, p, FETCH, t)


@compiled_inline
def _after(at: Pass, v: VariantArrays, gaps: Ints, p: int, link: Link) -> None:
    """Drop host copies that are not needed after a point, begin copies and gaps."""
    clock, count = at.clock, at.figures
    g = at.drops[p]
    while g >= 0:
        count[HOST] -= v.size_bytes[gaps[g, 0]]
        _note(at, p, DROP, gaps[g, 0])
        g = at.next_drop[g]
    g = at.copies[p]
    while g >= 0:
        t = gaps[g, 0]
        seconds = link.latency_s + v.size_bytes[t] / link.out_bytes_per_s
        clock[OUT_FREE] = max(clock[NOW], clock[OUT_FREE]) + seconds
        at.stored[t], at.arrival[t] = clock[OUT_FREE], 0.0
        if not link.duplex:
            clock[IN_FREE] = clock[OUT_FREE]
        count[HOST] += v.size_bytes[t]
        count[MOST_HOST] = max(count[MOST_HOST], count[HOST])
        _note(at, p, COPY, t)
        g = at.next_copy[g]
    g = at.starts[p]
    while g >= 0:
        at.open[count[OPEN]] = g
        count[OPEN] += 1
        g = at.next_start[g]
