"""Non-increasing step functions of memory, the tables of the exact mode.

A function is two arrays: `at`, increasing memory, and `value`, strictly decreasing time; below
at[0] it is infinite. Values that differ by less than `tolerance` are sums of the same times in
another order and make no step.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solvers.compiled import compiled
from memopt.strategies.rotor.model import Float64Array, Int64Array

FAR = 2**61
ROOM = 1
"""Steps that a new buffer has room for; buffers grow."""


class Steps(NamedTuple):
    """A step function, or a buffer for one."""

    at: Int64Array
    value: Float64Array


@compiled
def index_at(at: Int64Array, memory: int) -> int:
    """Return the index of the last step at or below `memory`; -1 below the first."""
    return int(np.searchsorted(at, memory, side="right")) - 1


@compiled
def evaluate(f: Steps, memory: int) -> float:
    """Return f(memory)."""
    index = index_at(f.at, memory)
    return f.value[index] if index >= 0 else np.inf


@compiled
def improve(
    out: Steps,
    current: Steps,
    a: Steps,
    a_shift: int,
    b: Steps,
    b_shift: int,
    start: int,
    extra: float,
    tolerance: float,
) -> int:
    """Set out(m) = min(current(m), a(m - a_shift) + b(m - b_shift) + extra for m ≥ start).

    Returns the number of steps written, 0 if `current` is already as good everywhere; `out` must
    hold the steps of all three functions.
    """
    if a.at.size == 0 or b.at.size == 0:
        return 0
    start = max(start, a.at[0] + a_shift, b.at[0] + b_shift)
    least = a.value[-1] + b.value[-1] + extra
    if evaluate(current, start) <= least + tolerance:
        return 0
    # Only between these two steps of `current` can the new function be lower.
    k = index_at(current.at, start - 1) + 1
    stop = first_at_most(current, k, least + tolerance)
    limit = current.at[stop] if stop < current.at.size else FAR
    out.at[:k] = current.at[:k]
    out.value[:k] = current.value[:k]
    count = k
    best = current.value[k - 1] if k > 0 else np.inf
    i = index_at(a.at, start - a_shift)
    j = index_at(b.at, start - b_shift)
    at = start
    value = a.value[i] + b.value[j] + extra
    changed = False
    while at < limit or k < stop:
        ahead = current.at[k] if k < stop else limit
        if at < ahead or (at == ahead and at < limit and value < current.value[k]):
            if value < best - tolerance:
                changed = True
                best = value
                out.at[count], out.value[count] = at, value
                count += 1
            next_a = a.at[i + 1] + a_shift if i + 1 < a.at.size else FAR
            next_b = b.at[j + 1] + b_shift if j + 1 < b.at.size else FAR
            at = min(next_a, next_b)
            if at < limit:
                i += next_a == at
                j += next_b == at
                value = a.value[i] + b.value[j] + extra
        else:
            if current.value[k] < best - tolerance:
                best = current.value[k]
                out.at[count], out.value[count] = current.at[k], best
                count += 1
            k += 1
    if not changed:
        return 0
    while k < current.at.size and current.value[k] >= best - tolerance:
        k += 1
    rest = current.at.size - k
    out.at[count : count + rest] = current.at[k:]
    out.value[count : count + rest] = current.value[k:]
    return count + rest


@compiled
def first_at_most(f: Steps, begin: int, value: float) -> int:
    """Return the index of the first step from `begin` on with at most `value`; the end if none."""
    end = f.value.size
    while begin < end:
        middle = (begin + end) // 2
        if f.value[middle] <= value:
            end = middle
        else:
            begin = middle + 1
    return begin


@compiled
def with_room(pool: Steps, used: int, more: int) -> Steps:
    """Return `pool`, or a larger copy (twice at least), with room for `more` after `used` steps."""
    if used + more <= pool.at.size:
        return pool
    larger = buffer(max(2 * pool.at.size, used + more))
    copy(pool, larger, 0, used)
    return larger


@compiled
def buffer(size: int) -> Steps:
    """Make room for `size` steps."""
    return Steps(np.empty(size, np.int64), np.empty(size))


@compiled
def copy(f: Steps, out: Steps, begin: int, count: int) -> None:
    """Write the first `count` steps of `f` to `out`, from `begin` on."""
    out.at[begin : begin + count] = f.at[:count]
    out.value[begin : begin + count] = f.value[:count]


@compiled
def part(f: Steps, begin: int, count: int) -> Steps:
    """Return the `count` steps from `begin` on, a view."""
    return Steps(f.at[begin : begin + count], f.value[begin : begin + count])


@compiled
def constant(value: float) -> Steps:
    """Return the function that is `value` whatever the memory (far below zero on)."""
    return Steps(np.full(1, -FAR // 4, np.int64), np.full(1, value))
