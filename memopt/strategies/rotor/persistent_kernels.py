"""Compiled loops of the persistent program (Rotor Theorem 4.8) over slots of memory.

A row (s, t) is C(s, t, m) for m from low[s, t], the least memory at which the subchain can be
processed, to high[s, t], beyond which it is constant. Rows lie one after the other in one array:
what would be infinite or constant costs nothing. `low` and `high` come from recurrences without
m. Memory may be negative, because overheads may be.

`split_saving` is the one difference between the persistent program (True) and revolve (False):
whether F_all^s may be separated from B^s.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit, prange

from memopt.strategies.rotor.codes import (
    BACKWARD,
    CODE_BASE,
    FORWARD_ALL,
    FORWARD_CHECKPOINT,
    FORWARD_NO_SAVE,
)
from memopt.strategies.rotor.model import Float64Array, Int64Array

UNREACHABLE = np.int64(1) << np.int64(61)


class Rows(NamedTuple):
    """The table: values of all rows, where each row (s, t) starts, and its range of slots."""

    values: Float64Array
    offset: Int64Array
    low: Int64Array
    high: Int64Array


@njit(cache=True)
def ceil_div(size, slot):
    """size / slot, rounded up, for negative sizes too."""
    return -((-size) // slot)


@njit(cache=True)
def saving_need(c, s, t, slot):
    """Memory for F_all^s while δ^t is live, and for B^s: m_all of Rotor §4.4."""
    return max(ceil_div(c.gradient[t] + c.saving[s], slot), ceil_div(c.reverse[s], slot))


@njit(cache=True)
def memory_bounds(c, slot, output, saved, split_saving):
    """`low` and `high` of every row, in slots of `slot` bytes."""
    n = c.length
    low = np.full((n + 2, n + 2), UNREACHABLE, np.int64)
    high = np.full((n + 2, n + 2), UNREACHABLE, np.int64)
    for s in range(n, 0, -1):
        for t in range(s, n + 1):
            own = saving_need(c, s, t, slot)
            if s == t:
                low[s, t] = own
                high[s, t] = own
                continue
            if split_saving:
                best = max(own, saved[s] + low[s + 1, t])
                high[s, t] = max(own, saved[s] + high[s + 1, t])
            else:
                best = UNREACHABLE
                need = ceil_div(c.gradient[t] + c.first[s], slot)
                high[s, t] = max(need, output[s] + high[s + 1, t], high[s, s])
            need_bytes = c.first[s]
            for split in range(s + 1, t + 1):
                if split > s + 1:
                    need_bytes = max(need_bytes, c.running[split - 1])
                need = ceil_div(c.gradient[t] + need_bytes, slot)
                if need >= best:
                    break
                value = max(need, output[split - 1] + low[split, t], low[s, split - 1])
                best = min(best, value)
            low[s, t] = best
    return low, high


@njit(cache=True)
def row_offsets(n, low, high):
    """Where each row starts in the one array, and the array's length (past 2^31 if need be)."""
    offset = np.zeros((n + 2, n + 2), np.int64)
    total = np.int64(0)
    for s in range(n, 0, -1):
        for t in range(s, n + 1):
            offset[s, t] = total
            total += high[s, t] - low[s, t] + 1
    return offset, total


@njit(cache=True)
def add_split(out, start, left, left_shift, right, right_shift, extra):
    """out[i] = min(out[i], left[i - left_shift] + right[i - right_shift] + extra), i ≥ start.

    Beyond the end of `left` or `right` its last value holds. Beyond the ends of both only one i
    is written: the running minimum that follows does the rest.
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


@njit(cache=True)
def row(table, s, t):
    """The values of row (s, t), a view."""
    start = table.offset[s, t]
    return table.values[start : start + table.high[s, t] - table.low[s, t] + 1]


@njit(cache=True)
def fill_row(c, table, s, t, split_saving):
    """One row of Theorem 4.8: C1 (keep a^{s-1}, next a^{split-1}) and C2 (F_all^s)."""
    base = table.low[s, t]
    out = row(table, s, t)
    own = c.forward_s[s] + c.backward_s[s]
    if s == t:
        out[0] = own
        return
    out[:] = np.inf
    if split_saving:
        right = row(table, s + 1, t)
        shift = table.low[s + 1, t] + c.saved[s] - base
        begin = max(saving_need(c, s, t, c.slot) - base, shift)
        for i in range(begin, out.size):
            out[i] = own + right[min(i - shift, right.size - 1)]
    need_bytes = c.first[s]
    for split in range(s + 1, t + 1):
        if split > s + 1:
            need_bytes = max(need_bytes, c.running[split - 1])
        need = ceil_div(c.gradient[t] + need_bytes, c.slot) - base
        if need >= out.size:
            break
        left_shift = table.low[s, split - 1] - base
        right_shift = table.low[split, t] + c.output[split - 1] - base
        start = max(need, left_shift, right_shift)
        if start < out.size:
            extra = c.forward_sum_s[split - 1] - c.forward_sum_s[s - 1]
            left = row(table, s, split - 1)
            right = row(table, split, t)
            add_split(out, start, left, left_shift, right, right_shift, extra)
    for i in range(1, out.size):
        if out[i] > out[i - 1]:
            out[i] = out[i - 1]


@njit(cache=True, parallel=True)
def fill_diagonals(c, table, first_distance, last_distance, split_saving):
    """Every row with first_distance ≤ t - s < last_distance; the shorter ones are filled."""
    for distance in range(first_distance, last_distance):
        for s in prange(1, c.length + 1 - distance):
            fill_row(c, table, s, s + distance, split_saving)


@njit(cache=True)
def estimate(c, table, s, t, memory):
    """(unknown, C(s, t, m)) for a memory in bytes; below the row's slots, its first value."""
    m = memory // c.slot - table.low[s, t]
    start = table.offset[s, t]
    if m < 0:
        return 1, table.values[start]
    return 0, table.values[start + min(m, table.high[s, t] - table.low[s, t])]


@njit(cache=True)
def choose(c, table, floor, s, t, memory, split_saving):
    """The split to take at (s, t) with `memory` bytes: 0 for F_all^s, else the next stage.

    Every choice that fits in exact bytes is weighed by the table's value for what it leaves:
    with whole slots left this is Algorithm 4, and the time is at most the table's; where the
    slots are too coarse to see a choice, `floor` (exact least memory) still does. Returns -1
    if nothing fits.
    """
    best = -1
    best_unknown = 3
    best_value = np.inf
    own = c.forward_s[s] + c.backward_s[s]
    if memory >= saving_need(c, s, t, 1):
        if s == t:
            return 0
        left = memory - c.saved_bytes[s]
        if split_saving and left >= floor[s + 1, t]:
            best_unknown, value = estimate(c, table, s + 1, t, left)
            best_value = own + value
            best = 0
            if memory // c.slot >= table.high[s, t]:
                return best
    need = c.first[s]
    for split in range(s + 1, t + 1):
        if split > s + 1:
            need = max(need, c.running[split - 1])
        if memory < c.gradient[t] + need:
            break
        right_memory = memory - c.output_bytes[split - 1]
        if memory < floor[s, split - 1] or right_memory < floor[split, t]:
            continue
        left_unknown, left_value = estimate(c, table, s, split - 1, memory)
        right_unknown, right_value = estimate(c, table, split, t, right_memory)
        unknown = left_unknown + right_unknown
        extra = c.forward_sum_s[split - 1] - c.forward_sum_s[s - 1]
        value = left_value + right_value + extra
        if unknown < best_unknown or (unknown == best_unknown and value < best_value):
            best, best_unknown, best_value = split, unknown, value
    return best


@njit(cache=True)
def trace(c, table, floor, memory, split_saving):
    """The schedule for `memory` bytes (Algorithm 4), as codes; empty if none fits."""
    n = c.length
    codes = np.empty(16 * n + 64, np.int32)
    count = 0
    stack = np.empty((4 * n + 16, 3), np.int64)
    depth = 1
    stack[0, 0], stack[0, 1], stack[0, 2] = 1, n, memory
    while depth > 0:
        depth -= 1
        s, t, m = stack[depth, 0], stack[depth, 1], stack[depth, 2]
        if count + n + 2 > codes.size:
            larger = np.empty(2 * codes.size, np.int32)
            larger[:count] = codes[:count]
            codes = larger
        if s < 0:
            codes[count] = CODE_BASE * t + BACKWARD
            count += 1
            continue
        split = choose(c, table, floor, s, t, m, split_saving)
        if split < 0:
            return codes[:0]
        if split == 0:
            codes[count] = CODE_BASE * s + FORWARD_ALL
            count += 1
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = -1, s, 0
            depth += 1
            if s < t:
                stack[depth, 0], stack[depth, 1] = s + 1, t
                stack[depth, 2] = m - c.saved_bytes[s]
                depth += 1
            continue
        codes[count] = CODE_BASE * s + FORWARD_CHECKPOINT
        count += 1
        for stage in range(s + 1, split):
            codes[count] = CODE_BASE * stage + FORWARD_NO_SAVE
            count += 1
        stack[depth, 0], stack[depth, 1], stack[depth, 2] = s, split - 1, m
        stack[depth + 1, 0], stack[depth + 1, 1] = split, t
        stack[depth + 1, 2] = m - c.output_bytes[split - 1]
        depth += 2
    return codes[:count]
