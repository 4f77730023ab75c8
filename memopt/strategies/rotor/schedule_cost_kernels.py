"""Computes the peak and time of any schedule, by replay."""

from __future__ import annotations

import numpy as np

from memopt.solvers.compiled import compiled
from memopt.strategies.rotor.model import ChainArrays, Int64Array
from memopt.strategies.rotor.schedules import (
    BACKWARD,
    CODE_BASE,
    DROP_ACTIVATION,
    DROP_SAVED,
    FORWARD_ALL,
    FORWARD_NO_SAVE,
)


@compiled
def peak_and_time(c: ChainArrays, codes: Int64Array) -> tuple[int, float]:
    """Return (peak in bytes beyond a^0 and the resident bytes, time in seconds); trusts the codes.

    It is compiled because curves have hundreds of schedules. Tests hold it equal to
    `memopt.reductions.chain_replay.replay_chain`, which is the reference.
    """
    held = np.zeros(c.length + 1, np.bool_)
    live = 0
    gradient = c.length
    peak = np.iinfo(np.int64).min
    time = 0.0
    for code in codes:
        stage = code // CODE_BASE
        move = code % CODE_BASE
        if move == BACKWARD:
            during = live - c.saved_bytes[stage] + c.reverse[stage]
            live -= c.saved_bytes[stage]
            gradient = stage - 1
            time += c.backward_s[stage]
            if held[stage - 1]:
                live -= c.output_bytes[stage - 1]
        elif move == DROP_ACTIVATION:
            held[stage] = False
            live -= c.output_bytes[stage]
            during = live + c.gradient[gradient]
        elif move == DROP_SAVED:
            live -= c.saved_bytes[stage]
            during = live + c.gradient[gradient]
        else:
            time += c.forward_s[stage]
            if move == FORWARD_ALL:
                during = live + c.gradient[gradient] + c.saving[stage]
                live += c.saved_bytes[stage]
            else:
                during = live + c.gradient[gradient] + c.first[stage]
                live += c.output_bytes[stage]
                held[stage] = True
                if move == FORWARD_NO_SAVE:
                    held[stage - 1] = False
                    live -= c.output_bytes[stage - 1]
        peak = max(peak, during)
    return peak, time
