"""Plans for the split backwards of pipelines, in whose second half operators wait.

Zero-bubble schedules send the gradients of a stage's inputs to the stage before, and compute those
of its parameters where the stage would idle. What their operators read waits with them. A plan lets
as many wait as its budget has room for; the others run before, and their gradients wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from itertools import accumulate

from memopt.api.forward_again import with_program
from memopt.plan_record import PlanRecord
from memopt.programs.first_half import can_wait, halved_bytes, more_bytes, with_waiting


def waiting_least(plan: PlanRecord) -> PlanRecord:
    """Return a plan in which those operators wait whose waiting keeps less than their gradients."""
    groups = _groups(plan)
    least = min(groups, key=lambda one: more_bytes(plan.graph, one), default=frozenset[int]())
    found = _with_waiting(plan, least) or plan
    return min(plan, found, key=lambda one: halved_bytes(one.graph, one.program))


def waiting_longest(plan: PlanRecord, fits: Callable[[PlanRecord], bool]) -> PlanRecord:
    """Return a plan in which as many operators wait as fit, found by bisection."""
    groups, best = _groups(plan), plan
    low, high = 0, len(groups)
    while low < high:
        middle = (low + high + 1) // 2
        found = _with_waiting(plan, groups[middle - 1])
        if found is not None and fits(found):
            low, best = middle, found
        else:
            high = middle - 1
    return best


def _groups(plan: PlanRecord) -> list[frozenset[int]]:
    """Return the sets of operators that may wait, each with one group more than the last."""
    groups = can_wait(plan.graph, plan.program)
    return list(accumulate(groups, lambda one, other: one | other))


def _with_waiting(plan: PlanRecord, operators: Collection[int]) -> PlanRecord | None:
    made = with_program(plan, with_waiting(plan.graph, plan.program, operators))
    return made and replace(made, budget=plan.budget, stats=plan.stats)
