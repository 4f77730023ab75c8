"""Planning a model for another kind of call, with the settings of an existing plan."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from memopt.api.request import PlanRequest
from memopt.api.solving import make_plan
from memopt.models.options import PassOptions, PlanLimits, Pricing, StepOptions
from memopt.models.record import OutputGradients
from memopt.plan_record import PlanRecord

if TYPE_CHECKING:
    from torch import nn

    from memopt.step.inputs import Call


def plan_for(plan: PlanRecord, model: nn.Module, call: Call) -> PlanRecord:
    """Plan another call of a model within a plan's budget; the planned loss is charged again.

    Raises:
        InfeasibleBudgetError, CaptureError: as `memopt.plan`.
    """
    from memopt.profiler.session import profile_model

    # The strides of output gradients hold for the planned call only.
    loss = plan.output_gradients
    known = OutputGradients(unused=loss.unused, dropped=loss.dropped)
    kernels = "aten" if plan.record is None else plan.record.kernels
    profiled = profile_model(model, call, output_gradients=known, kernels=kernels)
    optimizer = plan.profiled.optimizer if plan.profiled is not None else None
    extra_bytes = optimizer.bytes_total if optimizer is not None else 0
    extra_bytes += plan.loss_bytes
    graph = replace(
        profiled.graph,
        boundary_bytes=plan.graph.boundary_bytes,
        extra_resident_bytes=profiled.graph.extra_resident_bytes + extra_bytes,
    )
    budget = f"{plan.budget} reserved" if plan.reserved_bytes_limited else plan.budget
    request = PlanRequest(
        plan.strategy,
        PlanLimits(budget, plan.host_budget),
        StepOptions(accumulate=plan.ran("accumulate")),
        Pricing(plan.device),
        PassOptions(order=plan.ran("order"), place=plan.ran("place")),
        progress=False,
    )
    return make_plan(replace(profiled, graph=graph), None, request)
