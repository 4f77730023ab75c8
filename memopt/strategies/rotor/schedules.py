"""Chain schedules as integers, and the limits of one solve."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memopt.models.steps import ChainStep, Move
from memopt.solvers.running import Deadline

FORWARD_NO_SAVE, FORWARD_CHECKPOINT, FORWARD_ALL, BACKWARD, DROP_ACTIVATION, DROP_SAVED = range(6)
CODE_BASE = 8
"""A schedule for compiled loops is integers: CODE_BASE · stage + place in MOVES."""

MOVES = (
    Move.FORWARD_NO_SAVE,
    Move.FORWARD_CHECKPOINT,
    Move.FORWARD_ALL,
    Move.BACKWARD,
    Move.DROP_ACTIVATION,
    Move.DROP_SAVED,
)

Codes = npt.NDArray[np.int64]


def steps_of(codes: Iterable[int]) -> tuple[ChainStep, ...]:
    """Return the chain steps that `codes` stand for."""
    return tuple(ChainStep(MOVES[int(code) % CODE_BASE], int(code) // CODE_BASE) for code in codes)


class TooLarge(Exception):
    """A table would be larger than allowed; it was not allocated.

    Attributes:
        needed_bytes: its size, bytes (a lower bound where the size is found on the way).
    """

    def __init__(self, message: str, needed_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes


@dataclass(frozen=True, slots=True)
class SolveLimits:
    """The limits of one dynamic program: its deadline, the largest size of its table."""

    table_bytes: int
    deadline: Deadline

    def check_bytes(self, needed_bytes: int) -> None:
        """Raise TooLarge if a table of that size is not allowed."""
        if needed_bytes > self.table_bytes:
            raise TooLarge(
                f"the table needs {needed_bytes} bytes, {self.table_bytes} are allowed",
                needed_bytes,
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
