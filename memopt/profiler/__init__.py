"""Turns a PyTorch model into the cost model: capture, prices, baseline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.optim import Optimizer

from memopt.capture.own_loss import has_own_loss, own_loss
from memopt.models.device import Device
from memopt.models.step_rules import PLAIN, StepRules
from memopt.pricing.cache import ProfileCache as ProfileCache
from memopt.pricing.measure import MeasureOptions as MeasureOptions
from memopt.profiler.estimate import estimate_model as estimate_model
from memopt.profiler.session import profile_model as profile_model
from memopt.profiler.step_session import profile_step as profile_step
from memopt.step.inputs import to_call
from memopt.step.joined_collectives import OTHER_ENGINES, only_shards
from memopt.step.loss import Loss as Loss
from memopt.step.loss import check_targets
from memopt.step.profiled import Profiled as Profiled


def profiled_of(
    model: Any,
    inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None,
    targets: tuple[Any, ...],
    optimizer: Any,
    estimate_for: Device | None,
    cache: bool,
    whole_step: bool = False,
    offload_optimizer: bool = False,
    loss_alone: bool = False,
    kernels: str = "aten",
    rules: StepRules = PLAIN,
    progress: Callable[[float, str], None],
) -> Profiled:
    """Profile the model that `memopt.plan` was given. A Profiled is returned as it is; a module is
    measured, or estimated for a device. With `whole_step`, a loss and an optimizer instance,
    updates are included, as the `rules` say. With `loss_alone`, outputs that the loss does not read
    are not returned.

    Raises:
        ValueError: the model is something else, or a module without inputs.
    """
    if isinstance(model, Profiled):
        return model
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise ValueError(
            f"plan takes an nn.Module with example inputs, or a memopt Chain or Graph, got {kind}"
        )
    if inputs is None:
        raise ValueError("plan(model, inputs): example inputs are needed to capture the model")
    loss = _loss(inputs, loss_fn, targets, loss_alone)
    if estimate_for is not None:
        return estimate_model(
            model,
            inputs,
            estimate_for,
            loss=loss,
            optimizer=optimizer,
            kernels=kernels,
            progress=progress,
        )
    options = MeasureOptions(cache=ProfileCache() if cache else None)
    if whole_step and not only_shards(model):
        raise ValueError(OTHER_ENGINES)
    if whole_step and loss is not None and isinstance(optimizer, Optimizer):
        how: dict[str, Any] = {"options": options, "kernels": kernels, "progress": progress}
        how |= {"offload_optimizer": offload_optimizer, "rules": rules}
        return profile_step(model, inputs, loss, optimizer, **how)
    return profile_model(
        model,
        inputs,
        loss=loss,
        optimizer=optimizer,
        options=options,
        kernels=kernels,
        progress=progress,
    )


def _loss(
    inputs: Any, loss_fn: Callable[..., Any] | None, targets: tuple[Any, ...], alone: bool
) -> Loss | None:
    check_targets(loss_fn, targets)
    if loss_fn is None and alone:
        if not has_own_loss(to_call(inputs)):
            raise ValueError(
                'returns="loss" needs to know the loss: pass loss_fn=, or call the model with '
                "labels, from which it computes its own"
            )
        loss_fn = own_loss
    return None if loss_fn is None else Loss(loss_fn, targets, alone)
