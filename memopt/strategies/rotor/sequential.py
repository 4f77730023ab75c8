"""A yardstick without a dynamic program: segments of equal length (Rotor §5.4)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from memopt.models.chain import Chain
from memopt.solvers.running import Deadline
from memopt.strategies.rotor.plan_sets import PlanSet, plan_set, replayed
from memopt.strategies.rotor.schedules import (
    BACKWARD,
    CODE_BASE,
    FORWARD_ALL,
    FORWARD_CHECKPOINT,
    FORWARD_NO_SAVE,
)
from memopt.strategies.rotor.strategies import ChainStrategy

BEST = "best"


@dataclass(frozen=True)
class Sequential(ChainStrategy):
    """Recomputes segments of equal length, as PyTorch's checkpoint_sequential does.

    Of every segment only the input is kept; the last one stores all.

    The layers (all stages but the loss) are cut as PyTorch's checkpoint_sequential cuts them:
    every segment but the last has ⌊layers / segments⌋ of them.

    Attributes:
        segments: how many; None: √layers, rounded; "best": the fastest that fits the budget
            of 10 counts from 2 to 2√layers, as in Rotor §5.4.
    """

    name: ClassVar[str] = "sequential"

    segments: int | Literal["best"] | None = None

    def __post_init__(self) -> None:
        if self.segments is None or self.segments == BEST:
            return
        if not isinstance(self.segments, int) or self.segments < 1:
            raise ValueError(
                'Sequential: segments must be None, "best" or a count from 1, '
                f"got {self.segments!r}"
            )

    def plan_set(self, chain: Chain, deadline: Deadline | None = None) -> PlanSet:
        counts = self.counts(len(chain) - 1)
        schedules = (np.array(segment_codes(len(chain), count), np.int64) for count in counts)
        return plan_set(replayed(chain, schedules), optimal=True)

    def counts(self, layers: int) -> tuple[int, ...]:
        """Return the numbers of segments tried on a chain of so many layers, without the loss."""
        most = max(1, layers)
        root = math.sqrt(most)
        if self.segments is None:
            wanted = [round(root)]
        elif self.segments == BEST:
            wanted = [round(2 + i * (2 * root - 2) / 9) for i in range(10)]
        else:
            wanted = [int(self.segments)]
        return tuple(sorted({min(max(1, count), most) for count in wanted}))


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
