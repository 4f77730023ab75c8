"""The planned module, a drop-in for the model: same parameters, outputs and state_dict keys."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias, cast

from torch import nn

from memopt.capture.training_call import as_planned
from memopt.errors import ExecutionError, GuardError, ProfilerBusyError
from memopt.executor.calls import PARTLY_TRAINING, Calls, has_own, warned_of_gradients
from memopt.executor.differentiated import (
    DIFFERENTIATED,
    AsOriginal,
    OtherLoss,
    OtherOrder,
    pattern,
)
from memopt.executor.guard import Guard
from memopt.executor.installed import Installed
from memopt.executor.refused_outputs import handed_out
from memopt.executor.runtime import Arrived, Runtime
from memopt.executor.saved_tensor_hooks import tell_of_stop, why_not_inside
from memopt.executor.unplanned import beside_ranks
from memopt.step.assumed import AssumptionError
from memopt.step.captured import Captured
from memopt.step.dependencies import Dependencies
from memopt.step.inputs import Call, align, asks_for_gradients
from memopt.step.ranks import ranks_of
from memopt.torch_private.dynamo import captured_around
from memopt.torch_private.engine_hooks import with_engine_around
from memopt.torch_private.modules import REGISTRIES, load_own_state

OnMismatch: TypeAlias = Callable[[nn.Module, Call, GuardError], nn.Module]
"""(the user's model, a call that was not planned, the difference) → the module to call."""


@dataclass(eq=False)
class _Inside:
    """The components of a planned module, and how its calls ran."""

    model: nn.Module
    captured: Captured
    runtime: Runtime
    program: Installed
    on_mismatch: OnMismatch | None
    spare_bytes: int | None
    guard: Guard
    calls: Calls = field(default_factory=Calls)
    twice: set[Any] = field(default_factory=set)
    arrived: Arrived | None = None
    other_loss: OtherLoss | None = None
    fewer_outputs: OtherLoss | None = None
    other_order: OtherOrder | None = None
    run_again: Callable[[str], None] | None = None


class PlannedModule(nn.Module):
    """A model whose training step runs under a plan.

    It shares the model's parameters, buffers and sub-modules (not copies), so optimizers,
    `state_dict` and `to()` work as on the model itself. Under `torch.no_grad()` or in eval mode
    the original forward runs. Other attributes are the model's, too: setting one sets it there.
    The planned graph contains the hooks that inner modules had when the model was planned; with
    other hooks a step is refused.

    `calls`, `original` and `code` are those of `running(planned)`, unless the model has an
    attribute of that name.
    """

    def __init__(
        self,
        model: nn.Module,
        captured: Captured,
        runtime: Runtime,
        program: Installed,
        on_mismatch: OnMismatch | None = None,
        dependencies: Dependencies | None = None,
        spare_bytes: int | None = None,
        guard: Guard | None = None,
    ) -> None:
        super().__init__()
        for name in _shared_names(model):
            self.__dict__[name] = model.__dict__[name]
        guard = guard or Guard.of(model, captured.call, captured, dependencies)
        inside = _Inside(model, captured, runtime, program, on_mismatch, spare_bytes, guard)
        self.__dict__["_memopt"] = inside

    @property
    def training(self) -> bool:
        """The model's mode. Loops set it module by module, and must set the model's own."""
        return bool(original_of(self).training) if "_memopt" in self.__dict__ else True

    @training.setter
    def training(self, mode: bool) -> None:
        if "_memopt" in self.__dict__:
            original_of(self).training = mode

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_memopt" not in self.__dict__:
                raise
        model = original_of(self)
        if name in _SHOWN and not has_own(model, name):
            return getattr(running(self), name)
        return getattr(model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        known = getattr(PlannedModule, name, None)
        if name in _SHOWN and "_memopt" in self.__dict__ and not has_own(original_of(self), name):
            raise AttributeError(
                f"{name!r} of a planned module is memopt's and cannot be set; choose another name"
            )
        if isinstance(known, property):
            # Bypass nn.Module, which would register a module under the name.
            object.__setattr__(self, name, value)
        elif _keeps(self, name):
            super().__setattr__(name, value)
        else:
            setattr(original_of(self), name, value)

    def __delattr__(self, name: str) -> None:
        if _keeps(self, name):
            super().__delattr__(name)
        else:
            delattr(original_of(self), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        """Return the plan around a deep copy of the model.

        Raises:
            ExecutionError: the step trains or updates a tensor that the model does not register.
        """
        own = _inside(self)
        model, captured = own.model, own.captured
        twin = copy.deepcopy(model, memo)
        for position, primal in enumerate(captured.primals):
            constant = primal.constant
            if constant is None or primal.value(twin, ()) is not constant:
                continue
            if constant.requires_grad or position in captured.mutated:
                raise ExecutionError(
                    "this planned module cannot be copied: its step trains or updates a tensor "
                    "that the model does not register as parameter or buffer; copy "
                    "planned.original and plan the copy"
                )
        dependencies = captured.dependencies.of_copy(model, twin)
        more = own.on_mismatch, dependencies, own.spare_bytes
        copied = PlannedModule(twin, captured, own.runtime, own.program, *more)
        memo[id(self)] = copied
        for name in self.__dict__.keys() - {"_memopt", *_shared_names(model)}:
            copied.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse to be pickled: compiled code and a running model's state cannot be."""
        raise ExecutionError(
            "a planned module cannot be pickled or shallow-copied; save planned.state_dict() and "
            "the plan (plan.save(path)), or pickle planned.original"
        )

    def train(self, mode: bool = True) -> PlannedModule:
        """Set the mode of the planned module and of the original one."""
        original_of(self).train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's state dict, as its class makes it."""
        return original_of(self).state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load the model's state dict, as its class does."""
        return original_of(self).load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load the model's own part of a state that is loaded into a module around it."""
        load_own_state(original_of(self), *args)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step's forward under the plan; the backward follows by autograd.

        While a module around it is captured, the original forward runs, so that its step is planned
        as a part of that module's.
        """
        if captured_around():
            return original_of(self)(*args, **kwargs)
        model = original_of(self)
        with beside_ranks(model, _inside(self).guard.evaluating(model)):
            return with_engine_around(model, self._run, args, kwargs)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        own = _inside(self)
        model, captured, guard, calls = own.model, own.captured, own.guard, own.calls
        if guard.evaluating(model):
            return calls.fall_back(model, PARTLY_TRAINING, model(*args, **kwargs))
        if (looked_at := why_not_inside()) is not None:
            calls.fall_back(model, looked_at)
            return model(*args, **kwargs)
        call = align(model, captured.call, args, as_planned(captured.call, kwargs))
        try:
            guard.check(model, call)
            captured.odds.check(own.on_mismatch is not None)
        except GuardError as error:
            if not asks_for_gradients(model, call):
                calls.original += 1
                return model(*args, **kwargs)
            if own.on_mismatch is None:
                raise
            try:
                instead = own.on_mismatch(model, call, error)
            except ProfilerBusyError as busy:
                return calls.fall_back(model, str(busy), model(*args, **kwargs))
            own.captured.odds.turned = 0
            if instead is model:
                return calls.fall_back(model, str(error), model(*args, **kwargs))
            calls.replanned += 1
            return instead.forward(*args, **kwargs)  # hooks on all modules are in its step
        wants_gradients = pattern(call)
        if wants_gradients in own.twice or own.captured.odds.leave_out():
            calls.original += 1
            return model(*args, **kwargs)
        calls.planned += 1
        if own.spare_bytes is not None and warned_of_gradients(model, own.spare_bytes):
            own.spare_bytes = None
        held = captured.held_values(model, ())

        def used(why: str, planned: bool) -> None:
            if planned:  # and counts itself
                calls.planned -= 1
                return
            # Such calls are made to be differentiated: they run unplanned from now on.
            if why is DIFFERENTIATED and any(wants_gradients):
                own.twice.add(wants_gradients)
            (own.run_again or calls.take_back)(why)

        random = own.runtime.random
        again = AsOriginal(
            captured, model, held, call, guard, random, used, own.other_order, own.fewer_outputs
        )
        run, otherwise = _ran(own, held, call, again)
        if otherwise:  # what the call has computed is freed by now
            calls.planned -= 1
            calls.fall_back(model, otherwise)  # what it looked at may have it fail
            return own.program.failing(model, "the unplanned forward")(*args, **kwargs)
        output = handed_out(run, captured, model, call, again, own.runtime, own.other_loss)
        if not captured.effects:
            return output
        output, made = output if captured.effects.made_by_call else (output, ())
        captured.effects.carry_out(model, call, made)
        return output


_SHOWN = ("calls", "original", "code")


@dataclass(frozen=True)
class Running:
    """How a planned module runs.

    Attributes:
        calls: how many calls ran under the plan, as the original, or under another plan.
        original: the unplanned model.
        code: the generated source that runs; "" when interpreted.
    """

    calls: Calls
    original: nn.Module
    code: str


def _inside(planned: nn.Module) -> _Inside:
    return cast("_Inside", planned.__dict__["_memopt"])


def running(planned: PlannedModule) -> Running:
    """Return how a planned module runs."""
    own = _inside(planned)
    return Running(own.calls, own.model, str(own.program.source))


def original_of(planned: PlannedModule) -> nn.Module:
    """Return the unplanned model of a planned module."""
    return _inside(planned).model


def program_of(planned: PlannedModule) -> Installed:
    """Return the program that a planned module runs."""
    return _inside(planned).program


def captured_of(planned: PlannedModule) -> Captured:
    """Return the capture that a planned module runs."""
    return _inside(planned).captured


def count_in(planned: PlannedModule, calls: Calls) -> None:
    """Count the calls of a planned module in `calls` from now on."""
    _inside(planned).calls = calls


def when_other_loss(planned: PlannedModule, met: OtherLoss, fewer: bool = False) -> None:
    """Run the module that `met` returns, or else the unplanned one, for a backward from outputs
    that the plan's loss does not use (otherwise an error); with `fewer`, for one from some of the
    outputs that the plan has no backward for."""
    own = _inside(planned)
    own.other_loss, own.fewer_outputs = (None, met) if fewer else (met, None)


def when_arrives_otherwise(planned: PlannedModule, met: OtherOrder) -> None:
    """Run the module that `met` returns for a backward whose gradients arrive in other memory
    layouts than planned; if it returns None, the gradients are copied."""
    _inside(planned).other_order = met


def when_run_again(planned: PlannedModule, met: Callable[[str], None]) -> None:
    """Call `met` with the reason, instead of `Calls.take_back`, when the unplanned module runs for
    a backward."""
    _inside(planned).run_again = met


def waiting_calls(*planned: nn.Module) -> int:
    """Return how many calls of planned modules, or plans of one, await their backward."""
    return sum(map(len, {_inside(one).runtime for one in planned}))


def halved_calls(*planned: nn.Module) -> int:
    """Return how many of them await the second half of a backward."""
    return sum(one.halved for one in {_inside(one).runtime for one in planned})


def has_backward(planned: PlannedModule, positions: frozenset[int]) -> bool:
    """Return whether all leaves of the output at these positions have a planned backward."""
    return positions.isdisjoint(captured_of(planned).outputs.gradients.refused)


def _ran(own: _Inside, held: list[Any], call: Call, again: AsOriginal) -> tuple[Any, str]:
    """Return the output of a planned call, and why it has to run unplanned instead; "" if it has
    not."""
    turned = False
    try:
        found = own.runtime.run(own.program, held, call, again, own.arrived), ""
    except AssumptionError as error:
        if error.__cause__ and ranks_of(own.model):  # the others run its collectives, and wait
            raise error.__cause__ from None
        found, turned = (None, str(error)), getattr(error, "turned", False)
    except Exception as error:
        tell_of_stop(error, own.captured.effects.shown)
        raise
    if own.captured.assumed:
        own.captured.odds.note(bool(found[1]), turned)
    return found


def for_sizes(planned: PlannedModule, program: Installed, call: Call) -> PlannedModule:
    """Return a module for another call, of other sizes, in the same capture."""
    own = _inside(planned)
    model, captured = own.model, own.captured
    whole = align(model, captured.call, call.args, as_planned(captured.call, call.kwargs))
    more = own.on_mismatch, None, own.spare_bytes, own.guard.of_sizes(whole)
    made = PlannedModule(model, captured, own.runtime, program, *more)
    _inside(made).arrived = own.arrived
    return made


def when_arrived(planned: PlannedModule, arrived: Arrived | None) -> None:
    """Call `arrived`, if any, with the gradients with which each backward of a planned module
    begins."""
    _inside(planned).arrived = arrived


def accepts(planned: PlannedModule, call: Call) -> bool:
    """Return whether a call, made now, would be the one that a module is planned for."""
    own = _inside(planned)
    kwargs = as_planned(own.captured.call, call.kwargs)
    try:
        own.guard.check(own.model, align(own.model, own.captured.call, call.args, kwargs))
        own.captured.odds.check(True)
    except GuardError:
        return False
    return True


def _keeps(planned: PlannedModule, name: str) -> bool:
    """Return whether an attribute is the planned module's, not the model's."""
    own = "_memopt" not in planned.__dict__ or name in planned.__dict__
    return own or hasattr(PlannedModule, name)


def _shared_names(model: nn.Module) -> list[str]:
    """Return the attributes that a planned module shares with its model."""
    hooks = (name for name in model.__dict__ if "state_dict" in name and "hooks" in name)
    return [*REGISTRIES, *hooks]
