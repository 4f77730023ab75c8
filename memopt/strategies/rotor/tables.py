"""Runs the persistent and the floating programs and turns their tables into schedules (Rotor
Algorithms 1 to 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import repeat
from typing import NamedTuple

import numpy as np

from memopt.models.chain import Chain
from memopt.models.last_of import LastOf
from memopt.solvers.compiled import thread_count
from memopt.solvers.running import Stopped
from memopt.strategies.rotor.floating_kernels import Column, Level, fill_h, fill_w
from memopt.strategies.rotor.floating_trace_kernels import Whole, floating_schedule, least_memory
from memopt.strategies.rotor.model import ChainArrays, Int64Array
from memopt.strategies.rotor.persistent_kernels import (
    Rows,
    fill_block,
    fill_stage,
    memory_bounds,
    need_table,
    row_offsets,
)
from memopt.strategies.rotor.persistent_trace_kernels import persistent_schedule
from memopt.strategies.rotor.plan_sets import PlanSet, plan_set
from memopt.strategies.rotor.schedule_cost_kernels import peak_and_time
from memopt.strategies.rotor.schedules import Codes, SolveLimits, TooLarge
from memopt.strategies.rotor.steps_kernels import Steps, buffer

NO_STEPS = np.empty(0, np.int64)
STEP_BYTES = 16
INDEX_BYTES = 48
"""Bytes of bounds and offsets for each pair of stages."""
BLOCK = 8
_BOUNDS = LastOf[tuple[Int64Array, Int64Array]](kept=1)
"""The least and the greatest memory, in bytes, of the chain asked about last."""
WHAT = "rotor: table of floating activations"
NEAR_FLOOR = 15
"""Finer slots (NEAR_SLOTS) are used up to this many tenths of the least memory."""
NEAR_SLOTS = 160
NEAR_STAGES = 250
"""Longer chains do without the finer slots, which would double their solve time."""


def persistent_plans(
    chain: Chain, slot_bytes: int, split_saving: bool, exact: bool, limits: SolveLimits
) -> PlanSet:
    """Return schedules of the persistent program (or revolve) for every budget.

    Args:
        chain: the chain.
        slot_bytes: of a slot of memory; one byte if `exact`.
        split_saving: False for revolve: F_all^ℓ only right before B^ℓ.
        exact: tables of steps in exact bytes, not of slots.
        limits: when to stop. A stop leaves the schedule of least memory and, where the class has
            it, store-all.

    Raises:
        TooLarge: the table would pass the limits; nothing of that size was allocated.
    """
    limits.check_bytes(INDEX_BYTES * (len(chain) + 2) ** 2)
    c = ChainArrays.of(chain, slot_bytes)
    n = c.length
    # Fewer slots are tried again and again, with the same bytes.
    floor, high = _BOUNDS.of((chain,), split_saving, lambda: memory_bounds(c, 1, split_saving))
    candidates: list[tuple[int, float, Codes]] = []
    complete = True
    cells = 0

    def trace(arrays: ChainArrays, table: Rows, budgets: list[int]) -> None:
        def schedule(memory: int) -> Codes:
            return persistent_schedule(arrays, table, floor, memory, split_saving, False)[0]

        candidates.extend(traced(chain, arrays, budgets, schedule))

    try:
        if exact:
            table = _exact_table(c, floor, high, split_saving, limits)
            start = table.offset[1, n]
            budgets = [int(m) for m in table.at[start : start + table.steps[1, n]]]
            trace(c, table, budgets)
            cells = int(table.values.size)
        else:
            for part in _slot_tables(slot_bytes, n, int(floor[1, n])):
                fine = ChainArrays.of(chain, part.slot_bytes)
                try:
                    table = slot_table(fine, split_saving, limits, part)
                except TooLarge:
                    if part.last_slot is None:
                        raise
                    break  # the finer slots only help: do without
                budgets = [int(floor[1, n]), *_budgets(fine, table, part.last_slot)]
                trace(fine, table, budgets)
                cells += int(table.values.size)
    except Stopped:
        complete = False
        budgets = [int(floor[1, n]), int(high[1, n])]
        trace(c, _nothing_known(floor), budgets)
    stats: dict[str, object] = {"mode": "exact" if exact else "slots", "cells": cells}
    if not exact:
        stats["slot_bytes"] = slot_bytes
    return plan_set(candidates, optimal=exact and complete, complete=complete, stats=stats)


class SlotTable(NamedTuple):
    """One table of slots: its last slot (None: all), and its share of the progress."""

    slot_bytes: int
    last_slot: int | None
    begin: float
    end: float


def _slot_tables(slot_bytes: int, stages: int, floor_bytes: int) -> list[SlotTable]:
    """Return the slots asked for, and finer ones near the least memory, where few slots fit."""
    near_bytes = NEAR_FLOOR * floor_bytes // 10
    fine_bytes = max(1, near_bytes // NEAR_SLOTS)
    if stages > NEAR_STAGES or 2 * fine_bytes > slot_bytes or near_bytes <= 0:
        return [SlotTable(slot_bytes, None, 0.0, 1.0)]
    fine = SlotTable(fine_bytes, near_bytes // fine_bytes, 0.75, 1.0)
    return [SlotTable(slot_bytes, None, 0.0, 0.75), fine]


def traced(
    chain: Chain, c: ChainArrays, budgets: list[int], schedule: Callable[[int], Codes]
) -> list[tuple[int, float, Codes]]:
    """Return (peak in total bytes, seconds, codes) of the schedule for each budget of the table."""
    fixed = chain.resident_bytes + chain.input_bytes
    candidates = []
    with ThreadPoolExecutor(thread_count()) as threads:
        for codes in threads.map(schedule, budgets):
            if codes.size:
                peak, seconds = peak_and_time(c, codes)
                candidates.append((fixed + peak, seconds, codes))
    return candidates


def _budgets(c: ChainArrays, table: Rows, last_slot: int | None) -> list[int]:
    """Return the budgets, in bytes, at which the table's time for the whole chain falls. No
    schedule for a budget between two of them is faster than that for the smaller one."""
    n = c.length
    low, high = int(table.low[1, n]), int(table.high[1, n])
    if last_slot is not None:
        high = min(high, last_slot)
    start = table.offset[1, n]
    values = table.values[start : start + high - low + 1]
    falls = np.flatnonzero(np.diff(values, prepend=np.inf) < 0)
    return [(low + int(index)) * c.slot for index in falls]


def slot_table(c: ChainArrays, split_saving: bool, limits: SolveLimits, part: SlotTable) -> Rows:
    """Fill the persistent program's table over slots; raises Stopped and TooLarge."""
    n = c.length
    low, high = memory_bounds(c, c.slot, split_saving, limits.deadline)
    if part.last_slot is not None:
        # Beyond its end a row counts as constant: an upper bound, for budgets up to last_slot.
        high = np.maximum(low, np.minimum(high, part.last_slot + 1))
    offset, total = row_offsets(n, low, high)
    limits.deadline.check(part.begin, "rotor: table")
    limits.check_bytes(8 * total)
    table = Rows(np.empty(total), offset, low, high, NO_STEPS, low)
    need = need_table(c)
    blocks = -(-n // BLOCK)
    with ThreadPoolExecutor(thread_count()) as threads:
        for distance in range(blocks):
            # A diagonal has (blocks - d) blocks of about d splits.
            share = (distance / blocks) ** 2 * (3 - 2 * distance / blocks)
            limits.deadline.check(part.begin + (part.end - part.begin) * share, "rotor: table")
            starts = range(1, 1 + (blocks - distance) * BLOCK, BLOCK)
            right = [s0 + distance * BLOCK for s0 in starts]
            fixed = (repeat(c), repeat(table), repeat(need))
            done = threads.map(
                fill_block, *fixed, starts, right, repeat(BLOCK), repeat(split_saving)
            )
            list(done)
    return table


def _exact_table(
    c: ChainArrays, floor: Int64Array, high: Int64Array, split_saving: bool, limits: SolveLimits
) -> Rows:
    n = c.length
    offset = np.zeros((n + 2, n + 2), np.int64)
    count = np.zeros((n + 2, n + 2), np.int64)
    pool, used = buffer(4096), 0
    tolerance = 1e-12 * float(c.forward_s.sum() + c.backward_s.sum())
    for s in range(n, 0, -1):
        limits.deadline.check(((n - s) / n) ** 3, "rotor: exact table")
        most = limits.table_bytes // STEP_BYTES
        pool, used = fill_stage(c, pool, offset, count, used, s, split_saving, most, tolerance)
        if used < 0:
            raise TooLarge(f"the exact table needs more than {most} steps", STEP_BYTES * most)
    return Rows(pool.value[:used], offset, floor, high, pool.at[:used], count)


def _nothing_known(floor: Int64Array) -> Rows:
    """Return a table of zeros: its traces fit their budget and prefer F_all."""
    zeros = np.zeros_like(floor)
    return Rows(np.zeros(1), zeros, zeros, zeros, np.zeros(1, np.int64), zeros + 1)


def floating_plans(
    chain: Chain, slot_bytes: int, kinds: int, exact: bool, limits: SolveLimits
) -> PlanSet:
    """Return schedules of rotor-optimal (kinds = 1) or rotor-free (4) for every budget.

    Raises:
        TooLarge: the tables would pass the limits.
        Stopped: there is no table yet when the solve must end.
    """
    c = ChainArrays.of(chain, slot_bytes)
    n = c.length
    index_bytes = 3 * 8 * kinds * (n + 2) ** 3
    limits.check_bytes(index_bytes)
    whole = _tables(c, kinds, limits, (limits.table_bytes - index_bytes) // STEP_BYTES)
    start = whole.start[0, 1, 1, n]
    root = whole.steps.at[start : start + whole.length[0, 1, 1, n]]
    budgets = [int(m) * c.slot for m in root]
    if not exact:
        budgets.insert(0, int(whole.floor[0, 1, 1, n]))
    candidates = traced(chain, c, budgets, lambda memory: floating_schedule(c, whole, memory))
    stats = {"mode": "exact" if exact else "slots", "cells": int(whole.steps.at.size)}
    if not exact:
        stats |= {"slot_bytes": c.slot}
    return plan_set(candidates, optimal=exact, stats=stats)


def _tables(c: ChainArrays, kinds: int, limits: SolveLimits, most: int) -> Whole:
    n = c.length
    tolerance = 1e-12 * float(c.forward_s.sum() + c.backward_s.sum())
    shape = (kinds, n + 2, n + 2, n + 2)
    whole_start, whole_length = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    above = h = _level(c, (), (), kinds)
    pools: list[Steps] = []
    used = 0
    with stopping_threads() as threads:
        for s in range(n, 0, -1):
            done = ((n - s) / n) ** 4
            columns = range(s + 1, n + 1)
            parts = threads.map(
                fill_h, repeat(c), repeat(above), repeat(h), repeat(s), columns, repeat(tolerance)
            )
            h = _level(c, columns, _all(parts, limits, done), kinds)
            columns = range(s, n + 1 if s > 1 else 2)
            parts = threads.map(
                fill_w, repeat(c), repeat(above), repeat(h), repeat(s), columns, repeat(tolerance)
            )
            above = _level(c, columns, _all(parts, limits, done), kinds)
            whole_start[:, s] = above.start + used
            whole_length[:, s] = above.length
            pools.append(above.steps)
            used += above.steps.at.size
            if used > most:
                raise TooLarge(f"the table needs more than {most} steps", STEP_BYTES * used)
    return Whole(_joined(pools), whole_start, whole_length, least_memory(c, kinds))


@contextmanager
def stopping_threads() -> Iterator[ThreadPoolExecutor]:
    """Open threads; if the body fails, cancel the tasks that they have not begun."""
    threads = ThreadPoolExecutor(thread_count())
    try:
        yield threads
    finally:
        threads.shutdown(cancel_futures=True)


def _all(parts: Iterable[Column], limits: SolveLimits, done: float) -> list[Column]:
    """Return all parts of a level; raises Stopped at the deadline, which is checked after each."""
    found: list[Column] = []
    limits.deadline.check(done, WHAT)
    for part in parts:
        found.append(part)
        limits.deadline.check(done, WHAT)
    return found


def _level(c: ChainArrays, columns: Sequence[int], parts: Sequence[Column], kinds: int) -> Level:
    """Join the functions of one first stage s, made column by column: `parts[i]` has those of (s,
    columns[i])."""
    n = c.length
    start = np.zeros((kinds, n + 2, n + 2), np.int64)
    count = np.zeros((kinds, n + 2, n + 2), np.int64)
    used = 0
    for column, part in zip(columns, parts, strict=True):
        start[:, column] = used + part.start
        count[:, column] = part.length
        used += part.steps.at.size
    return Level(_joined([part.steps for part in parts]), start, count)


def _joined(pools: Sequence[Steps]) -> Steps:
    """Join the step functions of several pools, one after the other."""
    some = pools or [buffer(0)]
    return Steps(
        np.concatenate([pool.at for pool in some]), np.concatenate([pool.value for pool in some])
    )
