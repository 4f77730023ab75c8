"""Whole-step plans from files: the step is captured again, and must be the planned one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.errors import PlanFileError
from memopt.executor.recaptured import again, planned_lowering, where_graphs_differ
from memopt.models.budget import format_bytes
from memopt.models.graph import Phase
from memopt.models.record import difference
from memopt.profiler.backend import backend_of
from memopt.profiler.baseline import Baseline, Loss
from memopt.profiler.input_errors import diagnosed
from memopt.profiler.inputs import Call, device_of
from memopt.profiler.optimizer_state import optimizer_state
from memopt.profiler.record import example_call, record_of
from memopt.profiler.step_capture import StepModule, capture_step, update_name, with_updates
from memopt.profiler.step_optimizer import check_splittable
from memopt.profiler.step_session import ProfiledStep, update_costs
from memopt.programs.serialize import fingerprint
from memopt.reductions.stage_map import has_updates

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


_OF_A_STEP = "loss_fn=..., targets=..., optimizer=..., whole_step=True, "


def with_step(
    plan: PlanRecord, model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer
) -> PlanRecord:
    """The plan with its step captured from `model`; as it is unless it comes from a file and is of
    a whole step.

    Raises:
        PlanFileError: model, mode, loss or optimizer are not the planned ones; the message says
            what differs.
        ValueError: the optimizer cannot be split.
    """
    record, graph = plan.record, plan.graph
    if plan.profiled is not None or record is None or graph is None or not has_updates(graph):
        return plan
    check_splittable(optimizer, model)
    call = example_call(record)
    loss = Loss(loss_fn, call.args[0])
    user_call = Call(call.args[1:], call.kwargs)
    device = device_of(model, call)
    module = StepModule(model, loss_fn)
    differs = difference(record, record_of(module, call, device))
    if differs is None:
        with diagnosed(model, user_call, loss):
            parts = capture_step(model, user_call, loss, optimizer, record.block_bytes)
        captured, lowering = with_updates(parts, parts.lowering, {})
        if fingerprint(lowering.graph) != record.fingerprint:
            differs = (
                "the captured steps differ (another loss, trained parameters or their order; "
                f"planned with torch {record.torch_version}, this is {torch.__version__})"
            ) + where_graphs_differ(plan, lowering.graph)
    if differs is not None:
        raise PlanFileError(
            f"this plan is for another step: {differs.replace('model.', '')}. "
            + again(plan, _OF_A_STEP)
        )
    state = optimizer_state(optimizer, model.parameters(), record.block_bytes)
    own_bytes = backend_of(device).step_scalars_bytes + record.library_bytes
    stays_bytes = graph.extra_resident_bytes - lowering.graph.extra_resident_bytes - own_bytes
    # State that is on the host between updates is charged to their workspace instead.
    updates = [one for one in graph.operators if one.phase is Phase.UPDATE]
    hosted_bytes = state.bytes_total - stays_bytes
    charged_bytes = sum(one.workspace_bytes for one in updates)
    if stays_bytes not in (0, state.bytes_total) or hosted_bytes > charged_bytes:
        raise PlanFileError(
            f"this plan is for {format_bytes(stays_bytes)} of optimizer state, and this "
            f"{state.name} keeps {format_bytes(state.bytes_total)}. {again(plan, _OF_A_STEP)}"
        )
    update_bytes = {}
    if plan.budget is not None:
        costs = update_costs(parts, optimizer, device, hosted=hosted_bytes > 0)
        update_bytes = {
            update_name(site): costs[site.name][1] for site in parts.sites if site.name in costs
        }
    lowering = planned_lowering(plan, lowering, captured, device, _OF_A_STEP, update_bytes)
    base = plan.baseline
    profiled = ProfiledStep(
        lowering.graph,
        lowering,
        captured,
        Baseline(base.peak_bytes, base.step_time_s, base.measured),
        device,
        record=record,
        optimizer=replace(state, bytes_total=stays_bytes),
        parts=parts,
        user_call=user_call,
        host_state_bytes=hosted_bytes,
    )
    return replace(plan, profiled=profiled)
