"""Profiles a model: its capture, costs and baseline, for planning and running."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Node

from memopt.capture.captures import reused_capture
from memopt.capture.training_call import training_call
from memopt.kernels.compiled.choice import check_kernels, chosen_kernels
from memopt.models.budget import format_bytes
from memopt.models.device import in_blocks
from memopt.models.garbage import full_collections_deferred
from memopt.models.graph import Graph
from memopt.models.progress import Progress
from memopt.models.record import ANY_LOSS, OutputGradients
from memopt.pricing.baseline import LossUse, loss_text, measure_baseline, measure_loss
from memopt.pricing.cache import Cost, ProfileCache
from memopt.pricing.measure import MeasureOptions, measure, priced_for
from memopt.pricing.memory import metered
from memopt.profiler.input_errors import check_arguments, diagnosed
from memopt.step.backend import backend_of
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.step.input_values import UNREADABLE
from memopt.step.inputs import Call, device_of
from memopt.step.loss import Loss
from memopt.step.nodes import CHECKPOINTED
from memopt.step.optimizer_state import optimizer_state
from memopt.step.profiled import Baseline, Profiled
from memopt.step.ranks import check_same_step, check_together, largest
from memopt.step.record import record_of
from memopt.user_code.aside import aside
from memopt.user_code.own_backward import computed_as_leaves
from memopt.user_code.restored_state import state_restored

P = TypeVar("P", bound=Profiled)

_SUSPICIOUS = 2.0
"""If the kernels add up to more than this many times the step, the machine was busy."""


def forward_only(progress: Progress | None) -> Progress:
    """Return progress that never goes back, even if a part is measured again. None: no report."""
    most = 0.0

    def report(fraction: float, what: str) -> None:
        nonlocal most
        most = max(most, fraction)
        if progress is not None:
            progress(most, what)

    return report


def part_of(report: Progress, start: float, end: float) -> Progress:
    """Return a part's progress, reported as from `start` to `end` of the whole."""
    return lambda fraction, what: report(start + (end - start) * fraction, what)


@aside
def profile_model(
    model: nn.Module,
    inputs: Any,
    *,
    loss: Loss | None = None,
    optimizer: str | torch.optim.Optimizer | None = None,
    options: MeasureOptions | None = None,
    output_gradients: OutputGradients = ANY_LOSS,
    kernels: str = "aten",
    progress: Progress | None = None,
) -> Profiled:
    """Capture a model and measure what its step costs on its own device.

    Args:
        model: the module, in the mode to train it in.
        inputs: a tensor, a tuple of positional or a dict of keyword arguments.
        loss: the user's loss; its memory is charged at the loss boundary, and outputs that it
            does not use get no gradient.
        optimizer: its state is charged as resident: a name or an instance.
        options: the limits of measuring, and the cache.
        output_gradients: used where `loss` is not given; see `capture`.
        kernels: "aten", "compiled", "auto" or "tiled"; see `memopt.plan`.
        progress: called with (fraction, what).

    Raises:
        CaptureError, ProfileError, ValueError: see `capture`, `measure`, `to_call`.
    """
    check_together(model)
    call = training_call(model, inputs)
    restored = state_restored(model, call, *(loss.parts if loss else ()))
    with computed_as_leaves(model), restored:
        report = forward_only(progress)
        found = _profiled(model, call, loss, optimizer, options, output_gradients, kernels, report)
        return with_looks(found, found.captured, call)


def _profiled(
    model: nn.Module,
    call: Call,
    loss: Loss | None,
    optimizer: str | torch.optim.Optimizer | None,
    options: MeasureOptions | None,
    output_gradients: OutputGradients,
    kernels: str,
    report: Progress,
) -> Profiled:
    check_kernels(kernels)
    chosen = options or MeasureOptions(cache=ProfileCache())
    device = device_of(model, call)
    backend = backend_of(device)
    report(0.0, "capturing the model")
    check_arguments(model, call)
    used = cache(
        lambda: measure_loss(model, call, loss, device) if loss else LossUse(0, output_gradients)
    )
    with diagnosed(model, call, loss), full_collections_deferred():
        captured = reused_capture(model, call, lambda: used().gradients, kernels=kernels)
        part = part_of(report, 0.05, 0.2)
        fuse = chosen_kernels(kernels, device, chosen, backend.block_bytes, part)
        made = fuse(model, captured, build(model, captured, backend.block_bytes))
    captured, lowering = made.captured, made.lowering
    check_same_step(f"{one.name} ({one.target})" for one in lowering.graph.operators)

    def measured(options: MeasureOptions) -> tuple[Graph, Baseline]:
        report(0.2, "measuring kernels")
        with diagnosed(model, call):
            graph = measure(lowering, device, options, part_of(report, 0.2, 0.8), captured)
        report(0.8, "measuring the unplanned step")
        with diagnosed(model, call, loss):
            return graph, _baseline(model, call, loss, device, lowering, options)

    graph, step, notes = measured_again_if_busy(measured, chosen)
    state = optimizer_state(optimizer, model.parameters(), backend.block_bytes)
    loss_bytes = in_blocks(used().kept_bytes, backend.block_bytes)
    record = record_of(
        model,
        call,
        device,
        block_bytes=backend.block_bytes,
        graphs=(lowering.graph, graph),
        output_gradients=captured.outputs.gradients,
        loss_bytes=loss_bytes,
        library_bytes=step.library_bytes,
        kernels=made.kernels,
        aten_regions=made.aten_regions,
        channels_last=made.channels_last,
    )
    more_bytes = state.bytes_total + step.library_bytes + backend.step_scalars_bytes + loss_bytes
    graph = with_resident(graph, more_bytes, used().boundary_bytes)
    # The unplanned step was metered with its loss.
    baseline = replace(step, peak_bytes=graph.resident_bytes - loss_bytes + step.peak_bytes)
    report(1.0, "profiled")
    known = state if optimizer else None
    notes = (*made.notes, *notes)
    return Profiled(graph, lowering, captured, baseline, device, record, notes, known)


def with_looks(profiled: P, captured: Captured, call: Call) -> P:
    """Charge as resident what a look at the inputs' values takes, before each planned step."""
    block_bytes, look_bytes = backend_of(profiled.torch_device).block_bytes, 0
    for value in captured.dependencies.values:
        with metered(profiled.torch_device) as use, contextlib.suppress(*UNREADABLE):
            value.read(call.leaves)
        look_bytes = max(look_bytes, in_blocks(use.peak_bytes, block_bytes))
    if not look_bytes or profiled.record is None:
        return profiled
    graph = with_resident(profiled.graph, look_bytes, profiled.graph.boundary_bytes)
    return replace(profiled, graph=graph, record=replace(profiled.record, look_bytes=look_bytes))


def with_resident(graph: Graph, more_bytes: int, boundary_bytes: int = 0) -> Graph:
    """Charge more resident bytes, and what the loss needs at its boundary."""
    extra_bytes = graph.extra_resident_bytes + more_bytes
    return replace(graph, extra_resident_bytes=extra_bytes, boundary_bytes=boundary_bytes)


_BUSY = (
    "the kernels, measured one by one, take {ratio:.1f} times as long as the unplanned step: "
    "the machine seems busy, and the plan's times are too high; plan again when it is idle"
)


def measured_again_if_busy(
    measured: Callable[[MeasureOptions], tuple[Graph, Baseline]], options: MeasureOptions
) -> tuple[Graph, Baseline, tuple[str, ...]]:
    """Measure kernels and the unplanned step, again if the kernels take far longer than the step.

    Such costs are from a busy moment, perhaps cached: they are renewed, in the cache too. If that
    does not help, the note says so.
    """
    graph, step = measured(options)
    # Ranks that measure together all measure again, or none does.
    (ratio,) = largest([_kernels_s(graph) / step.step_time_s])
    if ratio <= _SUSPICIOUS:
        return graph, step, ()
    graph, step = measured(replace(options, renew=True))
    (ratio,) = largest([_kernels_s(graph) / step.step_time_s])
    return graph, step, (_BUSY.format(ratio=ratio),) if ratio > _SUSPICIOUS else ()


def _kernels_s(graph: Graph) -> float:
    return sum(operator.time_s for operator in graph.operators)


def _baseline(
    model: nn.Module,
    call: Call,
    loss: Loss | None,
    device: torch.device,
    lowering: Lowering,
    options: MeasureOptions,
) -> Baseline:
    """Measure the unplanned step, or read it from the cache; its peak omits resident bytes."""
    key = _baseline_key(lowering, device, loss)
    cache = options.cache
    known = None
    if cache is not None and key is not None and not options.renew:
        known = cache.load([key]).get(key)
    # A zero step time marks a damaged row. Of ranks that measure together all know it, or all
    # measure.
    (unknown,) = largest([float(known is None or known.time_s <= 0)])
    if known is not None and not unknown:
        return Baseline(known.workspace_bytes, known.time_s, True, sum(known.output_bytes))
    measured = measure_baseline(model, call, loss, device)
    if cache is not None and key is not None:
        kept = (measured.library_bytes,) if measured.library_bytes else ()
        cache.store({key: Cost(measured.step_time_s, measured.peak_bytes, kept)})
    return measured


def _baseline_key(lowering: Lowering, device: torch.device, loss: Loss | None) -> str | None:
    """Return the baseline's cache key; None for losses without a text (closures, partials...)."""
    function = "" if loss is None else loss_text(loss)
    if function is None:
        return None
    alone = " alone" if loss is not None and loss.alone else ""
    text = "\n".join([function + alone, *(one.text for one in lowering.signatures)])
    digest = hashlib.sha256(text.encode()).hexdigest()
    return f"{priced_for(device)}|baseline {digest}"


def loss_notes(captured: Captured, *, covered: bool) -> tuple[str, ...]:
    """Return notes on the loss of a captured model.

    Args:
        captured: the captured model; a scalar among its outputs with gradients is its loss.
        covered: whether the user's own loss is charged, or the step is planned as a whole.
    """
    dropped = captured.outputs.gradients.dropped
    if dropped:
        what = "output" if len(dropped) == 1 else "outputs"
        return (
            f"{len(dropped)} {what} that the loss does not read: not returned by planned steps "
            '(returns="loss").',
        )
    outputs = [tangent.meta["val"] for tangent in captured.tangents]
    others = [value for value in outputs if value.dim()]
    if len(others) == len(outputs):
        return () if covered else (_MODULE_ONLY,)
    if not others:
        return ()
    size_bytes = sum(math.prod(value.shape) * value.element_size() for value in others)
    what = "another output" if len(others) == 1 else f"{len(others)} other outputs"
    return (
        f"The model returns a scalar (its loss) beside {what}; gradients of "
        f"{format_bytes(size_bytes)} for the rest are charged, and made, as well. If you train "
        "with that loss alone, say so: loss_fn=lambda output: output.loss (or output[0]).",
    )


def checkpoint_notes(captured: Captured) -> tuple[str, ...]:
    """Return notes on buffers that the model updates inside `torch.utils.checkpoint`."""
    updated = zip(captured.mutated, captured.forward_outputs, strict=False)
    # Dynamo marks the nodes of a checkpointed part.
    names = [
        repr(captured.primals[index].name)
        for index, value in updated
        if isinstance(value, Node) and CHECKPOINTED in value.meta
    ]
    if not names:
        return ()
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (
        f"torch.utils.checkpoint runs what it wraps twice in a step, and so updates {names[0]}"
        f"{more} twice; planned steps update it once, as the model without the checkpoint does.",
    )


_MODULE_ONLY = (
    "The budget covers the module; pass loss_fn= to have the memory of your loss charged too."
)
