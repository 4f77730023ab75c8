"""Groups neighbouring stages of long chains for programs that cost L^4.

A schedule of the grouped chain is one of the chain itself (`expand`): a group's forward, saving and
backward are its stages' in order. The grouped chain charges at least as much as they do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from memopt.models.chain import Chain, Stage
from memopt.solvers.running import Deadline
from memopt.strategies.rotor.model import ChainArrays
from memopt.strategies.rotor.plan_sets import PlanSet, merged, plan_set
from memopt.strategies.rotor.schedules import (
    BACKWARD,
    CODE_BASE,
    DROP_ACTIVATION,
    FORWARD_ALL,
    FORWARD_NO_SAVE,
    Codes,
    root_count,
    segment_codes,
    several_counts,
)


def group_ends(chain: Chain, most: int) -> tuple[int, ...]:
    """Return last stages of up to `most` groups of even ā: lightest neighbours merge first."""
    count = len(chain)
    weights = [stage.saved_bytes for stage in chain.stages]
    following, before = list(range(1, count + 1)), list(range(-1, count - 1))
    pairs = [(weights[i] + weights[i + 1], i, i + 1) for i in range(count - 1)]
    heapify(pairs)
    left = set(range(count))
    while len(left) > max(1, most):
        weight, first, second = heappop(pairs)
        there = first in left and second in left
        if not there or weight != weights[first] + weights[second]:
            continue
        # The group is known by its last stage.
        left.remove(first)
        weights[second] = weight
        earlier, later = before[first], following[second]
        before[second] = earlier
        if earlier >= 0:
            following[earlier] = second
            heappush(pairs, (weights[earlier] + weight, earlier, second))
        if later < count:
            heappush(pairs, (weight + weights[later], second, later))
    return tuple(stage + 1 for stage in sorted(left))


def grouped(chain: Chain, ends: tuple[int, ...]) -> Chain:
    """Return the chain whose stages are the groups that end at `ends`."""
    stages = [_merge(chain, begin + 1, end) for begin, end in pairwise((0, *ends))]
    return Chain(chain.input_bytes, stages, chain.resident_bytes, chain.input_gradient_bytes)


def _merge(chain: Chain, first: int, last: int) -> Stage:
    stages = chain.stages[first - 1 : last]
    saved = sum(stage.saved_bytes for stage in stages)
    gradients = sum(stage.parameter_gradient_bytes for stage in stages)
    held = 0
    saving = []
    running = []
    for index, stage in enumerate(stages, first):
        before = chain.activation_bytes(index - 1) if index > first else 0
        running.append(before + stage.output_bytes + stage.no_save_overhead_bytes)
        held += stage.saved_bytes
        saving.append(held + stage.forward_overhead_bytes)
    reverse = []
    parameters = 0
    for index in range(last, first - 1, -1):
        stage = chain.stages[index - 1]
        parameters += stage.parameter_gradient_bytes
        deltas = chain.gradient_bytes(index) + chain.gradient_bytes(index - 1)
        reverse.append(held + deltas + parameters + stage.backward_overhead_bytes)
        held -= stage.saved_bytes
    charged = saved + chain.gradient_bytes(last) + chain.gradient_bytes(first - 1) + gradients
    return Stage(
        forward_time_s=sum(stage.forward_time_s for stage in stages),
        backward_time_s=sum(stage.backward_time_s for stage in stages),
        output_bytes=stages[-1].output_bytes,
        saved_bytes=saved,
        gradient_bytes=stages[-1].gradient_bytes,
        forward_overhead_bytes=max(saving) - saved,
        forward_no_save_overhead_bytes=max(running) - stages[-1].output_bytes,
        backward_overhead_bytes=max(reverse) - charged,
        parameter_gradient_bytes=gradients,
        name=stages[0].name,
    )


def expand(codes: Codes, ends: tuple[int, ...]) -> Codes:
    """Turn a coded schedule of the grouped chain into one of the chain."""
    move, group = codes % CODE_BASE, codes // CODE_BASE
    starts = np.array([0, 1, *(end + 1 for end in ends[:-1])], np.int64)
    lasts = np.array([0, *ends], np.int64)
    first, last = starts[group], lasts[group]
    length = np.where(move == DROP_ACTIVATION, 1, last - first + 1)
    begins = np.cumsum(length) - length
    place = np.arange(int(length.sum())) - np.repeat(begins, length)
    moves = np.repeat(move, length)
    down = (moves == BACKWARD) | (moves == DROP_ACTIVATION)
    stage = np.where(down, np.repeat(last, length) - place, np.repeat(first, length) + place)
    inside = (place > 0) & ~down & (moves != FORWARD_ALL)
    found: Codes = CODE_BASE * stage + np.where(inside, FORWARD_NO_SAVE, moves)
    return found


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
