"""Runs a whole training step as an ordinary loop does, to compare planned steps with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memopt.models.step_rules import StepRules
from memopt.step.inputs import Call
from memopt.step.unheard import unheard
from memopt.user_code.own_backward import OwnBackward


def eager_step(
    model: nn.Module,
    call: Call,
    loss_of: Callable[[Any], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    rules: StepRules,
    run_backward: OwnBackward,
) -> Callable[[], None]:
    """Make a step that takes the same batch for each of its micro-batches."""
    device = next((p.device.type for p in model.parameters()), "cpu")
    scaler = torch.amp.GradScaler(device, init_scale=1.0, enabled=rules.scaled)
    if rules.scaled:
        scaler.scale(torch.zeros((), device=device))

    @unheard()
    def step() -> None:
        for _ in range(rules.micro_batches):
            given = call.detached()
            value = loss_of(model(*given.args, **given.kwargs))
            if rules.micro_batches > 1:
                value = value / rules.micro_batches
            value = scaler.scale(value)
            run_backward([value])
            del value
        if rules.scaled:
            scaler.unscale_(optimizer)
        if rules.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), rules.clip_norm, rules.norm_type)
        # A scheduler's wrapper around step() must not count these steps.
        type(optimizer).step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        scaler.update(1.0)

    return step
