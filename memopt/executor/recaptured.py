"""Applies a plan to a model, or a whole step, that is captured anew: the stages of planning run as
the plan has recorded them, and its program is validated and replayed on the resulting graph."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.errors import CaptureError, InvalidProgramError, PlanFileError
from memopt.models.budget import Budget
from memopt.models.device import in_blocks
from memopt.models.graph import Graph
from memopt.models.record import difference
from memopt.models.same_graph import without_implementations
from memopt.models.stage_record import STAGE_NAMES, options_of
from memopt.programs.instructions import Program
from memopt.programs.violations import Violation
from memopt.reductions.stage_map import has_updates
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.stages import STAGES, LastCapture, Recapture, plan_again, recaptured
from memopt.stages.base import Found
from memopt.stages.capturing import blaming_the_file
from memopt.stages.stages import Alternatives
from memopt.step.backend import LARGEST_BLOCK_BYTES
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.inputs import Call, device_of
from memopt.step.profiled import Baseline, ProfiledStep
from memopt.step.record import example_call, record_of
from memopt.step.step_optimizer import check_splittable
from memopt.step.step_parts import StepModule

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

_OF_A_STEP = "loss_fn=..., targets=..., optimizer=..., whole_step=True, "


def with_module(
    plan: PlanRecord, model: nn.Module, call: Call, of_file: bool, last: LastCapture | None
) -> tuple[Captured, Lowering]:
    """Return the planned model's capture, or another one's if its graph is the planned one.

    Raises:
        PlanFileError: model, call or graph are not the planned ones, or the plan does not hold.
    """
    with blaming_the_file(of_file):
        device = device_of(model, call)
    if plan.record is not None:
        differs = difference(plan.record, record_of(model, call, device))
        if differs is not None:
            raise PlanFileError(
                f"this plan is for another model or call: {differs}. {plan_again(plan)}"
            )
    changed = None
    if plan.profiled is not None and plan.profiled.captured.model() is model:
        # Changes since then may or may not give another graph, so capture it anew.
        since = plan.profiled.captured.dependencies.changed(model)
        if since is None:
            return plan.profiled.captured, plan.profiled.lowering
        changed = since[0].difference(since[1])
        if since[0].source.endswith(".grad"):
            raise CaptureError(
                f"the forward reads a gradient ({since[0].shown}), which is there when it "
                "begins, and not when it is planned: set gradients to None before the forward "
                "(optimizer.zero_grad()), read them in the training loop, or plan the sub-modules "
                '(parts="auto" of memopt.wrap)'
            )
    step = Recapture(plan, model, call, device, example_of_file=of_file, changed=changed)
    found = recaptured(STAGES, step)
    if last is not None:
        last.captured = found.captured
    _check_plan(plan, found.lowering.graph, step.plan_again())
    return found.captured, found.lowering


def with_alternatives(
    plan: PlanRecord, model: nn.Module, captured: Captured, lowering: Lowering
) -> Lowering:
    """Return the lowering of a capture with the implementations that a plan chooses.

    Raises:
        PlanFileError: it has other ones.
    """
    graph = without_implementations(lowering.graph)
    plain = replace(lowering, graph=graph, alternatives={})
    step = Recapture(plan, model, captured.call, device_of(model, captured.call))
    step = replace(step, found=Found(captured, plain))
    stage = Alternatives()
    return stage.again(step, options_of(plan.stages, stage.name)).made.lowering


def _check_plan(plan: PlanRecord, graph: Graph, remedy: str) -> None:
    """Validate and replay a plan's program on a graph.

    Raises:
        PlanFileError: it is not valid there, or not within the plan's budgets.
    """
    problem: Violation | Exception | str | None
    try:
        budget = Budget(plan.budget, plan.host_budget)
        problem, _ = validate_and_replay(graph, plan.program, budget, plan.device)
    except (InvalidProgramError, IndexError) as error:
        problem = error
    if problem is None and _wasteful(graph, plan.program):
        problem = "its addresses leave more room than all its tensors together need"
    if problem is not None:
        raise PlanFileError(f"this plan does not hold for this model: {problem}. {remedy}")


def _wasteful(graph: Graph, program: Program | None) -> bool:
    """Return whether an arena is larger than any placement of its tensors has to be."""
    rows = (program.offsets or ()) if program is not None else ()
    sizes = [graph.tensors[tensor].size_bytes for _, tensor, _ in rows]
    ends = [offset + size for (_, _, offset), size in zip(rows, sizes, strict=True)]
    # Blocks of every allocator, CUDA's included.
    return max(ends, default=0) > sum(in_blocks(size, LARGEST_BLOCK_BYTES) for size in sizes)


def with_step(
    plan: PlanRecord, model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer
) -> PlanRecord:
    """Return the plan with its step captured from `model`; unchanged unless it comes from a file
    and is of a whole step.

    Raises:
        PlanFileError: model, mode, loss or optimizer are not the planned ones; the message says
            what differs.
        ValueError: the optimizer cannot be split.
    """
    record, graph = plan.record, plan.graph
    if plan.profiled is not None or record is None or graph is None or not has_updates(graph):
        return plan
    check_splittable(optimizer, model.named_parameters())
    call = example_call(record)
    user_call = Call(call.args[1:], call.kwargs)
    device = device_of(model, call)
    step = Recapture(plan, model, call, device, user_call, loss_fn, optimizer, remedy=_OF_A_STEP)
    differs = difference(record, record_of(StepModule(model, loss_fn), call, device))
    if differs is not None:
        raise PlanFileError(
            f"this plan is for another step: {differs.replace('model.', '')}. {step.plan_again()}"
        )
    found = recaptured(STAGES, step)
    _check_plan(plan, found.lowering.graph, step.plan_again())
    base = plan.baseline
    profiled = ProfiledStep(
        found.lowering.graph,
        found.lowering,
        found.captured,
        Baseline(base.peak_bytes, base.step_time_s, base.measured),
        device,
        record=record,
        optimizer=found.state,
        stages=tuple(one for one in plan.stages if one.name in STAGE_NAMES),
        parts=found.parts,
        user_call=user_call,
        host_state_bytes=found.host_state_bytes,
        movable_state_bytes=found.movable_state_bytes,
    )
    return replace(plan, profiled=profiled)
