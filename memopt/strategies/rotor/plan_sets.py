"""The memory–time trade-off that one solve of a chain gives."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from memopt.models.chain import Chain
from memopt.reductions.chain_replay import replay_chain
from memopt.strategies.rotor.schedules import Codes, steps_of

SAME_TIME = 1e-12
"""Relative difference of times below which they are sums of the same floats in another order."""


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """One schedule's cost: its replayed peak (total bytes, resident included) and its time."""

    peak_bytes: int
    time_s: float


@dataclass(frozen=True)
class PlanSet:
    """Schedules of one chain, none of which another beats in both memory and time.

    Attributes:
        points: by increasing peak, strictly decreasing time.
        codes: the schedule of each point, coded (`steps_of`).
        optimal: whether the points are the exact trade-off of the strategy's class.
        complete: False if the solve was stopped early.
        stats: figures for the solution's stats.
    """

    points: tuple[CurvePoint, ...]
    codes: tuple[Codes, ...] = field(repr=False)
    optimal: bool
    complete: bool = True
    stats: Mapping[str, object] = field(default_factory=dict)

    def at(self, budget_bytes: int | None) -> int | None:
        """Return the index of the fastest schedule within the budget; None if there is none."""
        if budget_bytes is None:
            return len(self.points) - 1
        index = bisect_right(self.points, budget_bytes, key=lambda point: point.peak_bytes)
        return index - 1 if index else None

    def with_stats(self, complete: bool | None = None, /, **stats: object) -> PlanSet:
        """Return the same schedules with more stats, or marked as incomplete."""
        complete = self.complete if complete is None else complete
        optimal = self.optimal and complete
        return replace(self, optimal=optimal, complete=complete, stats={**self.stats, **stats})


def replayed(chain: Chain, schedules: Iterable[Codes]) -> list[tuple[int, float, Codes]]:
    """Return (peak in total bytes, seconds, codes) of each schedule."""
    candidates = []
    for codes in schedules:
        timeline = replay_chain(chain, steps_of(codes.tolist()))
        candidates.append((timeline.peak_bytes, timeline.time_s, codes))
    return candidates


def merged(first: PlanSet, *others: PlanSet) -> PlanSet:
    """Merge the undominated schedules of several sets; stats and claims are the first one's."""
    candidates = [
        (point.peak_bytes, point.time_s, codes)
        for plans in (first, *others)
        for point, codes in zip(plans.points, plans.codes, strict=True)
    ]
    return plan_set(candidates, optimal=first.optimal, complete=first.complete, stats=first.stats)


def plan_set(
    candidates: Iterable[tuple[int, float, Codes]],
    *,
    optimal: bool,
    complete: bool = True,
    stats: Mapping[str, object] | None = None,
) -> PlanSet:
    """Keep the undominated ones of (peak in bytes, time in seconds, codes), ties to the first."""
    kept: list[tuple[int, float, Codes]] = []
    for candidate in sorted(candidates, key=lambda item: item[:2]):
        if not kept or candidate[1] < kept[-1][1] * (1 - SAME_TIME):
            kept.append(candidate)
    return PlanSet(
        points=tuple(CurvePoint(int(peak), float(time)) for peak, time, _ in kept),
        codes=tuple(codes for _, _, codes in kept),
        optimal=optimal,
        complete=complete,
        stats=dict(stats or {}),
    )
