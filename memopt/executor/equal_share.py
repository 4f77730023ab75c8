"""Planning several graphs that run in one step, within a budget that they share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

T = TypeVar("T")
P = TypeVar("P", bound="PlanRecord")
_SHARES = 16


def equal_share(
    together: Iterable[T],
    budget_bytes: int,
    floors: Mapping[T, P],
    stored: Mapping[T, P],
    solved: Callable[[T, int], P],
    needed: Callable[[Mapping[T, P]], int],
) -> Mapping[T, P] | None:
    """Plan each of several graphs that run in one step the same share of the way from its smallest
    peak to its store-all's: the largest, to a sixteenth, with which the step is within the budget.

    Args:
        together: the graphs.
        budget_bytes: of the step.
        floors, stored: each graph's plan of the smallest peak, and its store-all plan.
        solved: plans one within a budget of its own.
        needed: returns the bytes of the step under these plans.

    Returns:
        The plans; None: even the smallest exceed the budget.
    """
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


def by_kind(graphs: Iterable[T], plans: Iterable[Iterable[P]]) -> list[dict[T, P]]:
    """Return the graphs' first plans, their second ones and so on, of equally many for each."""
    every = list(graphs)
    return [dict(zip(every, alike, strict=True)) for alike in zip(*plans, strict=True)]


def chosen(
    budget_bytes: int | None,
    stored: Mapping[T, P],
    small: Sequence[Mapping[T, P]],
    solved: Callable[[T, int], P],
    needed: Callable[[Mapping[T, P]], int],
) -> Mapping[T, P]:
    """Return the fastest plans of several graphs within the budget of their step; or, if none are
    within it, those that need least.

    Args:
        budget_bytes: of the step; None: those that need least.
        stored, solved, needed: as of `equal_share`.
        small: plans that need little: each graph's of the smallest peak, and others.
    """
    least = min(small, key=needed)
    if budget_bytes is None or budget_bytes < needed(least):
        return least

    def fits(plans: Mapping[T, P]) -> bool:
        return needed(plans) <= budget_bytes

    shared = equal_share(stored, budget_bytes, small[0], stored, solved, needed)
    made = [filled(one, stored, fits) for one in (shared, *small[1:]) if one and fits(one)]
    return min(made, key=lambda plans: sum(one.step_time_s for one in plans.values()))


def filled(
    plans: Mapping[T, P],
    stored: Mapping[T, P],
    fits: Callable[[Mapping[T, P]], bool],
) -> Mapping[T, P]:
    """Give graphs their store-all plans while there is room, those that gain most time first."""
    slower = sorted(plans, key=lambda one: stored[one].step_time_s - plans[one].step_time_s)
    for one in slower:
        other = {**plans, one: stored[one]}
        if plans[one] is not stored[one] and fits(other):
            plans = other
    return plans


def _between(floor: PlanRecord, stored: PlanRecord, share: int) -> int:
    return floor.peak_bytes + (stored.peak_bytes - floor.peak_bytes) * share // _SHARES
