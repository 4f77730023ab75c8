"""A yardstick without a dynamic program: segments of equal length (Rotor §5.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from memopt.models.chain import Chain
from memopt.solvers.running import Deadline
from memopt.strategies.rotor.plan_sets import PlanSet, plan_set, replayed
from memopt.strategies.rotor.schedules import root_count, segment_codes, several_counts
from memopt.strategies.rotor.strategies import ChainStrategy

BEST: Literal["best"] = "best"


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
        if self.segments is None:
            wanted = [root_count(most)]
        elif self.segments == BEST:
            wanted = several_counts(most)
        else:
            wanted = [int(self.segments)]
        return tuple(sorted({min(max(1, count), most) for count in wanted}))
