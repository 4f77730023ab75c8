"""Recording a planned step of the real model, which stays as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn

from memopt.executor.apply import apply_plan, planned_call
from memopt.executor.check import clear_gradients, loss_of
from memopt.executor.recorder import recorder_for
from memopt.models.recording import Recorded
from memopt.profiler.backend import timed
from memopt.profiler.restored_state import state_restored
from memopt.profiler.session import device_of

if TYPE_CHECKING:
    from memopt.plan import Plan

STEPS = 5


def record_step(
    plan: Plan,
    model: nn.Module,
    inputs: Any = None,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
) -> tuple[Recorded, ...]:
    """What a step under the plan does when: the one of median time of STEPS, after a first one.

    Arguments and errors are those of `Plan.check`.
    """
    call = planned_call(plan, inputs).detached()
    device = device_of(model, call)
    recorder = recorder_for(device)
    module = apply_plan(plan, model, inputs, recorder=recorder)

    def step() -> None:
        output = module(*call.args, **call.kwargs)
        loss_of(output, loss_fn, targets, plan.output_gradients).backward()

    found: list[tuple[float, tuple[Recorded, ...]]] = []
    with state_restored(model, call, loss_fn, targets) as kept:
        for number in range(STEPS + 1):
            clear_gradients(model, call.tensors())
            with nullcontext() if number else kept.first_run():
                seconds = timed(step, device)
            found.append((seconds, recorder.take()))
    rest = sorted(found[1:], key=lambda pair: pair[0])
    return rest[len(rest) // 2][1]
