"""Plans within a budget that covers more than a strategy counts: the bytes that CUDA's caching
allocator reserves, or tensors of the training loop that are live during the forward alone.

A strategy plans within allocated bytes, the same for the whole step. What the allocator reserves
beyond them, and the memory during the forward, is known only of a finished program. So the budget
on allocated bytes is lowered by a program's excess until one fits, and raised by a few bisections.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable
from dataclasses import replace

from memopt.api.forward_again import forward_again
from memopt.api.second_half import waiting_least, waiting_longest
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.budget import (
    MINIMUM,
    WrittenBudget,
    exact_bytes,
    format_bytes,
    parse_budget,
    split_reserved,
)
from memopt.models.charges import NO_CHARGES, Charges
from memopt.plan_record import PlanRecord
from memopt.programs.allocator_settings import EXPANDABLE, AllocatorSettings
from memopt.programs.charged import needed_bytes, waiting_bytes

LOWERED = 12
"""How often the budget on allocated bytes is lowered at most."""
RAISED = 4
"""How often it is raised again, by half of the distance to a budget whose plan did not fit."""
_MARGIN = 300


def planned_within(
    solve_for: Callable[[WrittenBudget], PlanRecord],
    budget: object,
    charges: Charges,
    card_bytes: int | None = None,
) -> PlanRecord:
    """Plan within a budget on allocated or reserved bytes, with room for the charges that are live
    during the forward alone; the graph holds the other charges.

    Args:
        solve_for: plans within so many allocated bytes.
        budget: as the user wrote it.
        charges: of the step.
        card_bytes: what the device has, if that is the budget: the allocator must reserve no more;
            None: the user named a budget, or there is none.

    Raises:
        InfeasibleBudgetError, ValueError: see `within_reserved`, `solve`.
    """
    beside = charges.beside()
    plan = _planned(solve_for, budget, beside, card_bytes)
    if not beside.halved_calls or plan.reserved_bytes_limited:
        return plan
    limit = math.inf if plan.budget is None else plan.budget
    return waiting_longest(plan, lambda one: needed_bytes(one.graph, one.program, beside) <= limit)


def _planned(
    solve_for: Callable[[WrittenBudget], PlanRecord],
    budget: object,
    beside: Charges,
    card_bytes: int | None,
) -> PlanRecord:
    """Plan as `planned_within` does, whatever the first half of a backward computes."""
    size, of_reserved = split_reserved(budget)
    if of_reserved:
        return within_reserved(solve_for, size, beside)
    if card_bytes is not None and not beside:
        return within_card(solve_for, card_bytes, card_bytes)
    try:
        plan = solve_for(budget)  # type: ignore[arg-type]
    except InfeasibleBudgetError as error:
        if not beside:
            raise
        return _least_beside(solve_for, error.budget_bytes, beside, error)
    if plan.budget is None or not beside:
        return plan

    def used(plan: PlanRecord) -> int:
        return needed_bytes(plan.graph, plan.program, beside)

    if size == MINIMUM:
        least = min(_or_again(plan, beside), key=used)
        return replace(least, budget=max(plan.budget, used(least)))
    if used(plan) <= plan.budget:
        return plan
    limit = plan.budget
    found = [one for one in _or_again(plan, beside) if used(one) <= limit]
    try:
        _, best = fastest_within(
            _below(solve_for, limit, plan),
            limit,
            used,
            lambda _: InfeasibleBudgetError("none fits", limit),
        )
    except InfeasibleBudgetError as error:
        if not found:
            return _least_beside(solve_for, limit, beside, error)
    else:
        found.append(best)
    return replace(min(found, key=lambda one: one.step_time_s), budget=limit)


def _or_again(plan: PlanRecord, beside: Charges) -> list[PlanRecord]:
    """Return a plan, and where other calls await their backward, or its second half, those that
    keep less for each of them: one that runs its forward again, ones with waiting operators."""
    again = forward_again(plan) if beside.waiting_calls else None
    found = [plan] if again is None else [plan, again]
    if beside.halved_calls:
        found += list(map(waiting_least, found))
    return found


def within_card(
    solve_for: Callable[[int], PlanRecord],
    budget_bytes: int,
    card_bytes: int | None,
) -> PlanRecord:
    """Plan within a budget on allocated bytes, such that the allocator reserves no more than the
    device has.

    Raises:
        InfeasibleBudgetError: no such plan was found.
    """
    plan = solve_for(budget_bytes)
    if card_bytes is None or reserved_bytes(plan) <= card_bytes:
        return plan

    return within_reserved(_below(solve_for, budget_bytes, plan), card_bytes)


def _below(
    solve_for: Callable[[int], PlanRecord], known_bytes: int, known: PlanRecord
) -> Callable[[int], PlanRecord]:
    """Plan as `solve_for` does, within less than a budget whose plan is known."""
    return lambda limit: known if limit >= known_bytes else solve_for(limit)


def soon_within_card(
    solve_for: Callable[[int], PlanRecord],
    budget_bytes: int,
    card_bytes: int | None,
    beside_bytes: int = 0,
) -> PlanRecord:
    """Plan as `within_card` does, in three plans at most: the budget is lowered by the bytes that
    are reserved beyond the device's, and not raised again.

    Args:
        solve_for, budget_bytes, card_bytes: as for `within_card`.
        beside_bytes: expected to be reserved beyond a plan's budget, from a like step.

    Raises:
        InfeasibleBudgetError: none of them fits.
    """
    if card_bytes is None:
        return solve_for(budget_bytes)
    tried, excess = budget_bytes + 1, 0
    limit = min(budget_bytes, max(1, card_bytes - beside_bytes))
    for times in (1, 2, 2):
        try:
            plan = solve_for(limit)
        except InfeasibleBudgetError as error:
            least = error.smallest_budget_bytes
            if limit >= budget_bytes or least is None or least >= tried:
                raise
            limit = least  # it was lowered too far at once
            continue
        excess = reserved_bytes(plan) - card_bytes
        if excess <= 0:
            return plan
        # A little more is lowered, since the next plan's excess differs a little.
        tried, limit = limit, max(1, limit - times * excess - card_bytes // _MARGIN)
    raise InfeasibleBudgetError(
        f"the allocator reserves {excess} bytes more than the device has: lower the budget",
        budget_bytes,
    )


def holding(plan: PlanRecord, more_bytes: int) -> PlanRecord:
    """Return a plan with so many bytes added to its charges and its budget, for the whole step."""
    graph, base, chain = plan.graph, plan.baseline, plan.chain
    if chain is not None:
        chain = replace(chain, resident_bytes=chain.resident_bytes + more_bytes)
    extra_bytes = graph.extra_resident_bytes + more_bytes
    return replace(
        plan,
        budget=None if plan.budget is None else plan.budget + more_bytes,
        peak_bytes=plan.peak_bytes + more_bytes,
        resident_bytes=plan.resident_bytes + more_bytes,
        baseline=replace(base, peak_bytes=base.peak_bytes + more_bytes),
        graph=replace(graph, extra_resident_bytes=extra_bytes),
        chain=chain,
    )


def reserved_bytes(plan: PlanRecord) -> int:
    """Return the bytes that CUDA's allocator would reserve for a plan's step; 0 on other
    devices."""
    found = plan.reserved
    return 0 if found is None else found.reserved_peak_bytes


def within_reserved(
    solve_for: Callable[[int], PlanRecord], budget: object, beside: Charges = NO_CHARGES
) -> PlanRecord:
    """Find plans for which the allocator reserves at most the budget, and return the fastest.

    Args:
        solve_for: plans within so many allocated bytes.
        budget: on reserved bytes: a number of them, or a string with a unit.
        beside: what is reserved for tensors outside of the step.

    Raises:
        InfeasibleBudgetError: no plan was found that keeps the budget.
        ValueError: the budget cannot be read or is no size, or the plan's device has another
            allocator.
    """
    limit = None if budget == MINIMUM else parse_budget(budget, 0)
    if not limit:
        raise ValueError(
            f'a budget on reserved bytes names a size, such as "6GiB reserved", got {budget!r}'
        )

    def used(plan: PlanRecord) -> int:
        others_bytes = waiting_bytes(plan.graph, plan.program, beside)
        return _reserved(plan) + beside.forward_bytes + beside.held_bytes + others_bytes

    asked, best = fastest_within(solve_for, limit, used, lambda least: _infeasible(limit, least))
    return replace(best, budget=limit, allocated_budget_bytes=asked)


def fastest_within(
    solve_for: Callable[[int], PlanRecord],
    limit: int,
    used: Callable[[PlanRecord], int],
    refusal: Callable[[int], InfeasibleBudgetError],
) -> tuple[int, PlanRecord]:
    """Return (the largest budget on allocated bytes with a plan that fits, the fastest such plan).

    Args:
        solve_for: plans within so many allocated bytes.
        limit: the most bytes that a plan may use.
        used: plan → the bytes that it uses.
        refusal: bytes that the last plan tried uses → the error, if none fits.
    """
    asked, too_much, plan = _lowered(solve_for, limit, used, refusal)
    best = plan
    for _ in range(RAISED if asked < limit else 0):
        middle = (asked + too_much) // 2
        try:
            plan = solve_for(middle)
        except InfeasibleBudgetError:  # a search within less has found one
            break
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
) -> tuple[int, int, PlanRecord]:
    """Lower the budget on allocated bytes until its plan fits; return that budget, the last one
    whose plan did not fit, and the plan. If lowering changes nothing, the next one is lowered by
    twice as much."""
    asked, tried, used_bytes, times = limit, limit, 0, 1
    for _ in range(LOWERED):
        try:
            plan = solve_for(asked)
        except InfeasibleBudgetError as error:
            least = error.smallest_budget_bytes
            if asked == limit:
                raise
            if least is None or least >= tried:
                raise refusal(used_bytes) from error
            # The budget was lowered too far at once: the smallest plan may still fit.
            asked = least
            continue
        before_bytes, used_bytes = used_bytes, used(plan)
        if used_bytes <= limit:
            return asked, tried, plan
        times = 2 * times if used_bytes >= before_bytes > 0 else 1
        # At most down to what no plan needs: its error says which budget is the least.
        tried, asked = asked, max(1, min(asked, plan.peak_bytes) - times * (used_bytes - limit))
    raise refusal(used_bytes)


def _least_beside(
    solve_for: Callable[[WrittenBudget], PlanRecord],
    limit: int,
    beside: Charges,
    cause: InfeasibleBudgetError,
) -> PlanRecord:
    """Return the smallest plan, if with the charges during the forward it is within the limit.
    (Searching for the smallest plan may succeed where searching within the limit failed.)

    Raises:
        InfeasibleBudgetError: it is not; names the budget that would be enough.
    """
    smallest, remedy = None, "Raise the budget"
    with contextlib.suppress(MemoptError):
        found = _or_again(solve_for(MINIMUM), beside)
        smallest, plan = min(
            ((needed_bytes(one.graph, one.program, beside), one) for one in found),
            key=operator.itemgetter(0),
        )
        if smallest <= limit:
            return replace(plan, budget=limit)
        remedy = f"Raise the budget to {exact_bytes(smallest)}"
    raise InfeasibleBudgetError(
        f"no plan was found within {exact_bytes(limit)} beside what is held then: "
        f"{' and '.join(beside.listed())}. {remedy}, or drop outputs and gradients "
        "before the forward (del output, optimizer.zero_grad())",
        limit,
        smallest,
    ) from cause


def _infeasible(limit: int, reserved_bytes: int) -> InfeasibleBudgetError:
    grows = AllocatorSettings.of_environment().expandable_segments
    segments = "" if grows else f"start Python with {EXPANDABLE}, "
    return InfeasibleBudgetError(
        "no plan was found for which CUDA's allocator reserves at most "
        f"{exact_bytes(limit)}; for the smallest one tried it reserves "
        f"{format_bytes(reserved_bytes)}. Raise the budget, {segments}give the tensors "
        "addresses (place=True), or budget what is allocated",
        limit,
    )


def _reserved(plan: PlanRecord) -> int:
    """Return the bytes that the allocator reserves for a plan's step.

    Raises:
        ValueError: the plan's device has another allocator.
    """
    found = plan.reserved
    if found is None:
        raise ValueError(
            "reserved bytes are those of CUDA's caching allocator, and this plan is for another "
            "device: budget the allocated bytes"
        )
    return found.reserved_peak_bytes
