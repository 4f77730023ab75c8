"""Measuring several plans of one model, and the model without a plan, step by step in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from memopt.executor.apply import apply_plan, planned_call
from memopt.executor.check import (
    clear_gradients,
    loss_of,
    metered_peak,
    unmetered_bytes,
)
from memopt.profiler.backend import timed
from memopt.profiler.restored_state import state_restored
from memopt.profiler.session import device_of

if TYPE_CHECKING:
    from memopt.plan import Plan

Measured = tuple[int, float]
"""(total peak bytes, median seconds) of a step."""


def measure_in_turn(
    plans: Sequence[Plan],
    model: nn.Module,
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    rounds: int = 5,
    progress: Callable[[float, str], None] | None = None,
) -> tuple[Measured, tuple[Measured, ...]]:
    """The unplanned step's peak and time, and each plan's, of the planned example inputs.

    Every round runs each of them once, so that what disturbs the machine disturbs all alike. The
    model's parameters, buffers, gradients and random state are left as they were.

    Args:
        plans: at least one, all of this model.
        model: the planned module.
        loss_fn: the loss, `loss_fn(output, *targets)`; None: the sum of the outputs.
        targets: what the loss takes beside the output.
        rounds: timed rounds, at least 1; a metered one, which also warms up, comes first.
        progress: called after every step; may raise KeyboardInterrupt.
    """
    call = planned_call(plans[0]).detached()
    device = device_of(model, call)
    gradients = plans[0].output_gradients
    modules = [model, *(apply_plan(plan, model) for plan in plans)]
    resident_bytes = unmetered_bytes(plans[0], device)
    report = progress or (lambda _fraction, _what: None)
    total = len(modules) * (rounds + 1)

    def step(module: nn.Module) -> Any:
        output = module(*call.args, **call.kwargs)
        loss_of(output, loss_fn, targets, gradients).backward()
        return output

    peaks: list[int] = []
    times: list[list[float]] = [[] for _ in modules]
    with state_restored(model, call, loss_fn, targets) as kept:
        for module in modules:
            clear_gradients(model, call.tensors())
            with kept.first_run():
                step(module)
            peak_bytes = metered_peak(plans[0], module, model, call, loss_fn, targets)
            peaks.append(resident_bytes + peak_bytes)
            report(len(peaks) / total, "measuring peaks")
        for done in range(1, rounds + 1):
            for seconds, module in zip(times, modules, strict=True):
                clear_gradients(model, call.tensors())
                seconds.append(timed(partial(step, module), device))
            report((done + 1) / (rounds + 1), "measuring step times")
    medians = [statistics.median(seconds) for seconds in times]
    baseline, *planned = zip(peaks, medians, strict=True)
    return baseline, tuple(planned)
