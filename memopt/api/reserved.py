"""Plans within a budget on more than a strategy counts: what CUDA's caching allocator reserves, or
what is there beside the forward alone.

A strategy plans within allocated bytes, the same for the whole step. What the allocator reserves
beyond them, and what the forward needs, is known only of a finished program; so the budget on
allocated bytes is lowered by what the plan's program takes too much, until one fits, and raised
again as far as a few bisections find.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace

from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.budget import (
    MINIMUM,
    WrittenBudget,
    format_bytes,
    parse_budget,
    split_reserved,
)
from memopt.models.charges import Charges
from memopt.plan_record import PlanRecord
from memopt.programs.charged import needed_bytes

LOWERED = 12
"""Times that the budget on allocated bytes is lowered at most."""
RAISED = 4
"""Times that it is raised again, by half of what is left below one that did not fit."""


def planned_within(
    solve_for: Callable[[WrittenBudget], PlanRecord], budget: object, charges: Charges
) -> PlanRecord:
    """The plan for a budget, of either kind of bytes, that leaves room for what is there beside the
    forward alone; the rest of the charges is in the graph.

    Raises:
        InfeasibleBudgetError, ValueError: see `within_reserved`, `solve`.
    """
    size, of_reserved = split_reserved(budget)
    beside = Charges(forward_bytes=charges.forward_bytes, held_bytes=charges.held_bytes)
    if of_reserved:
        return within_reserved(solve_for, size, beside.forward_bytes + beside.held_bytes)
    plan = solve_for(budget)  # type: ignore[arg-type]
    if plan.budget is None or not beside:
        return plan

    def used(plan: PlanRecord) -> int:
        return needed_bytes(plan.graph, plan.program, beside)

    if size == MINIMUM or used(plan) <= plan.budget:
        return replace(plan, budget=max(plan.budget, used(plan)))
    limit = plan.budget
    _, best = _within(solve_for, limit, used, lambda _: _beside_forward(solve_for, limit, beside))
    return replace(best, budget=limit)


def within_reserved(
    solve_for: Callable[[int], PlanRecord], budget: object, beside_bytes: int = 0
) -> PlanRecord:
    """The fastest plan found for which the allocator reserves at most the budget.

    Args:
        solve_for: plans within so many allocated bytes.
        budget: on reserved bytes: a number of them, or a string with a unit.
        beside_bytes: reserved beside the step.

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

    def used(plan: PlanRecord) -> int:
        return _reserved(plan) + beside_bytes

    asked, best = _within(solve_for, limit, used, lambda least: _infeasible(limit, least))
    return replace(best, budget=limit, allocated_budget_bytes=asked)


def _within(
    solve_for: Callable[[int], PlanRecord],
    limit: int,
    used: Callable[[PlanRecord], int],
    refusal: Callable[[int], InfeasibleBudgetError],
) -> tuple[int, PlanRecord]:
    """(the largest budget on allocated bytes that was found to do, the fastest plan that does).

    Args:
        solve_for: plans within so many allocated bytes.
        limit: on what a plan uses.
        used: what a plan uses.
        refusal: the error where none does, of what the smallest one uses.
    """
    asked, plan = _lowered(solve_for, limit, used, refusal)
    best, too_much = plan, limit
    for _ in range(RAISED if asked < limit else 0):
        middle = (asked + too_much) // 2
        plan = solve_for(middle)
        if used(plan) > limit:
            too_much = middle
            continue
        asked = middle
        best = min(best, plan, key=lambda one: one.step_time_s)
    return asked, best


def _lowered(
    solve_for: Callable[[int], PlanRecord],
    limit: int,
    used: Callable[[PlanRecord], int],
    refusal: Callable[[int], InfeasibleBudgetError],
) -> tuple[int, PlanRecord]:
    """A budget on allocated bytes whose plan fits, and the plan."""
    asked, tried, used_bytes = limit, limit, 0
    for _ in range(LOWERED):
        try:
            plan = solve_for(asked)
        except InfeasibleBudgetError as error:
            least = error.smallest_budget_bytes
            if asked == limit:
                raise
            if least is None or least >= tried:
                raise refusal(used_bytes) from error
            # Lowered too far at once: the smallest plan there is may still do.
            asked = least
            continue
        used_bytes = used(plan)
        if used_bytes <= limit:
            return asked, plan
        tried, asked = asked, min(asked, plan.peak_bytes) - (used_bytes - limit)
        if asked < 1:
            break
    raise refusal(used_bytes)


def _beside_forward(
    solve_for: Callable[[WrittenBudget], PlanRecord], limit: int, beside: Charges
) -> InfeasibleBudgetError:
    """The error where no plan leaves room for what is there beside the forward."""
    smallest, remedy = None, "Raise the budget"
    with contextlib.suppress(MemoptError):
        plan = solve_for(MINIMUM)
        smallest = needed_bytes(plan.graph, plan.program, beside)
        remedy = f"Raise the budget to {smallest} bytes ({format_bytes(smallest)})"
    parts = [
        f"{format_bytes(size)} of {what}"
        for size, what in (
            (beside.forward_bytes, "the last step's outputs"),
            (beside.held_bytes, "gradients"),
        )
        if size
    ]
    return InfeasibleBudgetError(
        f"{' and '.join(parts)} are there while the forward runs, beside which no plan was found "
        f"within {limit} bytes ({format_bytes(limit)}). {remedy}, or drop them before the forward "
        "(optimizer.zero_grad(), del output)",
        limit,
        smallest,
    )


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
