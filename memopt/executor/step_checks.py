"""Checks that a model, optimizer and scaler are the planned ones before a train step is made."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn

from memopt.capture.remedies import is_data_parallel
from memopt.errors import ExecutionError, GuardError
from memopt.executor.recaptured import with_step
from memopt.models.budget import format_bytes
from memopt.models.step_rules import StepRules, scales
from memopt.step.joined_collectives import only_shards
from memopt.step.optimizer_state import optimizer_state
from memopt.step.profiled import ProfiledStep
from memopt.step.ranks import sharers_of
from memopt.step.shards import local_part
from memopt.step.step_optimizer import check_hooks, check_splittable
from memopt.torch_private.modules import registered_in

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


class StepParameters:
    """The parameters of a train step, looked up and checked before each step.

    Slow checks are repeated only when the model registers other modules or parameters than before,
    or the optimizer has others."""

    def __init__(self, profiled: ProfiledStep, optimizer: torch.optim.Optimizer) -> None:
        assert profiled.parts is not None
        self._profiled, self._optimizer = profiled, optimizer
        self._module = profiled.parts.module
        self._modules: list[nn.Module] = []
        self._registered: list[int] = []
        self._trained: list[int] = []
        self._held: list[Any] = []
        self._all: dict[str, nn.Parameter] = {}

    def now(self) -> dict[str, nn.Parameter]:
        """Return the parameters under all their names in the step's module.

        Raises:
            GuardError: the optimizer trains other parameters than the planned ones.
            ValueError: the optimizer or a gradient has hooks.
            ExecutionError: a parameter has a gradient.
        """
        groups = self._optimizer.param_groups
        trained = [*map(id, chain.from_iterable(group["params"] for group in groups))]
        if self._ids() != self._registered or trained != self._trained:
            self._look(trained)
        check_hooks(self._optimizer, self._all)
        for name, parameter in self._all.items():
            if parameter.grad is not None:
                raise ExecutionError(
                    f"{name.removeprefix('model.')} has a gradient from before: train steps do "
                    "not add to it; set it to None first, as model.zero_grad() does"
                )
        return self._all

    def _ids(self) -> list[int]:
        """Return which objects the modules register."""
        registries = chain.from_iterable(map(registered_in, self._modules))
        return [*map(id, chain.from_iterable(map(dict.values, registries)))]

    def _look(self, trained: list[int]) -> None:
        self._trained = []
        self._all = dict(self._module.named_parameters(remove_duplicate=False))
        # A parameter of several names is known by its first.
        first = {id(p): (n, p) for n, p in reversed(self._all.items())}
        named = list(reversed(first.values()))
        begin = "model."
        check_splittable(
            self._optimizer, ((n.removeprefix(begin), p) for n, p in named if n.startswith(begin))
        )
        differs = other_parameters(self._profiled, self._optimizer, named)
        if differs is not None:
            raise GuardError(f"{differs}; plan again")
        self._modules = list(self._module.modules())
        self._registered, self._trained = self._ids(), trained
        # An object that is held keeps its id for itself.
        self._held = [*chain.from_iterable(g["params"] for g in self._optimizer.param_groups)]


def other_parameters(
    profiled: ProfiledStep,
    optimizer: torch.optim.Optimizer,
    named: Iterable[tuple[str, nn.Parameter]],
) -> str | None:
    """Say which parameter one of the two optimizers, this one and the planned one, trains and the
    other does not; None: they train the same ones."""
    assert profiled.parts is not None
    planned = {site.name for site in profiled.parts.sites}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    results = zip(profiled.captured.primals, profiled.captured.gradients, strict=True)
    kept = {primal.name for primal, gradient in results if gradient is not None}
    for name, parameter in named:
        here = id(parameter) in trained
        if (name in planned and not here) or (name in kept and here):
            which = "the planned optimizer trains and this one does not"
            if here:
                which = "this optimizer trains and the planned one does not"
            return f"{name.removeprefix('model.')}: {which}"
    return None


def _check_state(
    profiled: ProfiledStep, optimizer: torch.optim.Optimizer, model: nn.Module
) -> None:
    """Refuse an optimizer that keeps more, or less, state than the planned one."""
    planned = profiled.optimizer
    assert planned is not None
    assert profiled.record is not None
    planned_bytes = planned.bytes_total + profiled.host_state_bytes + profiled.movable_state_bytes
    blocks, device = profiled.record.block_bytes, profiled.captured.device
    state = optimizer_state(optimizer, model.parameters(), blocks, device)
    if state.bytes_total != planned_bytes:
        raise ValueError(
            f"this plan is for {format_bytes(planned_bytes)} of {planned.name} state, and this "
            f"{state.name} keeps {format_bytes(state.bytes_total)}; plan again with it"
        )


def _check_host(profiled: ProfiledStep, optimizer: torch.optim.Optimizer, left_bytes: int) -> None:
    """Refuse copies for taking a step back that exceed the plan's host budget."""
    planned, parts = profiled.optimizer, profiled.parts
    assert planned is not None
    assert parts is not None
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    mutated = [profiled.captured.primals[i].node.meta["val"] for i in parts.mutated]
    needed_bytes = sum(local_part(tensor).nbytes for tensor in (*trained, *mutated))
    needed_bytes += planned.bytes_total + profiled.host_state_bytes + profiled.movable_state_bytes
    if needed_bytes > left_bytes:
        raise ValueError(
            f"undo=True keeps copies of {format_bytes(needed_bytes)} on the host, of whose budget "
            f"the plan leaves {format_bytes(max(0, left_bytes))}: plan with a larger host_budget= "
            "or leave out undo"
        )


def _check_alone(model: nn.Module) -> None:
    """Refuse a step whose gradients other processes need: it updates parameters inside, before
    gradients could be exchanged, and the processes' parameters would drift apart."""
    if sharers_of(model) and only_shards(model):
        return
    many = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_data_parallel(model) or (many and torch.distributed.get_world_size() > 1):
        raise ValueError(
            "a whole step exchanges no gradients with other processes, except of a model that "
            "memopt.shard(model, mesh) has spread over them: shard it first, or plan without an "
            "optimizer instance and put DistributedDataParallel around the planned module "
            "(DistributedDataParallel(memopt.wrap(model, budget=...)))"
        )


def _check_scaler(rules: StepRules, scaler: Any) -> None:
    """Refuse a GradScaler if none was planned, and its absence if one was."""
    if scales(scaler) != rules.scaled:
        raise ValueError(
            "this plan is for losses that a GradScaler scales: pass scaler="
            if rules.scaled
            else "this plan is for losses that are not scaled: plan again with scaler="
        )


def plan_of_step(
    plan: PlanRecord,
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    *,
    undo: bool,
    scaler: Any,
) -> PlanRecord:
    """Return the plan with its captured step, if it is of this model, loss, optimizer and scaler.

    Raises:
        PlanFileError, ValueError: it is not, or there is no room for the copies of `undo`.
    """
    _check_alone(model)
    plan = with_step(plan, model, loss_fn, optimizer)
    profiled = plan.profiled
    if not isinstance(profiled, ProfiledStep) or profiled.parts is None:
        raise ValueError(
            "this plan is not of a whole step; plan with memopt.plan(model, inputs, loss_fn=..., "
            "targets=..., optimizer=<torch.optim instance>, whole_step=True) and a strategy for "
            "chains (rotor), auto, or one that recomputes nothing (olla, store-all, offload-graph)"
        )
    planned = profiled.parts.module
    # Not `is`: each access of a bound method makes another object.
    if planned.model is not model or planned.loss_fn != loss_fn:
        raise ValueError("a train step runs the model and loss it was planned with; plan again")
    check_splittable(optimizer, model.named_parameters())
    assert profiled.parts is not None
    differs = other_parameters(profiled, optimizer, profiled.parts.module.named_parameters())
    if differs is not None:
        raise ValueError(f"{differs}; plan again")
    _check_state(profiled, optimizer, model)
    if undo and plan.host_budget is not None:
        _check_host(profiled, optimizer, plan.host_budget - plan.host_peak_bytes)
    _check_scaler(profiled.parts.rules, scaler)
    return plan
