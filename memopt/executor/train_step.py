"""A whole planned training step: `step(*inputs, targets=...) -> loss`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.capture.training_call import as_planned
from memopt.errors import ExecutionError, GuardError, RankError
from memopt.executor.differentiated import draws
from memopt.executor.guard import Guard
from memopt.executor.homes import Homes, tensors_on
from memopt.executor.host_updates import update_there
from memopt.executor.in_step import InStep
from memopt.executor.input_gradients import check_behind, pass_on
from memopt.executor.install import install
from memopt.executor.loss_scaling import LossScaling
from memopt.executor.random_state import RandomStates
from memopt.executor.saved_tensor_hooks import token_as_it_is, why_not_inside
from memopt.executor.stack_room import with_stack_room
from memopt.executor.step_checks import StepParameters
from memopt.executor.step_updates import StepUpdates, together
from memopt.executor.undo import Changes, Undo
from memopt.executor.unplanned_steps import UnplannedSteps
from memopt.models.deferred_interrupt import ctrl_c_deferred
from memopt.step.assumed import BranchError, failing_as_assumed, values_of
from memopt.step.backend import autocast_as, autocast_off, autocast_state
from memopt.step.foreach_updates import foreach_options
from memopt.step.input_values import InputValueError
from memopt.step.inputs import Call, align, to_call
from memopt.step.joint_graph import loss_tangents
from memopt.step.loss import as_targets
from memopt.step.micro_batches import joined_call
from memopt.step.profiled import ProfiledStep
from memopt.step.shards import WHOLE_STEPS, like_part, meet_for, note_use
from memopt.step.step_optimizer import HostState, Item

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


class TrainStep:
    """Runs forward, loss, backward and all parameter updates under a plan.

    Equal to `loss_fn(model(*inputs), *targets).backward(); optimizer.step()` and then
    `zero_grad()`, bit for bit on CPU; inputs that require a gradient get theirs. A step that fails
    before its first update leaves parameters, optimizer state, buffers and random state as they
    were. One that fails later is taken back whole with `undo=True`. Without, parameters updated so
    far stay updated; the error says how many, and which may be changed in part (those that were
    updated together, none that moves together with its state). Buffers change only when all
    parameters are updated. After the first update Ctrl-C waits for the end of the step.

    Attributes:
        gradient_norm: with `clip_norm`, the global norm of the last step's gradients, before they
            were clipped: what `clip_grad_norm_` returns.
    """

    def __init__(
        self,
        plan: PlanRecord,
        optimizer: torch.optim.Optimizer,
        *,
        interpreted: bool = False,
        checked: bool = False,
        undo: bool = False,
        scaler: Any = None,
    ) -> None:
        profiled = plan.profiled
        assert isinstance(profiled, ProfiledStep)
        assert profiled.parts is not None
        self._optimizer = optimizer
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
            together=together(profiled, plan.program),
        )
        self._homes.leave(carried=True)
        for group in optimizer.param_groups:
            # What is tried for it takes memory, which no step is to count.
            foreach_options(type(optimizer), group, group["params"])
        planned = profiled.record.autocast if profiled.record is not None else autocast_state()
        with autocast_as(planned):
            self._guard = Guard.of(
                self._parts.module,
                self._parts.call,
                self._parts.once,
                updated=[site.name for site in self._parts.sites],
            )
        self._known = StepParameters(profiled, optimizer)
        self._parameters: dict[str, nn.Parameter] = {}
        self._host_state = HostState(optimizer) if profiled.host_state_bytes else None
        self._undo = Undo(optimizer) if undo else None
        device = profiled.captured.device or torch.device("cpu")
        self._random = RandomStates(device) if draws(profiled.captured) else None
        self._scaling = LossScaling(self._parts.rules.micro_batches, scaler, device)
        self._updates: StepUpdates | None = None
        self._in_step: InStep | None = None
        self.gradient_norm: torch.Tensor | None = None
        stays = not self._homes and self._host_state is None
        self._original = UnplannedSteps(self._parts, self._captured.assumed, optimizer, stays)

    def run_on(self, in_step: InStep, plan: PlanRecord) -> None:
        """Run the plan's step together with other ranks, which run the same one.

        Raises:
            RankError: they do not.
        """
        in_step.check_plan(plan)
        note_use(self._parts.module.model, WHOLE_STEPS)
        self._program = in_step.installed(self._program)
        self._in_step = in_step

    @property
    def skipped(self) -> bool:
        """With a GradScaler, whether the last step updated nothing, since a gradient was infinite
        or NaN."""
        return self._updates is not None and self._updates.skipped

    @property
    def unplanned(self) -> int:
        """How many steps ran without the plan, since a value of the forward was another one."""
        return self._original.count

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
        """Move all parameters and buffers of the model to a device for the block, for evaluation,
        averages and checkpoints. Those already there are shared, not copied."""
        model = self._parts.module.model
        with tensors_on(model, torch.device(device)):
            yield model

    def __call__(self, *args: Any, targets: Any = (), **kwargs: Any) -> torch.Tensor:
        """Train on one batch and return its loss (detached).

        Raises:
            GuardError: the call is not the planned one, or the optimizer trains other
                parameters than the planned ones.
            ExecutionError: a parameter still has a gradient, a step is running already, or
                this one failed after some updates.
        """
        count = self._parts.rules.micro_batches
        if count > 1:
            raise GuardError(
                f"this plan's step takes {count} micro-batches: call "
                "step.accumulate([(inputs, targets), ...])"
            )
        (loss,) = self._train([(Call(args, kwargs), targets)])
        return loss

    def accumulate(self, micro_batches: Iterable[tuple[Any, Any]]) -> torch.Tensor:
        """Train on several micro-batches, as the loop `for inputs, targets in micro_batches:
        (loss_fn(model(inputs), *targets) / k).backward()` and one update.

        Args:
            micro_batches: (inputs, targets) of each of the planned number, both as for
                `memopt.plan`.

        Returns:
            The losses, detached and undivided, in one dimension.

        Raises:
            GuardError, ExecutionError: as a call of the step; or the number is not the planned one.
        """
        listed = [(to_call(inputs), targets) for inputs, targets in micro_batches]
        count = self._parts.rules.micro_batches
        if len(listed) != count:
            raise GuardError(
                f"this plan's step takes {count} micro-batches and was given {len(listed)}; plan "
                "again with another micro_batches="
            )
        return torch.stack(self._train(listed))

    def _train(self, batches: list[tuple[Call, Any]]) -> list[torch.Tensor]:
        if self._parts.update.run() is not None:
            raise ExecutionError("this plan's train step is running already")
        try:
            calls = self._checked(batches)
        except Exception as error:
            if self._in_step is not None:
                self._in_step.refuse(error)
            raise
        why = self._original.before()
        if not why:
            try:
                losses = self._run(joined_call(calls) if len(calls) > 1 else calls[0])
            except BranchError as error:  # nothing has changed
                why = str(error)
            self._original.note(bool(why))
        if why:
            loss, self.gradient_norm = self._original.run(calls[0], why)
            return [loss]
        for call in calls:
            self._parts.once.effects.carry_out(self._parts.module, call, ())
        return losses

    def _checked(self, batches: list[tuple[Call, Any]]) -> list[Call]:
        """Return calls of the planned module.

        Raises:
            GuardError, ExecutionError: a step with them cannot run now.
        """
        model = self._parts.module.model
        self._parts.module.training = model.training
        self._homes.leave()
        self._original.expected = ""
        calls = [self._planned_call(given, targets) for given, targets in batches]
        if torch.is_inference_mode_enabled():
            raise ExecutionError(
                "a train step cannot run in torch.inference_mode(): no later step could change "
                "the optimizer state that it makes there. Call it outside"
            )
        looked_at = why_not_inside()
        if looked_at is not None:
            raise GuardError(f"a train step cannot run here: {looked_at}. Call it outside")
        self._parameters = self._known.now()
        for call in calls:
            check_behind(call.leaves, self._parameters.values())
        return calls

    def _planned_call(self, given: Call, targets: Any) -> Call:
        """Return a call of the model as one of the planned module.

        Raises:
            GuardError: the call is not the planned one.
        """
        planned = self._user_call
        assert planned is not None
        kwargs = as_planned(planned, given.kwargs)
        call = align(self._parts.module.model, planned, given.args, kwargs)
        call = Call((as_targets(targets), *call.args), call.kwargs)
        try:
            self._guard.check(self._parts.module, call)
        except InputValueError as error:
            self._original.expect(error, self._in_step is None)
        return call

    def _run(self, call: Call) -> list[torch.Tensor]:
        changes = Changes(len(self._parts.sites), len(self._parts.mutated))
        if self._in_step is None:
            return self._ran(call, changes)
        with self._in_step.whole_step(changes):
            meet_for(self._parts.module.model, WHOLE_STEPS)
            return self._ran(call, changes)

    def _ran(self, call: Call, changes: Changes) -> list[torch.Tensor]:
        host_state, undo = self._host_state, self._undo
        updates = self._updates = StepUpdates(
            self._optimizer, self._parameters, self._homes, host_state, undo, changes
        )
        self.gradient_norm = None

        def update(items: Sequence[Item], largest: torch.Tensor | None) -> None:
            ctrl_c.begin()
            updates.run(items, largest)

        target = self._parts.update
        try:
            target.begin(update)
            # The graph contains the casts of autocast.
            with ctrl_c_deferred() as ctrl_c, torch.no_grad(), autocast_off(), token_as_it_is():
                there = partial(update_there, self._optimizer, self._parameters, changes, undo)
                self._homes.begin(ctrl_c.begin, there)
                return with_stack_room(partial(self._attempt, call, changes))
        except Exception as error:
            if not changes:
                raise
            kind = RankError if isinstance(error, RankError) else ExecutionError
            raise kind(changes.text(str(error))) from error
        except BaseException as error:
            if changes:
                error.add_note(changes.text(type(error).__name__))
            raise
        finally:
            target.end()
            self._homes.settle(complete=changes.complete)
            if host_state is not None:
                host_state.settle()

    def _attempt(self, call: Call, changes: Changes) -> list[torch.Tensor]:
        """Run a step; if it fails midway, restore the random state, with `undo` everything."""
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
        with ctrl_c_deferred() as ctrl_c:
            ctrl_c.begin()
            for parameter in self._parameters.values():
                parameter.grad = None
            if drawn is not None and self._random is not None:
                self._random.restore(drawn)
            if self._undo is not None:
                self._homes.settle(undone=True)
                self._undo.restore()
                changes.clear()

    def optimizer_to_device(self) -> None:
        """Put offloaded optimizer state back on the device, to go on with `optimizer.step()`;
        the next train step moves it to the host again."""
        if self._host_state is not None:
            self._host_state.come_back()

    def _step(self, call: Call, changes: Changes) -> list[torch.Tensor]:
        captured, rules = self._captured, self._parts.rules
        primals = self._primals(call)
        with failing_as_assumed(self._original.branches):
            outputs, saved = self._program.forward(list(primals))
        losses: list[torch.Tensor] = [outputs.pop()]
        self._program.look(outputs)
        del outputs[len(outputs) - values_of(captured.assumed) :]
        results = self._program.backward(list(primals), self._tangents(losses[0]), saved)
        gradients, ends = results[: len(primals)], list(results[len(primals) :])
        if rules.clip_norm is not None:
            self.gradient_norm = ends.pop()
        losses += ends[: rules.micro_batches - 1]
        self._move(primals, [*outputs, *ends[rules.micro_batches - 1 :]], changes)
        for primal, gradient in zip(captured.primals, gradients, strict=True):
            if gradient is not None and primal.name in self._parameters:
                parameter = self._parameters[primal.name]
                parameter.grad = like_part(parameter, gradient)
        given = [
            (call.leaves[primal.index], gradient)
            for primal, gradient in zip(captured.primals, gradients, strict=True)
            if primal.index is not None and gradient is not None
        ]
        del results, gradients, gradient
        pass_on(given)
        if rules.scaled:
            self._scaling.update(not self.skipped)
        changes.complete = True
        return losses

    def _tangents(self, loss: torch.Tensor) -> list[torch.Tensor | None]:
        """Return the arguments of the backward half."""
        tangents, scaled = self._captured.tangents, self._parts.rules.scaled
        own = tangents[: len(tangents) - scaled]
        inverse = [self._scaling.inverse()] if scaled else []
        return [None, *loss_tangents(own, self._scaling.gradient(loss)), *inverse]

    def _move(self, primals: list[Any], values: list[torch.Tensor], changes: Changes) -> None:
        """Write the values that the forward has computed for buffers and inputs into them."""
        # The forward's value for a trained parameter is applied before its update.
        applied = {site.name for site in self._parts.sites if site.value is not None}
        for position, value in zip(self._parts.mutated, values, strict=True):
            if self._captured.primals[position].name not in applied:
                if self._undo is not None:
                    self._undo.keep(primals[position])
                primals[position].copy_(value)
                changes.buffers += 1

    def _primals(self, call: Call) -> list[Any]:
        values, moves = [], bool(self._homes)
        found = self._captured.values(self._parts.module, call.leaves)
        for primal, value in zip(self._captured.primals, found, strict=True):
            if moves and isinstance(value, nn.Parameter) and self._homes.moves(value):
                value = None  # The program drops its device copy.
            elif primal.part:
                value = getattr(value, primal.part)
            other = isinstance(value, torch.Tensor) and type(value) is not nn.Parameter
            values.append(value.detach() if other else value)
        return values
