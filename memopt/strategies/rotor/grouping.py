"""Groups neighbouring stages of long chains for programs that cost L^4.

A schedule of the grouped chain is one of the chain itself (`expand`): a group's forward, saving and
backward are its stages' in order. The grouped chain charges at least as much as they do.
"""

from __future__ import annotations

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
    ends = list(range(1, len(chain) + 1))
    weights = [stage.saved_bytes for stage in chain.stages]
    while len(ends) > most:
        pair = min(range(len(ends) - 1), key=lambda i: weights[i] + weights[i + 1])
        weights[pair : pair + 2] = [weights[pair] + weights[pair + 1]]
        del ends[pair]
    return tuple(ends)


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
    out: list[int] = []
    for code in codes.tolist():
        move, group = code % CODE_BASE, code // CODE_BASE
        first, last = (ends[group - 2] + 1 if group > 1 else 1), ends[group - 1]
        if move == DROP_ACTIVATION:
            out.append(CODE_BASE * last + DROP_ACTIVATION)
        elif move == FORWARD_ALL:
            out += [CODE_BASE * k + FORWARD_ALL for k in range(first, last + 1)]
        elif move == BACKWARD:
            out += [CODE_BASE * k + BACKWARD for k in range(last, first - 1, -1)]
        else:
            out.append(CODE_BASE * first + move)
            out += [CODE_BASE * k + FORWARD_NO_SAVE for k in range(first + 1, last + 1)]
    return np.array(out, np.int64)
