"""Reads schedules from the floating programs' tables, in exact bytes (Algorithm 2).

Like the persistent program's trace, this one weighs every choice that fits in exact bytes by the
table's value for the rest, so that rounding to slots costs time but never exceeds a budget.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.solvers.compiled import compiled, compiled_unlocked
from memopt.strategies.rotor.floating_kernels import gradient_need
from memopt.strategies.rotor.model import ChainArrays, Int64Array
from memopt.strategies.rotor.schedules import (
    BACKWARD,
    CODE_BASE,
    DROP_ACTIVATION,
    FORWARD_ALL,
    FORWARD_CHECKPOINT,
    FORWARD_NO_SAVE,
)
from memopt.strategies.rotor.steps_kernels import FAR, Steps, index_at


class Whole(NamedTuple):
    """W of all stages: W_kind(s, t, last) starts at start[kind, s, t, last]; `floor` is the least
    memory of each in exact bytes."""

    steps: Steps
    start: Int64Array
    length: Int64Array
    floor: Int64Array


@compiled
def least_memory(c: ChainArrays, kinds: int) -> Int64Array:
    """Return the least memory in bytes of W_kind(s, t, last): the recurrences without time."""
    n, size = c.length, c.length + 2
    low = np.full((kinds, size, size, size), FAR, np.int64)
    low_h = np.full((kinds, size, size), FAR, np.int64)
    for s in range(n, 0, -1):
        for kind in range(kinds):
            for u in range(s + 1, n + 1):
                for last in range(u, n + 1):
                    best = c.output_bytes[s] + low[kind, s + 1, u, last]
                    if s + 1 < u:
                        need = gradient_need(c, last, kind) + c.running[s + 1]
                        best = min(best, max(need, low_h[kind, u, last]))
                    low_h[kind, u, last] = best
        for t in range(s, n + 1 if s > 1 else 2):
            for last in range(t, n + 1):
                for kind in range(kinds - 1, -1, -1):
                    if not ((kind == 3 and t == last) or (s == 1 and kind % 2 == 1)):
                        low[kind, s, t, last] = least_of(c, low, low_h, kind, s, t, last)
    return low


@compiled
def least_of(
    c: ChainArrays, low: Int64Array, low_h: Int64Array, kind: int, s: int, t: int, last: int
) -> int:
    """Return the least memory of one W from those it depends on."""
    arrived, leaves = kind - kind % 2, kind % 2
    best = FAR
    if s == t:
        best = own_need(c, kind, s, last)
        if s < last:
            best = max(best, own_left(c, kind, s) + low[arrived, s + 1, s + 1, last])
    need = gradient_need(c, last, kind) + c.first[s]
    for route in range(1 + (low.shape[0] > 1)):
        for u in range(max(t + 1 - route * (1 - leaves), s + 1), last + 1):
            if route == 1 and arrived and u == last:
                continue
            left = low[2 + leaves, s, t, u] if route else low[leaves, s, t, u - 1]
            best = min(best, max(need, low_h[arrived + route, u, last], left))
    if s < t:
        best = min(best, max(need, low_h[kind, t, last] - c.output_bytes[s - 1]))
    return int(best)


@compiled
def own_need(c: ChainArrays, kind: int, s: int, last: int) -> int:
    """Return the bytes that stage s needs for its own operations in W_kind(s, s, last): for
    F_all^s, for B^s, or for the larger of both."""
    saving = gradient_need(c, last, kind) + c.saving[s]
    if s == last and kind >= 2:
        return int(c.reverse[s])
    return int(saving if kind % 2 == 1 else max(saving, c.reverse[s]))


@compiled
def own_left(c: ChainArrays, kind: int, s: int) -> int:
    """Return the bytes of the memory that F_all^s takes for good: ā^s, less a^{s-1} if that is
    dropped."""
    return int(c.saved_bytes[s] - (c.output_bytes[s - 1] if kind % 2 == 1 else 0))


@compiled
def estimate(
    c: ChainArrays, whole: Whole, kind: int, s: int, t: int, last: int, memory: int
) -> tuple[int, float]:
    """Return (0, the table's value of W) for a memory in bytes; (1, its first value) if that memory
    is below its first slot; (3, infinity) if it is below the least that W needs."""
    if memory < whole.floor[kind, s, t, last]:
        return 3, np.inf
    start = whole.start[kind, s, t, last]
    stop = start + whole.length[kind, s, t, last]
    if start == stop:
        return 1, 0.0
    index = index_at(whole.steps.at[start:stop], memory // c.slot)
    return (1, whole.steps.value[start]) if index < 0 else (0, whole.steps.value[start + index])


@compiled
def choose(
    c: ChainArrays, whole: Whole, kind: int, s: int, t: int, last: int, memory: int
) -> tuple[int, int, int]:
    """Choose (route, r, u): what to do at W_kind(s, t, last) with `memory` bytes.

    route 0, 1: keep a^{s-1} and a^{r-1}; B^ℓ to B^u from a^{r-1} (route 1: down to ā^u left).
    route 2: the kept a^{s-1} moves to a^{r-1}. route 3: F_all^s, or B^s if ā^s is there.
    route -1: nothing fits.
    """
    arrived, leaves = kind - kind % 2, kind % 2
    best = (-1, 0, 0)
    best_unknown = 3
    best_value = np.inf
    if s == t and memory >= own_need(c, kind, s, last):
        if s == last:
            return 3, 0, 0
        left = memory - own_left(c, kind, s)
        best_unknown, best_value = estimate(c, whole, arrived, s + 1, s + 1, last, left)
        best_value += c.forward_s[s] + (0.0 if leaves else c.backward_s[s])
        if best_unknown < 3:
            best = (3, 0, 0)
    held = gradient_need(c, last, kind)
    if memory < held + c.first[s]:
        return best
    target_unknown, target = estimate(c, whole, kind, s, t, last, memory)
    target *= 1 + 1e-13
    moved = memory + c.output_bytes[s - 1]
    can_run, can_move = True, s < t
    for r in range(s + 1, last + 1):
        if best_unknown == 0 and target_unknown == 0 and best_value <= target:
            return best
        if r > s + 1:
            can_run = can_run and memory >= held + c.running[r - 1]
            can_move = can_move and moved >= held + c.running[r - 1]
        extra = c.forward_sum_s[r - 1] - c.forward_sum_s[s - 1]
        if can_move and r <= t:
            left = moved - c.output_bytes[r - 1]
            unknown, value = estimate(c, whole, kind, r, t, last, left)
            value += extra
            if unknown < best_unknown or (unknown == best_unknown and value < best_value):
                best, best_unknown, best_value = (2, r, t), unknown, value
        if not can_run:
            continue
        left = memory - c.output_bytes[r - 1]
        for route in range(1 + (whole.length.shape[0] > 1)):
            for u in range(max(t + 1 - route * (1 - leaves), r), last + 1):
                if route == 1 and arrived and u == last:
                    continue
                unknown, value = estimate(c, whole, arrived + route, r, u, last, left)
                if unknown > best_unknown:
                    continue
                if route == 1:
                    more, rest = estimate(c, whole, 2 + leaves, s, t, u, memory)
                else:
                    more, rest = estimate(c, whole, leaves, s, t, u - 1, memory)
                unknown += more
                value += extra + rest
                if unknown < best_unknown or (unknown == best_unknown and value < best_value):
                    best, best_unknown, best_value = (route, r, u), unknown, value
    return best


@compiled_unlocked
def floating_schedule(c: ChainArrays, whole: Whole, memory: int) -> Int64Array:
    """Return the schedule for `memory` bytes, as codes; empty if none fits."""
    n = c.length
    codes = np.empty(16 * n + 64, np.int64)
    count = 0
    stack = np.zeros((codes.size, 5), np.int64)
    stack[0] = np.array([0, 1, 1, n, memory])
    depth = 1
    while depth > 0:
        depth -= 1
        kind, s, t, last, m = stack[depth]
        if count + n + 4 > codes.size:
            larger = np.empty(2 * codes.size, np.int64)
            larger[:count] = codes[:count]
            codes = larger
        if kind < 0:
            codes[count] = CODE_BASE * s + BACKWARD
            count += 1
            continue
        arrived, leaves = kind - kind % 2, kind % 2
        route, r, u = choose(c, whole, kind, s, t, last, m)
        if route < 0:
            return codes[:0]
        if route == 3:
            if s < last or not arrived:
                codes[count] = CODE_BASE * s + FORWARD_ALL
                count += 1
            if leaves:
                codes[count] = CODE_BASE * (s - 1) + DROP_ACTIVATION
                count += 1
            else:
                stack[depth, 0], stack[depth, 1] = -1, s
                depth += 1
            if s < last:
                stack[depth, 0], stack[depth, 1], stack[depth, 2] = arrived, s + 1, s + 1
                stack[depth, 3], stack[depth, 4] = last, m - own_left(c, kind, s)
                depth += 1
            continue
        codes[count] = CODE_BASE * s + (FORWARD_NO_SAVE if route == 2 else FORWARD_CHECKPOINT)
        count += 1
        for stage in range(s + 1, r):
            codes[count] = CODE_BASE * stage + FORWARD_NO_SAVE
            count += 1
        if route < 2:
            stack[depth, 0] = 2 + leaves if route else leaves
            stack[depth, 1], stack[depth, 2] = s, t
            stack[depth, 3], stack[depth, 4] = u if route else u - 1, m
            depth += 1
            stack[depth, 0], stack[depth, 2] = arrived + route, u
            stack[depth, 4] = m - c.output_bytes[r - 1]
        else:
            stack[depth, 0], stack[depth, 2] = kind, t
            stack[depth, 4] = m + c.output_bytes[s - 1] - c.output_bytes[r - 1]
        stack[depth, 1], stack[depth, 3] = r, last
        depth += 1
    return codes[:count]
