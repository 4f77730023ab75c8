"""Compiled loops of the persistent program (Rotor Theorem 4.8) over slots of memory.

A row (s, t) is C(s, t, m) for m from low[s, t], the least memory at which the subchain can be
processed, to high[s, t], beyond which it is constant. Rows lie one after the other in one array:
infinite and constant parts are not stored. `low` and `high` come from recurrences without m. Memory
may be negative, because overheads may be.

`split_saving` is the one difference between the persistent program (True) and revolve (False):
whether F_all^s may be separated from B^s. `ChainArrays.options` is the one between a chain and
stages with several ways to be saved: C2 is their minimum.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solvers.compiled import compiled, compiled_unlocked
from memopt.solvers.running import Deadline
from memopt.strategies.rotor.model import ChainArrays, Float64Array, Int64Array
from memopt.strategies.rotor.steps_kernels import (
    FAR,
    ROOM,
    Steps,
    buffer,
    constant,
    copy,
    improve,
    part,
    with_room,
)

BOUNDS_AT_ONCE = 10**7
"""Cubes of stages whose bounds are found between two looks at the clock."""


class Rows(NamedTuple):
    """The table C, by slots or by steps.

    Attributes:
        values: the values of all rows.
        offset: where each row (s, t) starts.
        low, high: the range of slots of each row; constant beyond `high`.
        at: the memory of each step, for tables of steps; empty for tables of slots.
        steps: the number of steps of each row, for tables of steps.
    """

    values: Float64Array
    offset: Int64Array
    low: Int64Array
    high: Int64Array
    at: Int64Array
    steps: Int64Array


@compiled
def ceil_div(size: int, slot: int) -> int:
    """Return size / slot, rounded up, for negative sizes too."""
    return -((-size) // slot)


@compiled
def saving_need(c: ChainArrays, s: int, o: int, t: int, slot: int) -> int:
    """Return memory for F_all^s by option o while δ^t is live, and for B^s: m_all of Rotor §4.4."""
    saving, reverse = c.options.saving[s, o], c.options.reverse[s, o]
    return max(ceil_div(c.gradient[t] + saving, slot), ceil_div(reverse, slot))


def memory_bounds(
    c: ChainArrays, slot: int, split_saving: bool, deadline: Deadline | None = None
) -> tuple[Int64Array, Int64Array]:
    """Return `low` and `high` of every row, in the chain's slots or (slot = 1) in bytes; raises
    Stopped at the deadline."""
    n = c.length
    low = np.full((n + 2, n + 2), FAR, np.int64)
    high, columns = low.copy(), low.copy()
    each = max(1, BOUNDS_AT_ONCE // n**2)
    for last in range(n, 0, -each):
        fill_bounds(c, slot, split_saving, max(1, last - each + 1), last, low, high, columns)
        if deadline is not None and last > each:
            deadline.check(0.0, "rotor: least memory")
    return low, high


@compiled
def fill_bounds(
    c: ChainArrays,
    slot: int,
    split_saving: bool,
    first: int,
    last: int,
    low: Int64Array,
    high: Int64Array,
    columns: Int64Array,
) -> None:
    """Fill the bounds of the rows (s, t) with first ≤ s ≤ last, those of later stages being there;
    `columns[t, s]` is low[s, t] and the output before s, in the order in which it is read."""
    n = c.length
    in_bytes = slot == 1
    output = c.output_bytes if in_bytes else c.output
    saved = c.options.saved_bytes if in_bytes else c.options.saved
    for s in range(last, first - 1, -1):
        rises, needs = forward_needs(c, s)
        for t in range(s, n + 1):
            best, most = FAR, -FAR
            for o in range(c.options.number[s]):
                own = saving_need(c, s, o, t, slot)
                if s == t:
                    best, most = min(best, own), max(most, own)
                elif split_saving:
                    best = min(best, max(own, saved[s, o] + low[s + 1, t]))
                    most = max(most, own, saved[s, o] + high[s + 1, t])
            low[s, t], high[s, t], columns[t, s] = best, most, output[s - 1] + best
            if s == t:
                continue
            if not split_saving:
                need = ceil_div(c.gradient[t] + c.first[s], slot)
                high[s, t] = max(need, output[s] + high[s + 1, t], high[s, s])
            for i in range(needs.size):
                need = ceil_div(c.gradient[t] + needs[i], slot)
                if need >= best or rises[i] > t:
                    break
                end = min(rises[i + 1], t + 1)
                least = least_of_larger(columns[t, rises[i] : end], low[s, rises[i] - 1 : end - 1])
                best = min(best, max(need, least))
            low[s, t], columns[t, s] = best, output[s - 1] + best


@compiled
def forward_needs(c: ChainArrays, s: int) -> tuple[Int64Array, Int64Array]:
    """Return the splits from which a forward from s on needs more bytes than for earlier ones, and
    a split beyond all; the bytes."""
    rises, needs = [s + 1], [c.first[s]]
    for split in range(s + 2, c.length + 1):
        if c.running[split - 1] > needs[-1]:
            rises.append(split)
            needs.append(c.running[split - 1])
    rises.append(c.length + 2)
    return np.array(rises), np.array(needs)


@compiled
def least_of_larger(first: Int64Array, second: Int64Array) -> int:
    """Return the least of the larger of both, entry by entry."""
    least = FAR
    for i in range(first.size):
        larger = max(first[i], second[i])
        least = min(least, larger)
    return least


@compiled
def row_offsets(n: int, low: Int64Array, high: Int64Array) -> tuple[Int64Array, int]:
    """Return the start of each row in the one array, and the array's length (even past 2^31)."""
    offset = np.zeros_like(low)
    total = 0
    for s in range(n, 0, -1):
        for t in range(s, n + 1):
            offset[s, t] = total
            total += high[s, t] - low[s, t] + 1
    return offset, total


@compiled
def add_split(
    out: Float64Array,
    start: int,
    left: Float64Array,
    left_shift: int,
    right: Float64Array,
    right_shift: int,
    extra: float,
) -> None:
    """Set out[i] = min(out[i], left[i - left_shift] + right[i - right_shift] + extra), i ≥ start.

    Beyond the end of `left` or `right` its last value holds. Beyond the ends of both only one i is
    written: the running minimum that follows does the rest.
    """
    stop = out.size
    left_end = left.size + left_shift
    right_end = right.size + right_shift
    count = min(stop, left_end, right_end) - start
    if count > 0:
        a = left[start - left_shift : start - left_shift + count]
        b = right[start - right_shift : start - right_shift + count]
        o = out[start : start + count]
        for i in range(count):
            value = a[i] + b[i] + extra
            o[i] = value if value < o[i] else o[i]
        start += count
    if start >= stop:
        return
    if start < left_end:
        constant = right[right.size - 1]
        count = min(stop, left_end) - start
        a = left[start - left_shift : start - left_shift + count]
        o = out[start : start + count]
        for i in range(count):
            value = a[i] + constant + extra
            o[i] = value if value < o[i] else o[i]
    elif start < right_end:
        constant = left[left.size - 1]
        count = min(stop, right_end) - start
        b = right[start - right_shift : start - right_shift + count]
        o = out[start : start + count]
        for i in range(count):
            value = constant + b[i] + extra
            o[i] = value if value < o[i] else o[i]
    else:
        value = left[left.size - 1] + right[right.size - 1] + extra
        out[start] = min(out[start], value)


@compiled
def row(table: Rows, s: int, t: int) -> Float64Array:
    """Return the values of row (s, t), a view."""
    start = table.offset[s, t]
    return table.values[start : start + table.high[s, t] - table.low[s, t] + 1]


@compiled
def need_table(c: ChainArrays) -> Int64Array:
    """Return need[s, split]: bytes of F_ck^s F_∅^{s+1} ... F_∅^{split-1} besides a^{s-1}, ω̃_δ."""
    n = c.length
    need = np.zeros((n + 2, n + 2), np.int64)
    for s in range(1, n + 1):
        need[s, s + 1] = c.first[s]
        for split in range(s + 2, n + 1):
            need[s, split] = max(need[s, split - 1], c.running[split - 1])
    return need


@compiled
def try_splits(
    c: ChainArrays, table: Rows, need: Int64Array, s: int, t: int, begin: int, end: int
) -> None:
    """Try C1 of Theorem 4.8 for the splits begin ≤ s' < end: keep a^{s-1}, next a^{s'-1}."""
    base = table.low[s, t]
    out = row(table, s, t)
    for split in range(begin, end):
        needed = ceil_div(c.gradient[t] + need[s, split], c.slot) - base
        if needed >= out.size:
            break
        left_shift = table.low[s, split - 1] - base
        right_shift = table.low[split, t] + c.output[split - 1] - base
        start = max(needed, left_shift, right_shift)
        if start < out.size:
            extra = c.forward_sum_s[split - 1] - c.forward_sum_s[s - 1]
            left = row(table, s, split - 1)
            right = row(table, split, t)
            add_split(out, start, left, left_shift, right, right_shift, extra)


@compiled
def save_all(c: ChainArrays, table: Rows, s: int, t: int) -> None:
    """Try C2 of Theorem 4.8: F_all^s first, B^s last, by the best option."""
    out = row(table, s, t)
    base = table.low[s, t]
    for o in range(c.options.number[s]):
        own = c.options.own_s[s, o]
        begin = saving_need(c, s, o, t, c.slot) - base
        if s == t:
            for i in range(begin, out.size):
                out[i] = min(out[i], own)
            continue
        right = row(table, s + 1, t)
        shift = table.low[s + 1, t] + c.options.saved[s, o] - base
        for i in range(max(begin, shift), out.size):
            out[i] = min(out[i], own + right[min(i - shift, right.size - 1)])


@compiled_unlocked
def fill_block(
    c: ChainArrays, table: Rows, need: Int64Array, s0: int, t0: int, width: int, split_saving: bool
) -> None:
    """Fill the rows (s, t) with s0 ≤ s < s0 + width and t0 ≤ t < t0 + width, t ≥ s."""
    s1 = min(s0 + width, c.length + 1)
    t1 = min(t0 + width, c.length + 1)
    for s in range(s0, s1):
        for t in range(max(s, t0), t1):
            row(table, s, t)[:] = np.inf
    # Splits that need no row of this block, a few at a time: their rows stay in the cache.
    for begin in range(s1, t0 + 1, width):
        end = min(begin + width, t0 + 1)
        for s in range(s0, s1):
            for t in range(t0, t1):
                try_splits(c, table, need, s, t, begin, end)
    for s in range(s1 - 1, s0 - 1, -1):
        for t in range(max(s, t0), t1):
            out = row(table, s, t)
            if split_saving or s == t:
                save_all(c, table, s, t)
            try_splits(c, table, need, s, t, s + 1, min(s1, t + 1))
            try_splits(c, table, need, s, t, max(s1, t0 + 1), t + 1)
            for i in range(1, out.size):
                if out[i] > out[i - 1]:
                    out[i] = out[i - 1]


@compiled_unlocked
def fill_stage(
    c: ChainArrays,
    pool: Steps,
    offset: Int64Array,
    count: Int64Array,
    used: int,
    s: int,
    split_saving: bool,
    most: int,
    tolerance: float,
) -> tuple[Steps, int]:
    """Append the rows (s, s) ... (s, n) to the pool, which has those of the stages above s.

    Returns the pool, which may have moved, and the steps used: -1 if they would pass `most`.
    """
    now, other = buffer(ROOM), buffer(ROOM)
    zero = constant(0.0)
    for t in range(s, c.length + 1):
        k = 0
        for o in range(c.options.number[s] if split_saving or s == t else 0):
            need, own = saving_need(c, s, o, t, 1), c.options.own_s[s, o]
            rest, shift = zero, -FAR
            if s < t:
                rest = part(pool, offset[s + 1, t], count[s + 1, t])
                shift = c.options.saved[s, o]
            other = with_room(other, 0, k + rest.at.size + 1)
            known = part(now, 0, k)
            m = improve(other, known, rest, shift, zero, -FAR, need, own, tolerance)
            if m > 0:
                now, other, k = other, now, m
        need = c.first[s]
        for split in range(s + 1, t + 1):
            if split > s + 1:
                need = max(need, c.running[split - 1])
            left = part(pool, offset[s, split - 1], count[s, split - 1])
            right = part(pool, offset[split, t], count[split, t])
            other = with_room(other, 0, k + left.at.size + right.at.size)
            start = c.gradient[t] + need
            extra = c.forward_sum_s[split - 1] - c.forward_sum_s[s - 1]
            shift = c.output[split - 1]
            m = improve(other, part(now, 0, k), left, 0, right, shift, start, extra, tolerance)
            if m > 0:
                now, other, k = other, now, m
        if used + k > most:
            return pool, -1
        pool = with_room(pool, used, k)
        copy(now, pool, used, k)
        offset[s, t] = used
        count[s, t] = k
        used += k
    return pool, used
