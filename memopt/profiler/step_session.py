"""Profiles a whole training step: kernels, updates and the unplanned step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memopt.capture.training_call import training_call
from memopt.kernels.compiled.choice import check_kernels, chosen_kernels
from memopt.models.budget import format_bytes
from memopt.models.graph import Graph
from memopt.models.progress import Progress
from memopt.models.record import ModelRecord
from memopt.models.step_rules import PLAIN, StepRules
from memopt.pricing.baseline import measure_baseline
from memopt.pricing.measure import MeasureOptions, measure
from memopt.pricing.updates import update_costs
from memopt.profiler.input_errors import check_arguments, diagnosed
from memopt.profiler.session import (
    checkpoint_notes,
    forward_only,
    measured_again_if_busy,
    part_of,
    with_looks,
    with_resident,
)
from memopt.profiler.step_capture import capture_step, with_updates
from memopt.step.backend import backend_of
from memopt.step.inputs import Call, device_of
from memopt.step.loss import Loss
from memopt.step.optimizer_state import OptimizerState, optimizer_state
from memopt.step.profiled import Baseline, ProfiledStep
from memopt.step.record import record_of
from memopt.step.step_optimizer import check_splittable
from memopt.step.step_parts import StepParts
from memopt.user_code.aside import aside
from memopt.user_code.restored_state import state_restored


@aside
def profile_step(
    model: nn.Module,
    inputs: Any,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    *,
    options: MeasureOptions | None = None,
    progress: Progress | None = None,
    offload_optimizer: bool = False,
    kernels: str = "aten",
    rules: StepRules = PLAIN,
) -> ProfiledStep:
    """Capture forward, loss, backward and updates, and measure what they cost.

    Parameters, optimizer state, buffers, gradients and random state are restored. With
    `offload_optimizer`, updates are measured with their state fetched from the host and sent back,
    and the state is not resident.

    Raises:
        CaptureError, ProfileError: see `capture_step`, `measure`.
        ValueError: the optimizer cannot be split (named), or the inputs do not fit.
    """
    check_splittable(optimizer, model.named_parameters())
    call = training_call(model, inputs)
    with state_restored(model, call, *loss.parts):
        report = forward_only(progress)
        chosen = options or MeasureOptions()
        found = _profiled(
            model, call, loss, optimizer, chosen, report, offload_optimizer, kernels, rules
        )
        assert found.parts is not None
        return with_looks(found, found.parts.once, found.parts.call)


def _profiled(
    model: nn.Module,
    call: Call,
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    options: MeasureOptions,
    report: Progress,
    offload_optimizer: bool,
    kernels: str,
    rules: StepRules,
) -> ProfiledStep:
    check_kernels(kernels)
    device = device_of(model, call)
    backend = backend_of(device)
    report(0.0, "capturing the step")
    check_arguments(model, call)
    part = part_of(report, 0.05, 0.2)
    fuse = chosen_kernels(kernels, device, options, backend.block_bytes, part)
    with diagnosed(model, call, loss):
        parts = capture_step(model, call, loss, optimizer, backend.block_bytes, fuse, rules)
    state = optimizer_state(optimizer, model.parameters(), backend.block_bytes)
    stays_bytes = state.count_bytes if offload_optimizer else state.bytes_total

    def measured(options: MeasureOptions) -> tuple[Graph, Baseline]:
        report(0.2, "measuring kernels")
        with diagnosed(model, call):
            part = part_of(report, 0.2, 0.7)
            priced = measure(parts.lowering, device, options, part, parts.captured)
        report(0.7, "measuring updates")
        costs = update_costs(parts, optimizer, device, offload_optimizer, options)
        _, lowering = with_updates(parts, replace(parts.lowering, graph=priced), costs)
        graph = with_resident(lowering.graph, stays_bytes + backend.step_scalars_bytes)
        report(0.8, "measuring the unplanned step")
        # The unplanned step keeps its state on the device, wherever the plan keeps it.
        resident_bytes = graph.resident_bytes - stays_bytes + state.bytes_total
        with diagnosed(model, call, loss):
            step = measure_baseline(model, call, loss, device, optimizer, rules)
        peak_bytes = resident_bytes + step.peak_bytes + step.library_bytes
        step = replace(step, peak_bytes=peak_bytes)
        return with_resident(graph, step.library_bytes), step

    graph, baseline, busy = measured_again_if_busy(measured, options)
    captured, unpriced = with_updates(parts, parts.lowering, {})
    report(1.0, "profiled")
    return ProfiledStep(
        graph,
        unpriced,
        captured,
        baseline,
        device,
        record=_record(parts, device, (unpriced.graph, graph), baseline),
        optimizer=replace(state, bytes_total=stays_bytes),
        parts=parts,
        user_call=call,
        host_state_bytes=state.bytes_total - stays_bytes,
        notes=(*_notes(parts, state, offload_optimizer), *busy),
    )


def _record(
    parts: StepParts, device: torch.device, graphs: tuple[Graph, Graph], baseline: Baseline
) -> ModelRecord:
    return record_of(
        parts.module,
        parts.call,
        device,
        block_bytes=backend_of(device).block_bytes,
        graphs=graphs,
        library_bytes=baseline.library_bytes,
        kernels=parts.fused.kernels,
        aten_regions=parts.fused.aten_regions,
        rules=parts.rules,
        channels_last=parts.fused.channels_last,
    )


def _notes(parts: StepParts, state: OptimizerState, hosted: bool) -> tuple[str, ...]:
    """Return notes for the user on a captured step."""
    size = format_bytes(state.bytes_total)
    where = (f"On the host between updates: {size} of {state.name} state.",)
    # Planning reads the whole graph, in which the last micro-batch changes the buffers.
    once = checkpoint_notes(parts.once) if parts.rules.micro_batches > 1 else ()
    return (*(where if hosted and state.bytes_total else ()), *once, *parts.fused.notes)
