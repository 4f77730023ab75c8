"""A whole planned training step: `step(*inputs, targets=...) -> loss`."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn

from memopt.errors import ExecutionError, GuardError
from memopt.executor.differentiated import draws
from memopt.executor.guard import Guard
from memopt.executor.homes import Homes, tensors_on
from memopt.executor.host_updates import update_there
from memopt.executor.input_gradients import check_behind, pass_on
from memopt.executor.module import install
from memopt.executor.random_state import RandomStates
from memopt.executor.recaptured import with_step
from memopt.executor.undo import Changes, Undo
from memopt.models.budget import format_bytes
from memopt.profiler.backend import autocast_as, autocast_off, autocast_state
from memopt.profiler.baseline import as_targets
from memopt.profiler.inputs import Call, align
from memopt.profiler.joint_graph import unit_tangents
from memopt.profiler.optimizer_state import optimizer_state
from memopt.profiler.remedies import is_data_parallel
from memopt.profiler.step_optimizer import HostState, Touch, check_splittable, update_one
from memopt.profiler.step_session import ProfiledStep
from memopt.profiler.training_call import as_planned

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


class TrainStep:
    """Runs forward, loss, backward and all parameter updates under a plan.

    Equal to `loss_fn(model(*inputs), *targets).backward(); optimizer.step()` and then
    `zero_grad()`, bit for bit on CPU; inputs that require a gradient get theirs. A step that
    fails before its first update leaves parameters, optimizer state, buffers and random state as
    they were. One that fails later is taken back whole with `undo=True`; else it leaves the
    parameters updated so far updated, and says how many, and which one may be changed in part (none
    that moves together with its state);
    buffers change only when all parameters are updated. After the first update Ctrl-C waits for
    the end of the step.
    """

    def __init__(
        self,
        plan: PlanRecord,
        optimizer: torch.optim.Optimizer,
        *,
        interpreted: bool = False,
        checked: bool = False,
        undo: bool = False,
    ) -> None:
        profiled = plan.profiled
        assert isinstance(profiled, ProfiledStep)
        assert profiled.parts is not None
        self._optimizer = optimizer
        self._profiled = profiled
        self._parts = profiled.parts
        self._captured = profiled.captured
        self._user_call = profiled.user_call
        self._homes = Homes(profiled.parts, profiled.lowering, plan.program, optimizer)
        self._program = install(
            profiled.captured,
            profiled.lowering,
            plan.program,
            interpreted=interpreted,
            checked=checked,
            homes=self._homes,
        )
        self._homes.leave()
        planned = profiled.record.autocast if profiled.record is not None else autocast_state()
        with autocast_as(planned):
            self._guard = Guard.of(
                self._parts.module,
                self._parts.call,
                self._captured,
                updated=[site.name for site in self._parts.sites],
            )
        self._parameters: dict[str, nn.Parameter] = {}
        self._host_state = HostState(optimizer) if profiled.host_state_bytes else None
        self._undo = Undo(optimizer) if undo else None
        device = profiled.captured.device or torch.device("cpu")
        self._random = RandomStates(device) if draws(profiled.captured) else None

    @property
    def code(self) -> str:
        """The generated source that runs; "" when interpreted."""
        return self._program.source

    @property
    def host_bytes(self) -> int:
        """Bytes of parameters and optimizer state that live on the host between steps."""
        return self._homes.bytes_total

    @contextmanager
    def parameters_on(self, device: torch.device | str) -> Iterator[nn.Module]:
        """The model with all parameters and buffers on a device, for evaluation, averages and
        checkpoints. What is there already is shared, not copied."""
        model = self._parts.module.model
        with tensors_on(model, torch.device(device)):
            yield model

    def __call__(self, *args: Any, targets: Any = (), **kwargs: Any) -> torch.Tensor:
        """Train on one batch and return its loss (detached).

        Raises:
            GuardError: another call than the planned one, or the optimizer trains other
                parameters than the planned ones.
            ExecutionError: a gradient from before is still there, a step is running already, or
                this one failed after some updates.
        """
        if self._parts.update.run() is not None:
            raise ExecutionError("this plan's train step is running already")
        model = self._parts.module.model
        assert self._user_call is not None
        call = align(model, self._user_call, args, as_planned(self._user_call, kwargs))
        call = Call((as_targets(targets), *call.args), call.kwargs)
        self._parts.module.training = model.training
        self._homes.leave()
        self._guard.check(self._parts.module, call)
        if torch.is_inference_mode_enabled():
            raise ExecutionError(
                "a train step changes parameters and optimizer state, which no later step could "
                "change again had it been made in torch.inference_mode(); leave that"
            )
        check_splittable(self._optimizer, model)
        differs = _other_parameters(self._profiled, self._optimizer)
        if differs is not None:
            raise GuardError(f"{differs}; plan again")
        self._parameters = dict(self._parts.module.named_parameters(remove_duplicate=False))
        check_behind(call.leaves, self._parameters.values())
        for name, parameter in self._parameters.items():
            if parameter.grad is not None:
                raise ExecutionError(
                    f"{name.removeprefix('model.')} has a gradient from before: train steps do "
                    "not accumulate; set it to None first, as model.zero_grad() does"
                )
        return self._run(call)

    def _run(self, call: Call) -> torch.Tensor:
        changes = Changes(len(self._parts.sites), len(self._captured.mutated))
        host_state, undo = self._host_state, self._undo
        one = partial(update_one, self._optimizer) if host_state is None else host_state.step

        def update(name: str, gradient: torch.Tensor, value: torch.Tensor | None) -> None:
            begin()
            parameter = self._parameters[name]
            if undo is not None:
                undo.keep_update(parameter)
            touch = Touch(self._optimizer, parameter)
            restores = self._homes.restores(parameter)
            try:
                if value is not None:
                    parameter.copy_(value)
                with self._homes.updating(parameter):
                    one(parameter, gradient)
            except BaseException:
                if touch.changed() and not restores:
                    changes.half = name.removeprefix("model.")
                raise
            changes.updated += 1
            if host_state is not None:
                host_state.put_away(parameter)

        target = self._parts.update
        try:
            target.begin(update)
            # The casts are in the graph.
            with ctrl_c_deferred() as begin, torch.no_grad(), autocast_off():
                there = partial(update_there, self._optimizer, self._parameters, changes, undo)
                self._homes.begin(begin, there)
                return self._attempt(call, changes)
        except Exception as error:
            if not changes:
                raise
            raise ExecutionError(changes.text(str(error))) from error
        except BaseException as error:
            if changes:
                error.add_note(changes.text(type(error).__name__))
            raise
        finally:
            target.end()
            self._homes.settle()
            if host_state is not None:
                host_state.settle()

    def _attempt(self, call: Call, changes: Changes) -> torch.Tensor:
        """A step; of one that fails, what can be is as it was."""
        drawn = None if self._random is None else self._random.now()
        if self._host_state is not None:
            self._host_state.leave()
        if self._undo is not None:
            self._undo.begin()
        try:
            return self._step(call, changes)
        except BaseException as error:
            self._homes.stop()
            if self._undo is not None or not changes.complete:
                self._take_back(changes, drawn)
            if self._undo is not None:
                error.add_note("the step was taken back: everything is as before it")
            raise

    def _take_back(self, changes: Changes, drawn: bytearray | None) -> None:
        with ctrl_c_deferred() as begin:
            begin()
            for parameter in self._parameters.values():
                parameter.grad = None
            if drawn is not None and self._random is not None:
                self._random.put_back(drawn)
            if self._undo is not None:
                # What was updated is on its way to the host.
                self._homes.settle()
                self._undo.put_back()
                changes.clear()

    def optimizer_to_device(self) -> None:
        """Put offloaded optimizer state back on the device, to go on with `optimizer.step()`;
        the next train step moves it to the host again."""
        if self._host_state is not None:
            self._host_state.come_back()

    def _step(self, call: Call, changes: Changes) -> torch.Tensor:
        captured = self._captured
        primals = self._primals(call)
        outputs, saved = self._program.forward(list(primals))
        unit = unit_tangents(captured.tangents, outputs[-1])
        loss: torch.Tensor = outputs.pop()
        results = self._program.backward(list(primals), [None, *unit], saved)
        del unit
        # What the forward gives a trained parameter is applied before its update.
        applied = {site.name for site in self._parts.sites if site.value is not None}
        for position, value in zip(captured.mutated, outputs, strict=True):
            if captured.primals[position].name not in applied:
                if self._undo is not None:
                    self._undo.keep(primals[position])
                primals[position].copy_(value)
                changes.buffers += 1
        for primal, gradient in zip(captured.primals, results, strict=True):
            if gradient is not None and primal.name in self._parameters:
                self._parameters[primal.name].grad = gradient
        leaves = call.leaves
        pass_on(
            [
                (leaves[primal.index], gradient)
                for primal, gradient in zip(captured.primals, results, strict=True)
                if primal.index is not None and gradient is not None
            ]
        )
        changes.complete = True
        return loss

    def _primals(self, call: Call) -> list[Any]:
        leaves = call.leaves
        module = self._parts.module
        values = []
        for primal in self._captured.primals:
            value = primal.value(module, leaves)
            values.append(value.detach() if isinstance(value, torch.Tensor) else value)
        return values


def _other_parameters(profiled: ProfiledStep, optimizer: torch.optim.Optimizer) -> str | None:
    """The first parameter that an optimizer trains and the planned one does not, or the reverse."""
    assert profiled.parts is not None
    planned = {site.name for site in profiled.parts.sites}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    results = zip(profiled.captured.primals, profiled.captured.gradients, strict=True)
    kept = {primal.name for primal, gradient in results if gradient is not None}
    for name, parameter in profiled.parts.module.named_parameters():
        here = id(parameter) in trained
        if (name in planned and not here) or (name in kept and here):
            which = "the planned optimizer trains and this one does not"
            if here:
                which = "this optimizer trains and the planned one does not"
            return f"{name.removeprefix('model.')}: {which}"
    return None


@contextmanager
def ctrl_c_deferred() -> Iterator[Callable[[], None]]:
    """Once the yielded function has been called, Ctrl-C raises KeyboardInterrupt only at the end
    of the block, which finishes first; a second Ctrl-C raises at once.

    Changes nothing outside the main thread, or where somebody else handles the signal.
    """
    usual = signal.default_int_handler
    asked = begun = False

    def handle(_number: int, _frame: object) -> None:
        nonlocal asked
        asked = True
        signal.signal(signal.SIGINT, usual)

    def begin() -> None:
        nonlocal begun
        main = threading.current_thread() is threading.main_thread()
        if not begun and main and signal.getsignal(signal.SIGINT) is usual:
            begun = True
            signal.signal(signal.SIGINT, handle)

    try:
        yield begin
    finally:
        if begun:
            signal.signal(signal.SIGINT, usual)
    if asked:
        raise KeyboardInterrupt


def _check_state(
    profiled: ProfiledStep, optimizer: torch.optim.Optimizer, model: nn.Module
) -> None:
    """Refuse an optimizer that keeps more, or less, than the planned one."""
    planned = profiled.optimizer
    assert planned is not None
    assert profiled.record is not None
    planned_bytes = planned.bytes_total + profiled.host_state_bytes + profiled.movable_state_bytes
    state = optimizer_state(optimizer, model.parameters(), profiled.record.block_bytes)
    if state.bytes_total != planned_bytes:
        raise ValueError(
            f"this plan is for {format_bytes(planned_bytes)} of {planned.name} state, and this "
            f"{state.name} keeps {format_bytes(state.bytes_total)}; plan again with it"
        )


def _check_host(profiled: ProfiledStep, optimizer: torch.optim.Optimizer, left_bytes: int) -> None:
    """Refuse copies for taking a step back that are beyond the plan's host budget."""
    planned = profiled.optimizer
    assert planned is not None
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    mutated = [profiled.captured.primals[i].node.meta["val"] for i in profiled.captured.mutated]
    needed_bytes = sum(tensor.nbytes for tensor in (*trained, *mutated))
    needed_bytes += planned.bytes_total + profiled.host_state_bytes
    if needed_bytes > left_bytes:
        raise ValueError(
            f"undo=True keeps copies of {format_bytes(needed_bytes)} on the host, of whose budget "
            f"the plan leaves {format_bytes(max(0, left_bytes))}: plan with a larger host_budget= "
            "or leave out undo"
        )


def _check_alone(model: nn.Module) -> None:
    """Refuse a step whose gradients other processes need: it updates parameters inside, before
    anybody could exchange them, and the processes' parameters would drift apart."""
    many = torch.distributed.is_available() and torch.distributed.is_initialized()
    if is_data_parallel(model) or (many and torch.distributed.get_world_size() > 1):
        raise ValueError(
            "a whole step exchanges no gradients with other processes: plan without an optimizer "
            "instance and put DistributedDataParallel around the planned module "
            "(DistributedDataParallel(memopt.wrap(model, budget=...)))"
        )


def train_step(
    plan: PlanRecord,
    model: nn.Module,
    loss_fn: Any,
    optimizer: torch.optim.Optimizer,
    *,
    interpreted: bool = False,
    checked: bool = False,
    undo: bool = False,
) -> TrainStep:
    """See `Plan.train_step`."""
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
    # Not `is`: a bound method is another object each time that it is named.
    if planned.model is not model or planned.loss_fn != loss_fn:
        raise ValueError("a train step runs the model and loss it was planned with; plan again")
    check_splittable(optimizer, model)
    differs = _other_parameters(profiled, optimizer)
    if differs is not None:
        raise ValueError(f"{differs}; plan again")
    _check_state(profiled, optimizer, model)
    if undo and plan.host_budget is not None:
        _check_host(profiled, optimizer, plan.host_budget - plan.host_peak_bytes)
    return TrainStep(plan, optimizer, interpreted=interpreted, checked=checked, undo=undo)
