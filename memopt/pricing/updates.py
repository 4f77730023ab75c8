"""Measures costs: time and workspace of every distinct parameter update."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from memopt.pricing.cache import Cost
from memopt.pricing.measure import MeasureOptions, priced_for
from memopt.pricing.memory import metered
from memopt.step.backend import timed
from memopt.step.shards import local_part
from memopt.step.step_optimizer import HostState, group_of, update_one
from memopt.step.step_parts import StepParts

_ROUNDS = 3
_NOT_PRICED = ("params", "lr", "initial_lr")
"""What an update's time does not depend on: a schedule changes the learning rate."""


def update_costs(
    parts: StepParts,
    optimizer: torch.optim.Optimizer,
    device: torch.device,
    hosted: bool,
    options: MeasureOptions,
) -> dict[str, tuple[float, int]]:
    """Return seconds and workspace bytes of each update, measured once per distinct update.

    They are cached as kernels' costs are, so that planning a step again (within the smallest budget
    that an error named, say) prices the same step.

    Args:
        parts: the captured step.
        optimizer: one of `PER_PARAMETER`.
        device: where the updates run.
        hosted: whether the state is fetched from the host and sent back.
        options: of measuring.
    """
    parameters = dict(parts.module.named_parameters())
    place = priced_for(device)
    keys: dict[str, str] = {}
    calls: dict[str, partial[Cost]] = {}
    for site in parts.sites:
        parameter = parameters[site.name]
        group = group_of(optimizer, parameter)
        stride = tuple(site.gradient.meta["val"].stride())
        local = local_part(parameter)
        shapes = f"{tuple(parameter.shape)} {tuple(local.shape)} {local.stride()} {stride}"
        chosen = {name: value for name, value in sorted(group.items()) if name not in _NOT_PRICED}
        rate = type(group.get("lr")).__name__
        at = f"{parameter.dtype} {shapes} state on the {'host' if hosted else 'device'}"
        call = f"{type(optimizer).__name__} {rate} {chosen} {at}"
        key = keys[site.name] = f"{place}|{call}"
        calls[key] = partial(_measured, type(optimizer), group, parameter, stride, device, hosted)
    costs = options.costs(calls, lambda missing: {key: calls[key]() for key in missing})
    return {name: (costs[key].time_s, costs[key].workspace_bytes) for name, key in keys.items()}


def _measured(
    kind: type[torch.optim.Optimizer],
    group: Mapping[str, Any],
    like: torch.Tensor,
    gradient_stride: tuple[int, ...],
    device: torch.device,
    hosted: bool,
) -> Cost:
    """Measure the update of a stand-in parameter with its state present, on the host if hosted."""
    stand_in = torch.nn.Parameter(torch.zeros_like(like))
    shape = local_part(like).shape
    gradient = torch.empty_strided(shape, gradient_stride, dtype=like.dtype, device=device)
    gradient.zero_()
    optimizer = kind([stand_in])  # type: ignore[call-arg]  # all in PER_PARAMETER have a default lr
    optimizer.param_groups[0].update({k: v for k, v in group.items() if k != "params"})
    update = HostState(optimizer).update if hosted else partial(update_one, optimizer)
    update(stand_in, gradient)
    with metered(device) as use:
        update(stand_in, gradient)
    times = [timed(partial(update, stand_in, gradient), device) for _ in range(_ROUNDS)]
    return Cost(statistics.median(times), max(0, use.peak_bytes - max(0, use.end_bytes)), ())
