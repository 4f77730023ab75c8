"""Drives the compiled persistent program over slots: tables, interruption, the curve."""

from __future__ import annotations

import numpy as np

from memopt.models.chain import Chain
from memopt.models.quantize import SlotScale
from memopt.strategies.base import Progress
from memopt.strategies.rotor.curve import PlanSet, plan_set
from memopt.strategies.rotor.model import chain_arrays
from memopt.strategies.rotor.persistent_kernels import (
    Rows,
    fill_diagonals,
    memory_bounds,
    row_offsets,
    trace,
)
from memopt.strategies.rotor.replay_kernel import peak_and_time


def persistent_plans(
    chain: Chain,
    scale: SlotScale,
    split_saving: bool,
    deadline_s: float | None,
    progress: Progress | None,
) -> PlanSet:
    """Schedules of the persistent program, or of revolve, for every budget."""
    c = chain_arrays(chain, scale)
    n = c.length
    low, high = memory_bounds(c, c.slot, c.output, c.saved, split_saving)
    floor, _ = memory_bounds(c, 1, c.output_bytes, c.saved_bytes, split_saving)
    offset, total = row_offsets(n, low, high)
    table = Rows(np.empty(total), offset, low, high)
    fill_diagonals(c, table, 0, n, split_saving)
    fixed = chain.resident_bytes + chain.input_bytes
    candidates = []
    root = [floor[1, n]] + [m * c.slot for m in range(low[1, n], high[1, n] + 1)]
    for memory in root:
        codes = trace(c, table, floor, memory, split_saving)
        peak, seconds = peak_and_time(c, codes)
        candidates.append((fixed + peak, seconds, codes))
    return plan_set(candidates, optimal=False, stats={"slots": int(high[1, n])})
