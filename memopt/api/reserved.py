"""Plans within a budget on what CUDA's caching allocator reserves.

A strategy plans within allocated bytes. What the allocator reserves beyond them, by its rules, is
known only of a finished program; so the budget on allocated bytes is lowered by what the plan's
program reserves too much, until one fits, and raised again as far as a few bisections find.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from memopt.errors import InfeasibleBudgetError
from memopt.models.budget import MINIMUM, format_bytes, parse_budget
from memopt.plan_record import RESERVED_BUDGET, PlanRecord

LOWERED = 12
"""Times that the budget on allocated bytes is lowered at most."""
RAISED = 4
"""Times that it is raised again, by half of what is left below one that did not fit."""


def within_reserved(solve_for: Callable[[int], PlanRecord], budget: object) -> PlanRecord:
    """The fastest plan found for which the allocator reserves at most the budget.

    Args:
        solve_for: plans within so many allocated bytes.
        budget: on reserved bytes: a number of them, or a string with a unit.

    Raises:
        InfeasibleBudgetError: no plan was found for which that is enough.
        ValueError: it cannot be read, is no size, or the plan is for a device without that
            allocator.
    """
    limit = None if budget == MINIMUM else parse_budget(budget, 0)
    if not limit:
        raise ValueError(
            f'a budget on reserved bytes names a size, such as "6GiB reserved", got {budget!r}'
        )
    asked, plan = _lowered(solve_for, limit)
    best, too_much = plan, limit
    for _ in range(RAISED if asked < limit else 0):
        middle = (asked + too_much) // 2
        plan = solve_for(middle)
        if _reserved(plan) > limit:
            too_much = middle
            continue
        asked = middle
        best = min(best, plan, key=lambda one: one.step_time_s)
    return replace(best, budget=limit, stats={**best.stats, RESERVED_BUDGET: asked})


def _lowered(solve_for: Callable[[int], PlanRecord], limit: int) -> tuple[int, PlanRecord]:
    """A budget on allocated bytes whose plan fits, and the plan."""
    asked, tried, reserved = limit, limit, 0
    for _ in range(LOWERED):
        try:
            plan = solve_for(asked)
        except InfeasibleBudgetError as error:
            least = error.smallest_budget_bytes
            if asked == limit:
                raise
            if least is None or least >= tried:
                raise _infeasible(limit, reserved) from error
            # Lowered too far at once: the smallest plan there is may still do.
            asked = least
            continue
        reserved = _reserved(plan)
        if reserved <= limit:
            return asked, plan
        tried, asked = asked, min(asked, plan.peak_bytes) - (reserved - limit)
        if asked < 1:
            break
    raise _infeasible(limit, reserved)


def _infeasible(limit: int, reserved_bytes: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(
        f"no plan was found for which CUDA's allocator reserves at most {limit} bytes "
        f"({format_bytes(limit)}); for the smallest one tried it reserves "
        f"{format_bytes(reserved_bytes)}. Raise the budget, give the tensors addresses "
        "(place=True), or budget what is allocated",
        limit,
    )


def _reserved(plan: PlanRecord) -> int:
    """Reserved bytes of a plan's step.

    Raises:
        ValueError: its device has another allocator.
    """
    found = plan.reserved
    if found is None:
        raise ValueError(
            "reserved bytes are those of CUDA's caching allocator, and this plan is for another "
            "device: budget the allocated bytes"
        )
    return found.reserved_peak_bytes
