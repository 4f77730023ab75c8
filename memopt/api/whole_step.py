"""Checks of requests: whether they plan the whole step, updates included, or the module alone."""

from __future__ import annotations

from typing import Any

from memopt.api.request import PlanRequest
from memopt.strategies import resolve
from memopt.strategies.base import Strategy


def takes_whole_step(strategy: Strategy, wanted: PlanRequest) -> bool:
    """Say whether a request is for a whole step, whose updates are captured.

    `whole_step`, or an option that only whole steps have, decides it. Otherwise the step is
    whole if a loss and an optimizer instance are passed, costs are measured, the strategy plans
    graphs and recomputes nothing, and gradients do not stay from step to step (`accumulate`).

    Raises:
        ValueError: a whole step is wanted and cannot be planned; the message has the remedy.
    """
    step = wanted.step
    given = step.loss_fn is not None and not isinstance(step.optimizer, str | None)
    again, estimated = strategy.features.recompute, wanted.pricing.mode == "estimate"
    asked = step.whole_step
    if asked is None and (step.offload_optimizer or step.movable or step.rules):
        asked = True
    if asked is None:
        return given and not (estimated or again or step.accumulate) and strategy.needs != "chain"
    if not asked:
        return False
    if strategy.needs == "graph" and again and not (step.movable and strategy.features.offload):
        raise ValueError(
            f"{strategy.name} plans no whole steps: take auto, a strategy for chains such as "
            "rotor, or one that recomputes nothing (olla, store-all, offload-graph), or leave "
            "whole_step out"
        )
    if estimated:
        raise ValueError('whole_step=True is measured: leave out mode="estimate"')
    if not given:
        raise ValueError("whole_step=True needs loss_fn= and optimizer=<a torch.optim instance>")
    return True


def check_engine(model: Any, wanted: PlanRequest) -> None:
    """Refuse a whole step of a model that another engine has hooks on.

    Raises:
        ValueError: it has; the message says what to do.
    """
    from memopt.step.joined_collectives import OTHER_ENGINES
    from memopt.torch_private.engine_hooks import has_engine

    if has_engine(model) and takes_whole_step(resolve(wanted.strategy), wanted):
        raise ValueError(OTHER_ENGINES)


def check_movable(wanted: PlanRequest, strategy: Strategy) -> None:
    """Refuse a request whose `movable` cannot be met.

    Raises:
        ValueError: `movable` is unreadable, the strategy moves nothing, or an option is set that
            cannot be combined with it.
    """
    from memopt.step.movable import parse_movable

    step, passes = wanted.step, wanted.passes
    parse_movable(step.movable)
    if not step.movable:
        raise ValueError(
            'steady_state=True is for steps that move parameters or state: pass movable="all" too, '
            "or leave it out (a step whose tensors stay on the device ends with nothing under way)"
        )
    if step.offload_optimizer or passes.order or passes.place:
        raise ValueError(
            "movable= goes without offload_optimizer (movable='optimizer' is more), order and place"
        )
    if strategy.needs == "chain" or not strategy.features.offload:
        raise ValueError(
            f"{strategy.name} moves no parameters: take offload-graph, or leave out movable"
        )


def check_rules(wanted: PlanRequest, strategy: Strategy) -> None:
    """Refuse a request whose `rules` its strategy cannot follow.

    Raises:
        ValueError: the request is not for a whole step, or has several micro-batches for a
            strategy that recomputes.
    """
    rules = wanted.step.rules
    if rules and wanted.step.whole_step is False:
        raise ValueError(
            "micro_batches=, clip_norm= and scaler= are for whole steps: leave out "
            "whole_step=False, or accumulate, clip and scale in your own loop"
        )
    if rules.micro_batches > 1 and strategy.features.recompute:
        raise ValueError(
            f"{strategy.name} plans no steps of several micro-batches: take one that recomputes "
            "nothing (offload-graph, olla, store-all), or leave out micro_batches and add up the "
            "gradients in your own loop (accumulate=True)"
        )


def left_on_host(host_budget_bytes: int | None, profiled: Any, *, whole_step: bool) -> int | None:
    """Subtract the optimizer's state on the host (`offload_optimizer`) from the host budget; None
    stays None.

    Raises:
        ValueError: the step was not captured whole for `offload_optimizer`, or the host budget is
            too small for the state alone.
    """
    from memopt.step.profiled import ProfiledStep

    if not whole_step or not isinstance(profiled, ProfiledStep):
        raise ValueError(
            "offload_optimizer=True is for whole steps: pass the module, loss_fn=, "
            "optimizer=<a torch.optim instance> and whole_step=True"
        )
    if host_budget_bytes is None:
        return None
    left_bytes = host_budget_bytes - profiled.host_state_bytes
    if left_bytes < 0:
        raise ValueError(
            f"host_budget={host_budget_bytes!r} is too small: the optimizer's state alone takes "
            f"{profiled.host_state_bytes} bytes of host memory; raise it, or leave out "
            "offload_optimizer"
        )
    return left_bytes
