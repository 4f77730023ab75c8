"""Groups neighbouring stages of long chains for programs that cost L^4.

A schedule of the grouped chain is one of the chain itself (`expand`): a group's forward, saving and
backward are its stages' in order. The grouped chain charges at least as much as they do.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from memopt.models.chain import Chain, Stage
from memopt.strategies.rotor.schedules import (
    BACKWARD,
    CODE_BASE,
    DROP_ACTIVATION,
    FORWARD_ALL,
    FORWARD_NO_SAVE,
    Codes,
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
