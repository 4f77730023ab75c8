"""Rotor on chains that are too long for its table: as many groups of stages as time and memory
allow, and never slower than segments of equal length."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from memopt.models.chain import Chain
from memopt.solvers.running import Deadline
from memopt.strategies.rotor.grouping import expand
from memopt.strategies.rotor.model import ChainArrays
from memopt.strategies.rotor.plan_sets import PlanSet, merged, plan_set
from memopt.strategies.rotor.schedules import Codes, root_count, segment_codes, several_counts

CELL_S = 1.1e-10
"""Seconds of the table per slot and cube of the stages, on one core of 2024."""
TABLE_SHARE, UNLIMITED_S = 0.3, 30.0
"""Share of the time left that the table may take, and the time left where there is no limit."""
FEWEST_STAGES = 20
FEW_SLOTS = 100
"""Fewer slots than these are worse than fewer stages."""


def most_stages(deadline: Deadline, slots: int, table_bytes: int) -> int:
    """Return how many stages a table may have, by the time left and by its bytes."""
    left_s = min(UNLIMITED_S, deadline.left_s) if math.isinf(deadline.at_s) else deadline.left_s
    in_time = (TABLE_SHARE * left_s / (CELL_S * slots)) ** (1 / 3)
    in_memory = math.sqrt(2 * table_bytes / (8 * min(slots, FEW_SLOTS)))
    return max(FEWEST_STAGES, int(min(in_time, in_memory)))


def ungrouped(chain: Chain, coarse: PlanSet, ends: tuple[int, ...]) -> PlanSet:
    """Return the schedules of a chain of groups as the chain's own."""
    own = _measured(chain, (expand(codes, ends) for codes in coarse.codes))
    made = plan_set(own, optimal=False, complete=False, stats=coarse.stats)
    return replace(made, stats={**made.stats, "groups": len(ends)})


def with_segments(chain: Chain, plans: PlanSet) -> PlanSet:
    """Add the schedules of segments of equal length."""
    layers = max(1, len(chain) - 1)
    counts = {min(max(1, count), layers) for count in (root_count(layers), *several_counts(layers))}
    schedules = (np.array(segment_codes(len(chain), count), np.int64) for count in sorted(counts))
    return merged(plans, plan_set(_measured(chain, schedules), optimal=False))


def _measured(chain: Chain, schedules: Iterable[Codes]) -> Iterator[tuple[int, float, Codes]]:
    """Yield (peak in total bytes, seconds, codes) of schedules that are known to be valid."""
    from memopt.strategies.rotor.schedule_cost_kernels import peak_and_time

    arrays, fixed = ChainArrays.of(chain, 1), chain.resident_bytes + chain.input_bytes
    for codes in schedules:
        peak, seconds = peak_and_time(arrays, codes)
        yield fixed + peak, seconds, codes
