"""Applying a plan to a model: the one it was made from, or another with the same graph; and what
is done with a call that is not the planned one."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.errors import CaptureError, GuardError, PlanFileError
from memopt.executor.arena import ArenaFamily
from memopt.executor.calls import warn_of_many_plans
from memopt.executor.cuda_graph import Capturer, CudaGraphs, GraphedProgram, why_not
from memopt.executor.in_step import InStep
from memopt.executor.install import install
from memopt.executor.module import OnMismatch, PlannedModule, accepts, original_of
from memopt.executor.recaptured import again, planned_lowering, where_graphs_differ
from memopt.executor.recorder import Recorder
from memopt.executor.runtime import Installed, Runtime
from memopt.models.budget import format_bytes
from memopt.models.graph import Graph
from memopt.models.record import difference
from memopt.profiler.backend import autocast_as, autocast_state, backend_of
from memopt.profiler.build import Lowering, build
from memopt.profiler.capture import Captured, capture
from memopt.profiler.captures import captured_again
from memopt.profiler.compiled.choice import planned_kernels
from memopt.profiler.dependencies.reader import Dependency
from memopt.profiler.input_errors import diagnosed
from memopt.profiler.inputs import Call, device_of
from memopt.profiler.ranks import ranks_of
from memopt.profiler.record import example_call, record_of
from memopt.profiler.training_call import training_call
from memopt.programs.placed import arena_use
from memopt.programs.serialize import fingerprint
from memopt.reductions.stage_map import has_updates

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


_LOG = logging.getLogger(__name__)

CHOICES = ("error", "original", "replan")


def behaviour(choice: str, replan: Callable[[nn.Module, Call], nn.Module]) -> OnMismatch | None:
    """The behaviour of a name.

    Args:
        choice: "error" raises GuardError; "original" runs the unplanned model; "replan" plans
            once for each kind of call and runs that.
        replan: makes a planned module for a model and a call.

    Raises:
        ValueError: an unknown name.
    """
    if choice not in CHOICES:
        raise ValueError(f"otherwise= is one of {', '.join(map(repr, CHOICES))}, got {choice!r}")
    known: list[PlannedModule] = []

    def original(model: nn.Module, _call: Call, error: GuardError) -> nn.Module:
        _LOG.info("running the original module: %s", error)
        return model

    def planned_again(model: nn.Module, call: Call, error: GuardError) -> nn.Module:
        for one in known:
            if original_of(one) is model and accepts(one, call):
                return one
        _LOG.info("planning again: %s", error)
        fresh = replan(model, call)
        assert isinstance(fresh, PlannedModule)
        known.append(fresh)
        differs = str(error).partition(";")[0]
        warn_of_many_plans(len(known), differs, 'otherwise="original"')
        return fresh

    return {"error": None, "original": original, "replan": planned_again}[choice]


def runtime_of(captured: Captured) -> Runtime:
    """The one runtime of a captured model: its joint graph is compiled once."""
    owner = captured.hooks.owner
    return owner if isinstance(owner, Runtime) else Runtime(captured)


def apply_plan(
    plan: PlanRecord,
    model: nn.Module,
    inputs: Any = None,
    *,
    interpreted: bool = False,
    otherwise: OnMismatch | None = None,
    checked: bool = False,
    recorder: Recorder | None = None,
    family: ArenaFamily | None = None,
    cuda_graph: bool | Capturer = False,
) -> PlannedModule:
    """See `Plan.apply`; `otherwise`: what to do with other calls, None: raise. `recorder`: told
    what runs when. `family`: whose arena it shares, if that keeps the budget. `cuda_graph`: also
    what captures, for tests."""
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
    with _as_planned(plan):
        captured, lowering = _captured(plan, model, inputs)
        installed = install(
            captured,
            lowering,
            plan.program,
            interpreted=interpreted,
            checked=checked,
            recorder=recorder,
            family=_sharing(plan, family),
        )
        ranks = ranks_of(model)
        if ranks is not None:
            in_step = InStep(ranks)
            in_step.check_plan(plan)
            installed = in_step.installed(installed)
        if cuda_graph:
            if interpreted or checked:
                raise ValueError(
                    "cuda_graph=True goes with neither interpreted=True nor checked=True"
                )
            installed = _graphed(plan, captured, lowering, installed, cuda_graph)
        return PlannedModule(
            model,
            captured,
            runtime_of(captured),
            installed,
            otherwise,
            spare_bytes=_spare_bytes(plan),
        )


def _graphed(
    plan: PlanRecord,
    captured: Captured,
    lowering: Lowering,
    installed: Installed,
    capturer: bool | Capturer,
) -> Installed:
    """The installed program, captured as CUDA graphs after its first steps.

    Raises:
        ValueError: it cannot be; the message says why.
    """
    device = captured.device or torch.device("cpu")
    spare_bytes = None if plan.budget is None else plan.budget - plan.peak_bytes
    # What captures for a test stands in for the device, too.
    on = device if isinstance(capturer, bool) else torch.device("cuda")
    reason = why_not(lowering, plan.program, on, spare_bytes)
    if reason is not None:
        raise ValueError(f"this plan's step cannot be captured as a CUDA graph: {reason}")
    graphs = CudaGraphs(device) if isinstance(capturer, bool) else capturer
    return GraphedProgram(installed, captured, graphs).installed()


def _sharing(plan: PlanRecord, family: ArenaFamily | None) -> ArenaFamily | None:
    """The family, if the plan has addresses and may share its arena."""
    use = None if family is None else arena_use(plan.graph, plan.program)
    if family is None or use is None:
        return None
    if family.admit(use.arena_bytes, use.extra_bytes, plan.budget):
        return family
    _LOG.warning(
        "a plan with an arena of %s keeps one of its own: in one of %s, which other shapes need, "
        "its step would exceed the budget; raise the budget to have them share it",
        format_bytes(use.arena_bytes),
        format_bytes(max(family.extent_bytes, use.arena_bytes)),
    )
    return None


def _spare_bytes(plan: PlanRecord) -> int | None:
    """What gradients may take that are there when a step begins; None: as much as there is."""
    if plan.budget is None:
        return None
    spare_bytes = plan.budget - plan.peak_bytes
    if plan.record is None:
        return spare_bytes
    return max(spare_bytes + plan.record.accumulated_bytes, plan.record.dropped_bytes)


def _as_planned(plan: PlanRecord) -> AbstractContextManager[object]:
    """Autocast as it was when the plan was made, unless the caller has set one: plans are applied
    outside of the `with torch.autocast` that the steps will run in."""
    if plan.record is None or any(autocast_state()):
        return nullcontext()
    return autocast_as(plan.record.autocast)


def planned_call(plan: PlanRecord, model: nn.Module, inputs: Any = None) -> Call:
    """The user's inputs as a call, keywords in the order that was planned; without them the example
    call, zeros if it comes from a file.

    Raises:
        ValueError: there is no example call to take.
    """
    if inputs is not None:
        call = training_call(model, inputs)
        names = () if plan.record is None else plan.record.kwargs.keys
        if set(names) != call.kwargs.keys():
            return call
        return replace(call, kwargs={name: call.kwargs[name] for name in names})
    if plan.profiled is not None:
        return plan.profiled.captured.call
    if plan.record is None:
        raise ValueError("this plan was made from a cost model: it has no example inputs")
    return example_call(plan.record)


@contextmanager
def _blaming_the_file(plan: PlanRecord, inputs: Any) -> Iterator[None]:
    """Where the example call comes from a file, what is wrong with it is the file's."""
    try:
        yield
    except (ValueError, CaptureError) as error:
        if inputs is not None or plan.profiled is not None:
            raise
        reason = str(error).partition("\n")[0]
        raise PlanFileError(
            f"the example call of the plan's file does not fit this model: {reason}"
        ) from error


def _captured(plan: PlanRecord, model: nn.Module, inputs: Any) -> tuple[Captured, Lowering]:
    """The planned model's capture, or another one's if its graph is the planned one."""
    call = planned_call(plan, model, inputs)
    with _blaming_the_file(plan, inputs):
        device = device_of(model, call)
    if plan.record is not None:
        found = record_of(model, call, device)
        differs = difference(plan.record, found)
        if differs is not None:
            raise PlanFileError(f"this plan is for another model or call: {differs}. {again(plan)}")
    since = None
    if plan.profiled is not None and plan.profiled.captured.model() is model:
        # Of what has changed since then, some makes another graph and some the same.
        since = plan.profiled.captured.dependencies.changed(model)
        if since is None:
            return plan.profiled.captured, plan.profiled.lowering
    with _blaming_the_file(plan, inputs), diagnosed(model, call):
        kernels = "aten" if plan.record is None else plan.record.kernels
        captured = captured_again(
            model, call, lambda: plan.output_gradients, capture, kernels=kernels
        )
    # For the next time that this plan is applied.
    vars(plan)["_captured"] = captured
    if plan.record is not None:
        # An estimate for CUDA counts in its blocks wherever it is applied.
        block_bytes = plan.record.block_bytes
    else:
        block_bytes = backend_of(device).block_bytes
    fuse = planned_kernels(plan.record, device, block_bytes)
    made = fuse(model, captured, build(model, captured, block_bytes))
    captured, lowering = made.captured, made.lowering
    _check_fingerprint(plan, lowering.graph, since)
    lowering = _with_implementations(plan, lowering, block_bytes, device)
    return captured, planned_lowering(plan, lowering, captured, device)


def _with_implementations(
    plan: PlanRecord, lowering: Lowering, block_bytes: int, device: torch.device
) -> Lowering:
    """The lowering with the alternatives that the plan chooses from, if it chooses any."""
    chosen = {
        (run.op, run.implementation)
        for _, run in plan.program.computes
        if run.implementation is not None
    }
    if not chosen:
        return lowering
    from memopt.implementations import attach, compiled

    tensors = [t.name for t in plan.graph.tensors]
    for exact_only in (False, True):
        extended = attach(lowering, exact_only=exact_only, block_bytes=block_bytes)
        same = [t.name for t in extended.graph.tensors] == tensors
        if same and chosen <= extended.alternatives.keys():
            for reason in compiled(extended, device, chosen).values():
                raise PlanFileError(
                    f"a form of a region that this plan chooses cannot be compiled here: {reason}. "
                    f"{again(plan)}"
                )
            return extended
    raise PlanFileError(
        "this plan chooses implementations that memopt does not have here (your own families?): "
        f"apply it in the process and to the model it was made for. {again(plan)}"
    )


def _check_fingerprint(
    plan: PlanRecord, graph: Graph, since: tuple[Dependency, Any] | None
) -> None:
    found = fingerprint(graph)
    if plan.record is not None:
        planned = plan.record.fingerprint
    else:
        assert plan.profiled is not None
        planned = fingerprint(plan.profiled.lowering.graph)
    there, here = plan.record.torch_version if plan.record else "", str(torch.__version__)
    other = f"planned with torch {there}, this is {here}" if there not in ("", here) else ""
    if planned == found:
        if other:
            warnings.warn(
                f"{other}: the model's graph is the same, so the plan runs, but what was predicted "
                f"may not hold. {again(plan)}",
                stacklevel=5,
            )
        return
    if since is not None:
        reason = since[0].difference(since[1])
    else:
        reason = "the captured graphs differ although shapes and parameters are the same"
        reason += where_graphs_differ(plan, graph)
    if other:
        reason += f" ({other})"
    raise PlanFileError(f"this plan was made for another model: {reason}. {again(plan)}")
