"""Measures planned steps on the real model and restores its state."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.executor.apply import apply_plan, planned_call
from memopt.executor.recorder import recorder_for
from memopt.models.record import OutputGradients
from memopt.models.recording import Recorded
from memopt.pricing.baseline import clear_gradients
from memopt.pricing.memory import metered
from memopt.stages import LastCapture
from memopt.step.backend import backend_of, timed
from memopt.step.dropped_outputs import without
from memopt.step.inputs import Call, device_of
from memopt.step.loss import as_targets, differentiable
from memopt.step.model_outputs import dense_strides
from memopt.step.ranks import ranks_of, together
from memopt.step.step_time import median_step_s
from memopt.step.unheard import unheard
from memopt.user_code.aside import aside
from memopt.user_code.own_backward import OwnBackward
from memopt.user_code.reached_state import ReachedState
from memopt.user_code.restored_state import StorageCopies, state_restored

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

RECORDED_STEPS = 5

Measured = tuple[int, float]
"""(total peak bytes, median seconds) of a step."""


@dataclass(frozen=True)
class _Steps:
    """Steps of one model on its example call, planned or not."""

    plan: PlanRecord
    model: nn.Module
    call: Call
    loss_fn: Callable[..., Any] | None
    targets: tuple[Any, ...]
    world: ReachedState

    @property
    def device(self) -> torch.device:
        """Device of the steps."""
        return device_of(self.model, self.call)

    def restored(self) -> AbstractContextManager[StorageCopies]:
        """Return a context that restores the state of model, inputs, loss and targets."""
        return state_restored(self.model, self.call, self.loss_fn, self.targets)

    def clear(self) -> None:
        """Remove gradients, and restore Python objects to their state before a step."""
        clear_gradients(self.model, self.call.tensors())
        self.world.restore()

    @unheard()
    def run(self, module: nn.Module, run_backward: OwnBackward) -> Any:
        """Run a step of `module` (`model`, or planned) and return its output."""
        output = self._output(module)
        run_backward([loss_of(output, self.loss_fn, self.targets, self.plan.output_gradients)])
        return output

    @unheard()
    def _output(self, module: nn.Module) -> Any:
        """Call the module and return the part of its output that a training loop holds."""
        dropped = self.plan.output_gradients.dropped
        given = self.call.detached()
        return without(module(*given.args, **given.kwargs), dropped)

    def seconds(self, module: nn.Module, run_backward: OwnBackward) -> float:
        """Return the seconds of a step."""
        self.clear()
        return timed(partial(self.run, module, run_backward), self.device)

    def peak_bytes(self, module: nn.Module, kept: StorageCopies) -> int:
        """Return the total peak bytes of a step after a first one. The step holds its output to its
        end and, while it computes its loss, the last step's output."""
        self.clear()
        with kept.first_run():
            self.run(module, kept.backward)
        self.clear()  # where the device's allocator counts, what goes inside would be missing
        with metered(self.device) as use:
            for _ in range(2 if self.plan.loss_bytes else 1):
                self.clear()
                output = None
                output = self._output(module)
                with unheard():
                    loss = loss_of(output, self.loss_fn, self.targets, self.plan.output_gradients)
                kept.backward([loss])
            del output, loss
        return unmetered_bytes(self.plan, self.device) + use.peak_bytes


def _steps(
    plan: PlanRecord, model: nn.Module, inputs: Any, loss_fn: Any, targets: tuple[Any, ...]
) -> _Steps:
    """Prepare steps on tensors detached from the user's autograd graph."""
    call = planned_call(plan, model, inputs).detached()
    given = Call(as_targets(targets), {}).detached().args
    world = ReachedState((model, call.args, call.kwargs, loss_fn, given))
    return _Steps(plan, model, call, loss_fn, given, world)


@aside
def measure_step(
    plan: PlanRecord,
    model: nn.Module,
    inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    last: LastCapture | None = None,
) -> Measured:
    """Return the peak and time of a planned step; see `Plan.check`, and `apply_plan` for `last`."""
    steps = _steps(plan, model, inputs, loss_fn, targets)
    planned = apply_plan(plan, model, inputs, last=last)
    with together(ranks_of(model)), steps.restored() as kept:
        peak_bytes = steps.peak_bytes(planned, kept)
        run = partial(steps.run, planned, kept.backward)
        return peak_bytes, median_step_s(run, steps.clear, steps.device)


@aside
def measure_in_turn(
    plans: Sequence[PlanRecord],
    model: nn.Module,
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    rounds: int = 5,
    progress: Callable[[float, str], None] | None = None,
) -> tuple[Measured, tuple[Measured, ...]]:
    """Measure the peak and time of the unplanned step and of each plan's, on the example inputs.

    Every round runs each of them once, so that disturbances of the machine hit all alike. The
    model's parameters, buffers, gradients and random state are restored.

    Args:
        plans: at least one, all of this model.
        model: the planned module.
        loss_fn: the loss, `loss_fn(output, *targets)`; None: the sum of the outputs.
        targets: what the loss takes beside the output.
        rounds: timed rounds, at least 1; a metered one, which also warms up, comes first.
        progress: called after every step; may raise KeyboardInterrupt.
    """
    steps = _steps(plans[0], model, None, loss_fn, targets)
    modules = [model, *(apply_plan(plan, model) for plan in plans)]
    report = progress or (lambda _fraction, _what: None)
    peaks: list[int] = []
    times: list[list[float]] = [[] for _ in modules]
    with steps.restored() as kept:
        for module in modules:
            peaks.append(steps.peak_bytes(module, kept))
            report(len(peaks) / (len(modules) * (rounds + 1)), "measuring peaks")
        for done in range(1, rounds + 1):
            for seconds, module in zip(times, modules, strict=True):
                seconds.append(steps.seconds(module, kept.backward))
            report((done + 1) / (rounds + 1), "measuring step times")
    medians = [statistics.median(seconds) for seconds in times]
    baseline, *planned = zip(peaks, medians, strict=True)
    return baseline, tuple(planned)


@aside
def record_step(
    plan: PlanRecord,
    model: nn.Module,
    inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    last: LastCapture | None = None,
) -> tuple[Recorded, ...]:
    """Record when each instruction of a step runs: the step of median time of RECORDED_STEPS, after
    a first one. Arguments and errors are those of `Plan.check`; for `last`, see `apply_plan`."""
    steps = _steps(plan, model, inputs, loss_fn, targets)
    recorder = recorder_for(steps.device)
    module = apply_plan(plan, model, inputs, recorder=recorder, last=last)
    found: list[tuple[float, tuple[Recorded, ...]]] = []
    with steps.restored() as kept:
        for number in range(RECORDED_STEPS + 1):
            with nullcontext() if number else kept.first_run():
                seconds = steps.seconds(module, kept.backward)
            found.append((seconds, recorder.take()))
    rest = sorted(found[1:], key=lambda pair: pair[0])
    return rest[len(rest) // 2][1]


def unmetered_bytes(plan: PlanRecord, device: torch.device) -> int:
    """Return the bytes that a plan charges as resident and a metered step does not allocate. The
    loss, looks at values and the runtime's token are metered as well, and count once."""
    look_bytes = 0 if plan.record is None else plan.record.look_bytes
    own_bytes = plan.loss_bytes + look_bytes + backend_of(device).step_scalars_bytes
    return plan.resident_bytes - own_bytes


class _Sum(torch.autograd.Function):
    """The sum of a tensor, with a real tensor as gradient, as most losses hand over; `sum()` would
    hand over an expanded scalar, a tangent without memory."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, strides: tuple[int, ...] | None) -> torch.Tensor:
        ctx.like = (value.shape, strides or dense_strides(value), value.dtype, value.device)
        total = value.detach().sum()
        return total.real if total.is_complex() else total

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> tuple[torch.Tensor, None]:
        shape, strides, dtype, device = ctx.like
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).fill_(1), None


def loss_of(output: Any, loss_fn: Any, targets: Any, gradients: OutputGradients) -> Any:
    """Return the root of a measured step's backward: the user's loss, or the sum of the outputs."""
    return summed(output, gradients) if loss_fn is None else loss_fn(output, *as_targets(targets))


def summed(output: Any, gradients: OutputGradients) -> torch.Tensor:
    """Sum the differentiable outputs. Each that has a tangent in the plan gets a real one, in its
    planned layout."""
    total = torch.zeros((), device="cpu")
    strides = dict(gradients.strides)
    for position, value in differentiable(output, gradients.unused).items():
        layout = strides.get(position)
        part: torch.Tensor = _Sum.apply(value, layout)  # type: ignore[no-untyped-call]  # torch's
        total = total.to(part.device) + part
    return total
