"""Schedules of segments of equal length, as PyTorch's checkpoint_sequential cuts a chain."""

from __future__ import annotations

import itertools
import math

from memopt.strategies.rotor.schedules import (
    BACKWARD,
    CODE_BASE,
    FORWARD_ALL,
    FORWARD_CHECKPOINT,
    FORWARD_NO_SAVE,
)


def root_count(layers: int) -> int:
    """Return the number of segments that is the square root of the layers, rounded."""
    return round(math.sqrt(layers))


def several_counts(layers: int) -> list[int]:
    """Return ten numbers of segments, from 2 to twice the square root of the layers."""
    root = math.sqrt(layers)
    return [round(2 + i * (2 * root - 2) / 9) for i in range(10)]


def segment_codes(stages: int, segments: int) -> list[int]:
    """Return the coded schedule of a chain of `stages` stages, the loss included, in `segments`."""
    length = (stages - 1) // segments
    starts = [1 + i * length for i in range(segments)] if length else [1]
    codes = []
    for start, following in itertools.pairwise(starts):
        codes.append(CODE_BASE * start + FORWARD_CHECKPOINT)
        codes += [CODE_BASE * k + FORWARD_NO_SAVE for k in range(start + 1, following)]
    ends = [*(start - 1 for start in starts[1:]), stages]
    for start, end in reversed(list(zip(starts, ends, strict=True))):
        codes += [CODE_BASE * k + FORWARD_ALL for k in range(start, end + 1)]
        codes += [CODE_BASE * k + BACKWARD for k in range(end, start - 1, -1)]
    return codes
