"""Runs the floating programs (rotor-optimal, rotor-free) and turns their tables into schedules."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat

import numpy as np

from memopt.models.chain import Chain
from memopt.models.quantize import SlotScale
from memopt.strategies.rotor.compiled import thread_count
from memopt.strategies.rotor.curve import PlanSet, plan_set
from memopt.strategies.rotor.floating_kernels import Level, Part, fill_h, fill_w
from memopt.strategies.rotor.floating_trace_kernels import Whole, least_memory, trace
from memopt.strategies.rotor.limits import SolveLimits, TooLarge
from memopt.strategies.rotor.model import ChainArrays, chain_arrays
from memopt.strategies.rotor.persistent_tables import traced
from memopt.strategies.rotor.steps_kernels import Steps

STEP_BYTES = 16


def floating_plans(
    chain: Chain, scale: SlotScale, kinds: int, exact: bool, limits: SolveLimits
) -> PlanSet:
    """Schedules of rotor-optimal (kinds = 1) or rotor-free (4) for every budget.

    Raises:
        TooLarge: the tables would pass the limits.
        Stopped: there is no table yet when the solve must end.
    """
    c = chain_arrays(chain, scale)
    n = c.length
    index_bytes = 3 * 8 * kinds * (n + 2) ** 3
    limits.check_bytes(index_bytes)
    whole = _tables(c, kinds, limits, (limits.table_bytes - index_bytes) // STEP_BYTES)
    start = whole.start[0, 1, 1, n]
    root = whole.steps.at[start : start + whole.length[0, 1, 1, n]]
    budgets = [int(m) * c.slot for m in root]
    if not exact:
        budgets.insert(0, int(whole.floor[0, 1, 1, n]))
    candidates = traced(chain, c, budgets, lambda memory: trace(c, whole, memory))
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
    with ThreadPoolExecutor(thread_count()) as threads:
        for s in range(n, 0, -1):
            limits.report(((n - s) / n) ** 4, "rotor: table of floating activations")
            columns = range(s + 1, n + 1)
            parts = threads.map(
                fill_h, repeat(c), repeat(above), repeat(h), repeat(s), columns, repeat(tolerance)
            )
            h = _level(c, columns, list(parts), kinds)
            columns = range(s, n + 1 if s > 1 else 2)
            parts = threads.map(
                fill_w, repeat(c), repeat(above), repeat(h), repeat(s), columns, repeat(tolerance)
            )
            above = _level(c, columns, list(parts), kinds)
            whole_start[:, s] = above.start + used
            whole_length[:, s] = above.length
            pools.append(above.steps)
            used += above.steps.at.size
            if used > most:
                raise TooLarge(f"the table needs more than {most} steps", STEP_BYTES * used)
    steps = Steps(
        np.concatenate([pool.at for pool in pools]),
        np.concatenate([pool.value for pool in pools]),
    )
    return Whole(steps, whole_start, whole_length, least_memory(c, kinds))


def _level(c: ChainArrays, columns: Sequence[int], parts: Sequence[Part], kinds: int) -> Level:
    """The functions of one stage, `parts` in the order of `columns`."""
    n = c.length
    start = np.zeros((kinds, n + 2, n + 2), np.int64)
    count = np.zeros((kinds, n + 2, n + 2), np.int64)
    used = 0
    for column, part in zip(columns, parts, strict=True):
        lengths = part.length.ravel()
        begins = used + np.cumsum(lengths) - lengths
        start[:, column] = begins.reshape(part.length.shape)
        count[:, column] = part.length
        used += int(lengths.sum())
    empty = Steps(np.empty(0, np.int64), np.empty(0))
    pools = [part.steps for part in parts] or [empty]
    steps = Steps(
        np.concatenate([pool.at for pool in pools]), np.concatenate([pool.value for pool in pools])
    )
    return Level(steps, start, count)
