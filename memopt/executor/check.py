"""Measuring a planned step on the real model, which stays as it was."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.executor.apply import apply_plan, planned_call
from memopt.models.record import OutputGradients
from memopt.profiler.backend import backend_of, timed
from memopt.profiler.baseline import as_targets, differentiable
from memopt.profiler.inputs import Call
from memopt.profiler.memory import metered
from memopt.profiler.model_outputs import dense_strides
from memopt.profiler.restored_state import state_restored
from memopt.profiler.session import device_of

if TYPE_CHECKING:
    from memopt.plan import Plan

_MINIMUM_STEPS = 3
_ENOUGH_S = 2.0
_MOST_STEPS = 10


def measure_step(
    plan: Plan,
    model: nn.Module,
    inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
) -> tuple[int, float]:
    """(total peak bytes, median seconds) of a step under the plan; see `Plan.check`."""
    call = planned_call(plan, inputs).detached()
    planned = apply_plan(plan, model, inputs)
    device = device_of(model, call)

    def step() -> Any:
        output = planned(*call.args, **call.kwargs)
        loss_of(output, loss_fn, targets, plan.output_gradients).backward()
        return output

    times: list[float] = []
    with state_restored(model, call, loss_fn, targets) as kept:
        clear_gradients(model, call.tensors())
        with kept.first_run():
            step()
        clear_gradients(model, call.tensors())
        peak_bytes = metered_peak(plan, planned, model, call, loss_fn, targets)
        while len(times) < _MINIMUM_STEPS or (sum(times) < _ENOUGH_S and len(times) < _MOST_STEPS):
            clear_gradients(model, call.tensors())
            times.append(timed(step, device))
    return unmetered_bytes(plan, device) + peak_bytes, statistics.median(times)


def metered_peak(
    plan: Plan,
    module: nn.Module,
    model: nn.Module,
    call: Call,
    loss_fn: Callable[..., Any] | None,
    targets: tuple[Any, ...],
) -> int:
    """Peak bytes above its start of a step of `module`, which is `model` or planned, not its first.
    It holds its output to its end and, while it makes its loss, the last step's."""
    device = device_of(model, call)
    with metered(device) as use:
        for _ in range(2 if plan.loss_bytes else 1):
            clear_gradients(model, call.tensors())
            output = None
            output = module(*call.args, **call.kwargs)
            loss = loss_of(output, loss_fn, targets, plan.output_gradients)
            loss.backward()
        del output, loss
    return use.peak_bytes


def unmetered_bytes(plan: Plan, device: torch.device) -> int:
    """What a plan charges as resident and a metered step does not allocate. The loss and the
    runtime's token are charged, and metered: they count once."""
    return plan.resident_bytes - plan.loss_bytes - backend_of(device).step_scalars_bytes


class _Sum(torch.autograd.Function):
    """The sum of a tensor whose gradient is a real tensor, handed over to the backward as most
    losses do; `sum()` would hand over an expanded scalar, a tangent without memory."""

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
    """Where a measured step's backward begins: the user's loss, or else the sum of the outputs."""
    return summed(output, gradients) if loss_fn is None else loss_fn(output, *as_targets(targets))


def summed(output: Any, gradients: OutputGradients) -> torch.Tensor:
    """The sum of the differentiable outputs, handing a real tangent to each that the plan has one
    for, in the layout that it was planned in."""
    total = torch.zeros(())
    strides = dict(gradients.strides)
    for position, value in differentiable(output, gradients.unused).items():
        layout = strides.get(position)
        part: torch.Tensor = _Sum.apply(value, layout)  # type: ignore[no-untyped-call]  # torch's
        total = total.to(part.device) + part
    return total


def clear_gradients(model: nn.Module, inputs: list[torch.Tensor]) -> None:
    """No gradients on parameters and inputs, as before a step."""
    for tensor in (*model.parameters(), *inputs):
        if tensor.is_leaf:
            tensor.grad = None
