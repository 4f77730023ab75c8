"""Compiled tables of the floating programs: rotor-optimal and rotor-free.

W_PQ(s, t, ℓ, m) is the least time to run B^ℓ ... B^t from a^{s-1} (not counted in m), where P = 1
says that ā^ℓ is in memory already, without its input, and Q = 1 that B^t is not run and ā^t is left
in memory. Both are counted in m. a^{s-1} is freed by the end. rotor-optimal knows only P = Q = 0
(Rotor Theorem 4.7, corrected); rotor-free all four. The recurrences are in the documentation page
of Rotor; `Need` holds their memory conditions.

H_PR(s, u, ℓ, m) = min over s < r ≤ u of (time of F^1..F^{r-1}) + W_PR(r, u, ℓ, m - ω_a^{r-1}): a^s
has just been computed; it is kept (r = s + 1), or F_∅ continues. A table is a list of step
functions, one after the other; kind = 2P + Q.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solvers.compiled import compiled, compiled_unlocked
from memopt.strategies.rotor.model import ChainArrays, Int64Array
from memopt.strategies.rotor.persistent_kernels import ceil_div
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


class Column(NamedTuple):
    """All W, or all H, functions that share a pair (s, t); f(kind, last) begins at
    steps[start[kind, last]]."""

    steps: Steps
    start: Int64Array
    length: Int64Array


class Level(NamedTuple):
    """All W, or all H, functions that share their first stage s; f(kind, t, last) begins at
    steps[start[kind, t, last]]."""

    steps: Steps
    start: Int64Array
    length: Int64Array


@compiled
def gradient_need(c: ChainArrays, last: int, kind: int) -> int:
    """Return bytes held beside the values of the subchain: ω̃_δ^ℓ, and ā^ℓ if it is in memory."""
    held = c.saved_bytes[last] if kind >= 2 else 0
    return int(c.gradient[last] + held)


@compiled
def function(level: Level, kind: int, t: int, last: int) -> Steps:
    """Return f(kind, t, last), a view."""
    return part(level.steps, level.start[kind, t, last], level.length[kind, t, last])


@compiled_unlocked
def fill_h(c: ChainArrays, above: Level, h: Level, s: int, u: int, tolerance: float) -> Column:
    """Fill H(s, u, ·) of every kind and last stage, from W (`above`) and H of stage s + 1."""
    n = c.length
    kinds = above.length.shape[0]
    pool, other = buffer(ROOM), buffer(ROOM)
    start = np.zeros((kinds, n + 2), np.int64)
    count = np.zeros_like(start)
    used = 0
    zero = constant(0.0)
    none = part(zero, 0, 0)
    total = c.forward_sum_s[s]
    for kind in range(kinds):
        for last in range(u, n + 1):
            keep = function(above, kind, u, last)
            on = function(h, kind, u, last)
            room = keep.at.size + on.at.size
            pool = with_room(pool, used, room)
            first = part(pool, used, pool.at.size - used)
            k = improve(first, none, keep, c.output[s], zero, -FAR, -FAR // 2, total, tolerance)
            if s + 1 < u and on.at.size > 0:
                need = ceil_div(gradient_need(c, last, kind) + c.running[s + 1], c.slot)
                other = with_room(other, 0, room)
                m = improve(other, part(first, 0, k), on, 0, zero, -FAR, need, 0.0, tolerance)
                if m > 0:
                    k = m
                    copy(other, first, 0, k)
            start[kind, last] = used
            count[kind, last] = k
            used += k
    return Column(part(pool, 0, used), start, count)


@compiled
def own_stage(
    c: ChainArrays, above: Level, kind: int, s: int, last: int, out: Steps, tolerance: float
) -> int:
    """Compute the part of W_kind(s, s, last) that starts with F_all^s, or is B^s alone."""
    leaves = kind % 2 == 1
    arrived = kind >= 2
    none = part(out, 0, 0)
    reverse = ceil_div(c.reverse[s], c.slot)
    saving = ceil_div(gradient_need(c, last, kind) + c.saving[s], c.slot)
    if s == last:
        out.at[0] = reverse if arrived else saving if leaves else max(saving, reverse)
        out.value[0] = (0.0 if arrived else c.forward_s[s]) + (0.0 if leaves else c.backward_s[s])
        return 1
    rest = function(above, kind - kind % 2, s + 1, last)
    zero = constant(0.0)
    if leaves:
        shift = c.saved[s] - c.output[s - 1]
        extra = c.forward_s[s]
        return improve(out, none, rest, shift, zero, -FAR, saving, extra, tolerance)
    extra = c.forward_s[s] + c.backward_s[s]
    need = max(saving, reverse)
    return improve(out, none, rest, c.saved[s], zero, -FAR, need, extra, tolerance)


@compiled_unlocked
def fill_w(c: ChainArrays, above: Level, h: Level, s: int, t: int, tolerance: float) -> Column:
    """Fill W(s, t, ·) of every kind and last stage, from H of stage s and W (`above`) of s + 1."""
    n = c.length
    kinds = above.length.shape[0]
    pool, now, other = buffer(ROOM), buffer(ROOM), buffer(ROOM)
    start = np.zeros((kinds, n + 2), np.int64)
    count = np.zeros_like(start)
    used = 0
    zero = constant(0.0)
    back = -c.forward_sum_s[s - 1]
    for last in range(t, n + 1):
        for kind in range(kinds - 1, -1, -1):
            arrived, leaves = kind - kind % 2, kind % 2
            if (kind == 3 and t == last) or (s == 1 and leaves):
                continue
            k = 0
            if s == t:
                if s < last:
                    now = with_room(now, 0, above.length[arrived, t + 1, last])
                k = own_stage(c, above, kind, s, last, now, tolerance)
            need = ceil_div(gradient_need(c, last, kind) + c.first[s], c.slot)
            for route in range(1 + (kinds > 1)):
                # route: R, whether the right part leaves ā^u for W_1Q(s, t, u) to use.
                for u in range(max(t + 1 - route * (1 - leaves), s + 1), last + 1):
                    if route == 1 and arrived and u == last:
                        continue
                    right = function(h, arrived + route, u, last)
                    left_kind, left_last = (2 + leaves, u) if route else (leaves, u - 1)
                    left = part(pool, start[left_kind, left_last], count[left_kind, left_last])
                    other = with_room(other, 0, k + left.at.size + right.at.size)
                    known = part(now, 0, k)
                    m = improve(other, known, right, 0, left, 0, need, back, tolerance)
                    if m > 0:
                        now, other, k = other, now, m
            if s < t:
                moved = function(h, kind, t, last)
                shift = -c.output[s - 1]
                other = with_room(other, 0, k + moved.at.size)
                known = part(now, 0, k)
                m = improve(other, known, moved, shift, zero, -FAR, need, back, tolerance)
                if m > 0:
                    now, other, k = other, now, m
            pool = with_room(pool, used, k)
            copy(now, pool, used, k)
            start[kind, last] = used
            count[kind, last] = k
            used += k
    return Column(part(pool, 0, used), start, count)
