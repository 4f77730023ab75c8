"""Makes train steps of plans."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.executor.in_step import APPLYING, InStep
from memopt.executor.step_checks import plan_of_step
from memopt.executor.train_step import TrainStep
from memopt.models.step_rules import scales
from memopt.step.ranks import ranks_of

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


def train_step(
    plan: PlanRecord,
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    *,
    interpreted: bool = False,
    checked: bool = False,
    undo: bool = False,
    scaler: Any = None,
) -> TrainStep:
    """Make a train step; see `Plan.train_step`."""
    ranks = ranks_of(model)
    with nullcontext() if ranks is None else ranks.failing_together(APPLYING):
        plan = plan_of_step(plan, model, loss_fn, optimizer, undo=undo, scaler=scaler)
        step = TrainStep(
            plan,
            optimizer,
            interpreted=interpreted,
            checked=checked,
            undo=undo,
            scaler=scaler if scales(scaler) else None,
        )
    if ranks is not None:
        step.run_on(InStep(ranks), plan)
    return step
