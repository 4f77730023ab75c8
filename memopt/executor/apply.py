"""Apply a plan to a model (the one it was made from, or another with the same graph), and handle
calls that were not planned."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.capture.training_call import training_call
from memopt.errors import GuardError, InputsError, NothingToTrainError
from memopt.executor.arena import ArenaFamily
from memopt.executor.calls import warn_of_many_plans
from memopt.executor.cuda_graph import CudaGraphs, GraphedProgram, between_graphs, why_not
from memopt.executor.given_gradients import warning_of_given
from memopt.executor.graph_segments import Capturer
from memopt.executor.in_step import APPLYING, InStep
from memopt.executor.install import install
from memopt.executor.module import (
    OnMismatch,
    PlannedModule,
    accepts,
    original_of,
    when_arrived,
)
from memopt.executor.recaptured import with_module
from memopt.executor.recorder import Recorder
from memopt.executor.runtime import Runtime
from memopt.models.options import parse_mismatch
from memopt.reductions.stage_map import has_updates
from memopt.stages import LastCapture
from memopt.step.backend import autocast_as, autocast_state
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.input_values import MOST_PLANS, InputValueError
from memopt.step.inputs import Call
from memopt.step.ranks import ranks_of
from memopt.step.record import example_call
from memopt.torch_private.engine_hooks import as_in_forward

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


_LOG = logging.getLogger(__name__)


def behaviour(
    on_mismatch: str, plan_again: Callable[[nn.Module, Call], nn.Module]
) -> OnMismatch | None:
    """Return the function that handles calls that were not planned; None raises.

    Args:
        on_mismatch: "plan" plans once for each kind of call and runs that; "original" runs the
            unplanned model; "error" raises GuardError.
        plan_again: makes a planned module for a model and a call.
    Raises:
        ValueError: an unknown name.
    """
    choice = parse_mismatch(on_mismatch)
    known: list[PlannedModule] = []

    def original(model: nn.Module, _call: Call, error: GuardError) -> nn.Module:
        _LOG.info("running the original module: %s", error)
        return model

    def planned_again(model: nn.Module, call: Call, error: GuardError) -> nn.Module:
        for one in known:
            if original_of(one) is model and accepts(one, call):
                return one
        if isinstance(error, InputValueError) and len(known) + 1 >= MOST_PLANS:
            return model
        _LOG.info("planning again: %s", error)
        try:
            fresh = plan_again(model, call)
        except (InputsError, NothingToTrainError):  # the model itself may say what is wrong
            return model
        assert isinstance(fresh, PlannedModule)
        known.append(fresh)
        differs = str(error).partition(";")[0]
        warn_of_many_plans(len(known), differs, 'on_mismatch="original"')
        return fresh

    return {"error": None, "original": original, "plan": planned_again}[choice]


def runtime_of(captured: Captured) -> Runtime:
    """Return a captured model's one runtime, so that its joint graph is compiled once."""
    owner = captured.hooks.owner
    return owner if isinstance(owner, Runtime) else Runtime(captured)


def apply_plan(
    plan: PlanRecord,
    model: nn.Module,
    inputs: Any = None,
    *,
    interpreted: bool = False,
    on_mismatch: OnMismatch | None = None,
    checked: bool = False,
    recorder: Recorder | None = None,
    family: ArenaFamily | None = None,
    cuda_graph: bool | Capturer = False,
    last: LastCapture | None = None,
) -> PlannedModule:
    """Apply a plan; see `Plan.apply`.

    Args:
        plan, model, inputs, interpreted, checked: as in `Plan.apply`.
        on_mismatch: handles calls that were not planned; None: they raise.
        recorder: is told when each instruction runs.
        family: programs whose idle arena the module may use, where that keeps the budget.
        cuda_graph: as in `Plan.apply`; or a capturer, for tests.
        last: keeps the capture of a model that had to be captured anew, for the next time.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"a plan is applied to an nn.Module, got {type(model).__name__}")
    if plan.profiled is None and plan.record is None:
        raise ValueError(
            "this plan was made from a cost model, not from a module: it cannot run; "
            "call memopt.plan(model, inputs, ...)"
        )
    if has_updates(plan.graph):
        raise ValueError(
            "this plan is of a whole step: run plan.train_step(model, loss_fn, optimizer). For a "
            'drop-in module plan with the optimizer\'s name (optimizer="adamw"), not an instance'
        )
    if cuda_graph and (interpreted or checked):
        raise ValueError("cuda_graph=True goes with neither interpreted=True nor checked=True")
    with _as_planned(plan), as_in_forward(model):
        ranks = ranks_of(model)
        with nullcontext() if ranks is None else ranks.failing_together(APPLYING):
            call = planned_call(plan, model, inputs)
            of_file = inputs is None and plan.profiled is None
            captured, lowering = with_module(plan, model, call, of_file, last)
            installed = install(
                captured,
                lowering,
                plan.program,
                interpreted=interpreted,
                checked=checked,
                recorder=recorder,
                family=family,
                between=_between(plan, captured, lowering, cuda_graph) if cuda_graph else None,
            )
        if ranks is not None:
            in_step = InStep(ranks)
            in_step.check_plan(plan)
            installed = in_step.installed(installed)
        if cuda_graph:
            device = captured.device or torch.device("cpu")
            capturer = CudaGraphs(device) if isinstance(cuda_graph, bool) else cuda_graph
            installed = GraphedProgram(installed, captured, capturer).installed()
        runtime, spare_bytes = runtime_of(captured), _spare_bytes(plan)
        made = PlannedModule(
            model, captured, runtime, installed, on_mismatch, spare_bytes=spare_bytes
        )
        when_arrived(made, warning_of_given(plan))
        return made


def _between(
    plan: PlanRecord, captured: Captured, lowering: Lowering, capturer: bool | Capturer
) -> dict[int, str]:
    """Return the instructions that run between CUDA graphs, by position, and why.

    Raises:
        ValueError: the step cannot be captured; the message says why.
    """
    device = captured.device or torch.device("cpu")
    spare_bytes = None if plan.budget is None else plan.budget - plan.peak_bytes
    # A test's capturer stands in for the device, too.
    on = device if isinstance(capturer, bool) else torch.device("cuda")
    library_bytes = 0 if plan.record is None else plan.record.library_bytes
    reason = why_not(lowering, plan.program, on, spare_bytes, library_bytes)
    if reason is not None:
        raise ValueError(f"this plan's step cannot be captured as a CUDA graph: {reason}")
    found = between_graphs(lowering, plan.program)
    runs = dict(plan.program.computes)
    for position, why in found.items():
        name = lowering.graph.operators[runs[position].op].name
        _LOG.info("instruction %d, %r, runs between two CUDA graphs: %s", position, name, why)
    return found


def _spare_bytes(plan: PlanRecord) -> int | None:
    """Return the bytes that gradients held when a step begins may take; None: no limit."""
    if plan.budget is None:
        return None
    spare_bytes = plan.budget - plan.peak_bytes
    if plan.record is None:
        return spare_bytes
    return max(spare_bytes + plan.record.accumulated_bytes, plan.record.dropped_bytes)


def _as_planned(plan: PlanRecord) -> AbstractContextManager[object]:
    """Return a context with the plan's autocast, unless the caller has set one: plans are applied
    outside of the `with torch.autocast` that the steps will run in."""
    if plan.record is None or any(autocast_state()):
        return nullcontext()
    return autocast_as(plan.record.autocast)


def planned_call(plan: PlanRecord, model: nn.Module, inputs: Any = None) -> Call:
    """Return the user's inputs as a call, keywords in the planned order; without inputs, the
    example call (zeros if the plan comes from a file or has let it go, and for meta tensors).

    Raises:
        ValueError: the plan has no example call.
    """
    if inputs is not None:
        call = training_call(model, inputs).filled()
        names = () if plan.record is None else plan.record.kwargs.keys
        if set(names) != call.kwargs.keys():
            return call
        return replace(call, kwargs={name: call.kwargs[name] for name in names})
    if plan.profiled is not None:
        return plan.profiled.captured.example()
    if plan.record is None:
        raise ValueError("this plan was made from a cost model: it has no example inputs")
    return example_call(plan.record)
