"""Planning several graphs that run in one step, within a budget that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

T = TypeVar("T")
P = TypeVar("P", bound="PlanRecord")
_SHARES = 16


def equal_share(
    together: Iterable[T],
    budget_bytes: int | None,
    floors: Mapping[T, P],
    stored: Mapping[T, P],
    solved: Callable[[T, int], P],
    needed: Callable[[Mapping[T, P]], int],
) -> Mapping[T, P] | None:
    """Plan each of several graphs that run in one step the same share of the way from its smallest
    peak to its store-all's: the largest, to a sixteenth, with which the step is within the budget.

    Args:
        together: the graphs.
        budget_bytes: of the step; None: the smallest that can be.
        floors, stored: each graph's plan of the smallest peak, and its store-all plan.
        solved: plans one within a budget of its own.
        needed: returns the bytes of the step under these plans.

    Returns:
        The plans; None: even the smallest exceed the budget.
    """
    if budget_bytes is None:
        return floors
    if budget_bytes >= needed(stored):
        return stored
    if budget_bytes < needed(floors):
        return None
    best, low, high = floors, 0, _SHARES
    while high - low > 1:
        middle = (low + high) // 2
        made = {one: solved(one, _between(floors[one], stored[one], middle)) for one in together}
        fits = needed(made) <= budget_bytes
        best = made if fits else best
        low, high = (middle, high) if fits else (low, middle)
    return best


def filled(
    plans: Mapping[T, PlanRecord],
    stored: Mapping[T, PlanRecord],
    fits: Callable[[Mapping[T, PlanRecord]], bool],
) -> Mapping[T, PlanRecord]:
    """Let those graphs keep everything for which there is room, the slowest under its plan
    first."""
    slower = sorted(plans, key=lambda one: stored[one].step_time_s - plans[one].step_time_s)
    for one in slower:
        other = {**plans, one: stored[one]}
        if plans[one] is not stored[one] and fits(other):
            plans = other
    return plans


def _between(floor: PlanRecord, stored: PlanRecord, share: int) -> int:
    return floor.peak_bytes + (stored.peak_bytes - floor.peak_bytes) * share // _SHARES
