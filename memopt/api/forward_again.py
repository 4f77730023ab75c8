"""Plans that keep nothing of their forward until their backward, which runs the forward again.

Where several planned calls await their backward at once (a model in parts, the graphs of a compiled
step), what they keep adds up. A plan of the smallest peak may keep much until then, since that does
not raise its own peak.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from memopt.models.budget import Budget
from memopt.models.status import Status
from memopt.plan_record import PlanRecord
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.reductions.lower import with_forward_again
from memopt.reductions.validate_and_replay import validate_and_replay

P = TypeVar("P", bound=PlanRecord)


def small_plans(first: P, floor: P) -> tuple[P, P, P]:
    """Return the plans of a graph that need little: in their peak, or until their backward.

    Args:
        first, floor: its store-all plan, and its plan of the smallest peak.

    Returns:
        `floor`, and the two with their forward run again; `floor` for one that cannot.
    """
    named = replace(first, strategy=floor.strategy)
    return floor, forward_again(named) or floor, forward_again(floor) or floor


def forward_again(plan: P) -> P | None:
    """Return a plan's step with its forward run once more when its backward begins, as the plan
    runs it; None if it moves or places tensors, or has no backward."""
    graph, program = plan.graph, plan.program
    if program.boundary is None or program.has_transfers or program.offsets is not None:
        return None
    if graph.movable:
        return None
    return with_program(plan, with_in_place(graph, with_forward_again(graph, program)))


def with_program(plan: P, made: Program) -> P | None:
    """Return a plan with another program in place of its own; None if that is not valid."""
    problem, figures = validate_and_replay(plan.graph, made, Budget(None), plan.device)
    if problem is not None:
        return None
    return replace(
        plan,
        status=Status.FEASIBLE,
        budget=None,
        peak_bytes=figures.peak_bytes,
        step_time_s=figures.time_s,
        program=made,
        chain=None,
        chain_steps=None,
        stats={},
    )
