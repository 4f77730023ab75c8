"""rotor-optimal and rotor-free: programs in which the last kept activation may move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memopt.models.chain import Chain
from memopt.models.quantize import SlotScale
from memopt.strategies.base import Progress
from memopt.strategies.rotor.curve import PlanSet, merged
from memopt.strategies.rotor.limits import SolveLimits, Stopped
from memopt.strategies.rotor.table_strategy import Persistent, TableStrategy


@dataclass(frozen=True)
class FloatingStrategy(TableStrategy):
    """A program of O(L^4) steps per slot.

    Attributes:
        most_stages: longer chains are grouped to so many stages. The grouped chain's schedules
            and Rotor's for the whole chain are weighed together; the stats say "groups".
    """

    kinds: ClassVar[int]

    most_stages: int = 120

    def plan_set(
        self, chain: Chain, deadline_s: float | None = None, progress: Progress | None = None
    ) -> PlanSet:
        rotor = Persistent(self.slots, table_bytes=self.table_bytes)
        if len(chain) <= self.most_stages:
            plans = super().plan_set(chain, deadline_s, progress)
            if plans.optimal or self.exact_stages >= rotor.exact_stages:
                return plans
            # Rotor may be exact where this table is in slots.
            return merged(plans, rotor.plan_set(chain, deadline_s, progress))
        from memopt.strategies.rotor.grouping import expand, group_ends, grouped

        persistent = rotor.plan_set(chain, deadline_s, progress)
        if not persistent.complete:
            return persistent
        ends = group_ends(chain, self.most_stages)
        coarse = super().plan_set(grouped(chain, ends), deadline_s, progress)
        fine = coarse.remade(chain, lambda codes: expand(codes, ends))
        return merged(persistent, fine).with_stats(
            coarse.complete, **coarse.stats, groups=len(ends)
        )

    def plan(self, chain: Chain, scale: SlotScale, exact: bool, limits: SolveLimits) -> PlanSet:
        return floating(chain, scale, self.kinds, exact, limits)


@dataclass(frozen=True)
class RotorOptimal(FloatingStrategy):
    """The fastest schedule of Rotor's Table 1 without F_∅^ℓ while ā^ℓ is held (Theorem 4.7,
    corrected): the last kept activation may move.
    """

    name: ClassVar[str] = "rotor-optimal"
    kinds: ClassVar[int] = 1


@dataclass(frozen=True)
class RotorFree(FloatingStrategy):
    """The fastest schedule when any value may be dropped at any time, beyond the paper: a saved ā
    may wait for its backward while its input is dropped and recomputed later.

    Nothing is recomputed before the next backward lacks it, and every ā is for its own backward.
    """

    name: ClassVar[str] = "rotor-free"
    kinds: ClassVar[int] = 4

    most_stages: int = 50


def floating(
    chain: Chain, scale: SlotScale, kinds: int, exact: bool, limits: SolveLimits
) -> PlanSet:
    """Schedules of a floating program, and those of the smaller classes where it is not exact."""
    from memopt.strategies.rotor.floating_tables import floating_plans
    from memopt.strategies.rotor.persistent_tables import persistent_plans

    if exact:
        try:
            return floating_plans(chain, scale, kinds, True, limits)
        except Stopped:
            return persistent_plans(chain, scale, True, True, limits).with_stats(False)
    smaller = (
        persistent_plans(chain, scale, True, False, limits)
        if kinds == 1
        else floating(chain, scale, 1, False, limits)
    )
    if not smaller.complete:
        return smaller
    try:
        return merged(floating_plans(chain, scale, kinds, False, limits), smaller)
    except Stopped:
        return smaller.with_stats(False)
