"""Reads schedules from the persistent program's table (Rotor Algorithm 4)."""

from __future__ import annotations

import numpy as np

from memopt.solvers.compiled import compiled, compiled_unlocked
from memopt.strategies.rotor.model import ChainArrays, Int64Array
from memopt.strategies.rotor.persistent_kernels import Rows, saving_need
from memopt.strategies.rotor.schedules import (
    BACKWARD,
    CODE_BASE,
    FORWARD_ALL,
    FORWARD_CHECKPOINT,
    FORWARD_NO_SAVE,
)
from memopt.strategies.rotor.steps_kernels import index_at


@compiled
def estimate(c: ChainArrays, table: Rows, s: int, t: int, memory: int) -> tuple[int, float]:
    """Return (0, the table's C(s, t, m)) for a memory in bytes; (1, the row's first value) if that
    memory is below the row's first slot."""
    start = table.offset[s, t]
    if table.at.size > 0:
        index = index_at(table.at[start : start + table.steps[s, t]], memory)
        return 0, table.values[start + max(index, 0)]
    m = memory // c.slot - table.low[s, t]
    if m < 0:
        return 1, table.values[start]
    return 0, table.values[start + min(m, table.high[s, t] - table.low[s, t])]


@compiled
def choose(
    c: ChainArrays,
    table: Rows,
    floor: Int64Array,
    s: int,
    t: int,
    memory: int,
    split_saving: bool,
    split_on_tie: bool,
) -> tuple[int, int]:
    """Choose (split, option) at (s, t) with `memory` bytes: 0 and one for F_all^s, or the next
    stage.

    Every choice that fits in exact bytes is weighed by the table's value for the rest. With whole
    slots left this is Algorithm 4, and the time is at most the table's. Where the slots are too
    coarse to see a choice, `floor` (exact least memory) still does. The split is -1 if nothing
    fits.
    """
    best, option = -1, 0
    best_unknown = 3
    best_value = np.inf
    for o in range(c.options.number[s] if split_saving or s == t else 0):
        if memory < saving_need(c, s, o, t, 1):
            continue
        unknown, value = 0, c.options.own_s[s, o]
        if s < t:
            left = memory - c.options.saved_bytes[s, o]
            if left < floor[s + 1, t]:
                continue
            unknown, rest = estimate(c, table, s + 1, t, left)
            value += rest
        if unknown < best_unknown or (unknown == best_unknown and value < best_value):
            best, option, best_unknown, best_value = 0, o, unknown, value
    if best == 0 and (s == t or memory // c.slot >= table.high[s, t]):
        return best, option
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
        known = unknown == best_unknown
        tie = split_on_tie and best == 0 and value == best_value
        if unknown < best_unknown or (known and (value < best_value or tie)):
            best, best_unknown, best_value = split, unknown, value
    return best, option


@compiled_unlocked
def persistent_schedule(
    c: ChainArrays,
    table: Rows,
    floor: Int64Array,
    memory: int,
    split_saving: bool,
    split_on_tie: bool,
) -> tuple[Int64Array, Int64Array]:
    """Return (the schedule for `memory` bytes (Algorithm 4), as codes; the option that saves each
    stage); without codes if none fits.

    With `split_on_tie` equal times go to the choice that keeps less: once lowered to operators, its
    reruns may be unread and dropped.
    """
    n = c.length
    options = np.zeros(n + 1, np.int64)
    codes = np.empty(16 * n + 64, np.int64)
    count = 0
    stack = np.empty((codes.size, 3), np.int64)
    depth = 1
    stack[0, 0], stack[0, 1], stack[0, 2] = 1, n, memory
    while depth > 0:
        depth -= 1
        s, t, m = stack[depth, 0], stack[depth, 1], stack[depth, 2]
        if count + n + 2 > codes.size:
            larger = np.empty(2 * codes.size, np.int64)
            larger[:count] = codes[:count]
            codes = larger
        if s < 0:
            codes[count] = CODE_BASE * t + BACKWARD
            count += 1
            continue
        split, option = choose(c, table, floor, s, t, m, split_saving, split_on_tie)
        if split < 0:
            return codes[:0], options
        if split == 0:
            codes[count] = CODE_BASE * s + FORWARD_ALL
            count += 1
            options[s] = option
            stack[depth, 0], stack[depth, 1], stack[depth, 2] = -1, s, 0
            depth += 1
            if s < t:
                stack[depth, 0], stack[depth, 1] = s + 1, t
                stack[depth, 2] = m - c.options.saved_bytes[s, option]
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
    return codes[:count], options
