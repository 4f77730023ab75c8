"""The lanes of a plan's step, as predicted and as recorded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memopt.models.recording import Occupied, Recorded
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.report.lanes import (
    Lane,
    Span,
    StepLanes,
    instruction_names,
    program_lanes,
)

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

OUTSIDE = "outside the plan: the loss, autograd"
_LANES = {Occupied.TO_HOST: Lane.OUT, Occupied.FROM_HOST: Lane.IN}


def predicted_lanes(plan: PlanRecord) -> StepLanes:
    """Return the replayed step of a plan."""
    timeline = replay(plan.graph, plan.program, plan.device)
    return program_lanes(timeline, plan.graph, plan.program)


def measured_lanes(plan: PlanRecord, recorded: Sequence[Recorded]) -> StepLanes:
    """Return the lanes of a recorded step; its device memory is not recorded."""
    names = instruction_names(plan.graph, plan.program)
    spans: list[Span] = []
    for one in recorded:
        name = names[one.position]
        if one.what is Occupied.WAIT:
            spans.append(Span(Lane.COMPUTE, f"wait: {name}", one.start_s, one.end_s, stall=True))
        elif one.what is Occupied.COMPUTE:
            spans.append(Span(Lane.COMPUTE, name, one.start_s, one.end_s))
        else:
            effects = plan.program.instructions[one.position].effects(plan.graph)
            (tensor,) = effects.host_begins or effects.begins
            name = plan.graph.tensors[tensor].name
            spans.append(Span(_LANES[one.what], name, one.start_s, one.end_s))
    outside = _between_the_halves(plan.program, recorded)
    if outside is not None:
        spans.append(outside)
    return StepLanes("measured", tuple(spans))


def _between_the_halves(program: Program, recorded: Sequence[Recorded]) -> Span | None:
    """Return the span between the plan's forward and its backward."""
    boundary = program.boundary
    if boundary is None:
        return None
    own = [one for one in recorded if one.what in (Occupied.COMPUTE, Occupied.WAIT)]
    begin = max((one.end_s for one in own if one.position < boundary), default=None)
    end = min((one.start_s for one in own if one.position > boundary), default=None)
    if begin is None or end is None:
        return None
    return Span(Lane.COMPUTE, OUTSIDE, begin, end)
