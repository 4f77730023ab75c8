"""A model that runs its training calls under plans, made when a kind of call is first met.

The model object keeps its class, forward, attributes, files and copies. torch asks
`_compiled_call_impl` before a module's own call (`nn.Module.compile` sets it), and memopt sets it,
too. All that a model gets (this, a hook, and the attributes `memopt` and `calls` unless it uses
these names itself) is left out of copies and pickles, which are plain models.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from memopt.capture.as_eager.masks import masks_nothing, none_masks, rounds_by_mask
from memopt.capture.taken import check_leaves
from memopt.capture.uncaptured import cumulative_average, uninitialised
from memopt.errors import GuardError, InputsError, NothingToTrainError, ProfilerBusyError
from memopt.executor.arena import ArenaFamily
from memopt.executor.calls import (
    PARTLY_TRAINING,
    Calls,
    difference,
    refuse_script,
    uses,
    warn_of_many_plans,
)
from memopt.executor.lengths import Lengths
from memopt.executor.module import accepts, captured_of, count_in
from memopt.executor.part_names import check_call, naming_parts
from memopt.executor.pipeline_stages import accumulating
from memopt.executor.plan_maker import Made, PlanMaker, Planner, shown
from memopt.executor.planning_in_backward import PlanningInBackward
from memopt.executor.ready_plans import ReadyPlans
from memopt.executor.saved_tensor_hooks import why_not_inside
from memopt.executor.surroundings import Surroundings
from memopt.executor.unplanned import agreed, beside_ranks, passes_on, unplanned
from memopt.models.charges import NO_CHARGES, Charges
from memopt.models.locks import ForkedLock
from memopt.step.backend import autocast_state
from memopt.step.described import described
from memopt.step.inputs import Call, asks_for_gradients, device_of, in_order, to_call
from memopt.step.ranks import check_untrained, ranks_of, telling_ranks
from memopt.torch_private import pytree
from memopt.torch_private.dynamo import captured_around
from memopt.torch_private.engine_hooks import engine_off, has_engine, with_engine_around
from memopt.torch_private.modules import COMPILED_CALL, FORWARD_PRE_HOOKS, parameters_in, plain_call

_NO_PLAN = (
    "the wrapped model has no plan for this kind of call ({}; what differs from the last planned: "
    "{}); pass an example of it in shapes= of memopt.wrap, with a larger budget= if it says so, or "
    'on_mismatch="plan" or "original"'
)

_LOG = logging.getLogger(__name__)
_CALL = COMPILED_CALL
_STATE = "__getstate__"
_MOST_IN_A_CALL = 2
"""Most plans of one call: if it needs more, checking the model changes it; it runs unplanned."""


def _opaque(_model: nn.Module, _args: Any) -> None:
    """Break the graph under `torch.compile` of the model or of one around it, so that the model
    runs as called. Dynamo sees hooks, and not `_compiled_call_impl`."""
    if torch.compiler.is_dynamo_compiling() and not captured_around():
        torch._dynamo.graph_break()


def planning_of(model: nn.Module) -> SelfPlanning | None:
    """Return the object that plans a wrapped model's calls; None: it is not wrapped."""
    made = getattr(model.__dict__.get(_CALL), "__self__", None)
    return made if isinstance(made, SelfPlanning) else None


class _InCall(threading.local):
    """The number of plans made anew in each thread's present call."""

    plans = 0


class SelfPlanning:
    """Makes a model plan its own training calls; `remove()` undoes that.

    Args:
        model: the model. Its calls go through here from now on.
        planner: makes plans.
        most_plans: how many plans stay ready to run; beyond that, the kind of call that ran longest
            ago is dropped.
        on_mismatch: how kinds of calls after the first are run: "plan", "original", "error".
        with_state: whether to find and charge the optimizer's state.
    Attributes:
        model: the model.
        calls: how many calls ran in which way.
        plans: the plans that are ready to run.
        around: measures the memory around its steps.
        family: the idle arena of the plans with addresses.

    Raises:
        ValueError: the model's calls are intercepted already (`model.compile()`, another wrap), or
            its class has a `__call__` of its own.
    """

    _in_parts = False

    def __init__(
        self,
        model: nn.Module,
        planner: Planner,
        most_plans: int,
        on_mismatch: str = "plan",
        with_state: bool = True,
    ) -> None:
        check_call(model)
        self.model, self.calls, self.family = model, Calls(), ArenaFamily()
        self._on_mismatch, self._to_part = on_mismatch, None if self._in_parts else model
        self._rounds_by_mask = self._none_masks = rounds_by_mask(model)
        self.plans = ReadyPlans(most_plans)
        # Kinds whose outputs had no gradient so far.
        self._untrained: set[Any] = set()
        self.around = Surroundings(model, with_state)
        self.around.waiting = self.plans.waiting
        self._planner = planner
        self._maker = self._makes_plans(alone=ranks_of(model) is None)
        self._lengths = Lengths(model, self._kind, self._ready, self._made, self._prepare)
        self._backward = PlanningInBackward(
            planner,
            self.plans,
            self.around,
            self._made_in_backward,
            self._without_idle_masks,
            self._lengths.forget,
        )
        self._planning, self._in_call = ForkedLock(), _InCall()
        self._asked, self._last_kind = 0, None
        self._run: Callable[..., Any] = torch.compiler.disable(self._running)  # type: ignore[no-untyped-call]
        setattr(model, _CALL, self._call)
        self._hook = model.register_forward_pre_hook(_opaque, prepend=True)  # before the others
        shown: dict[str, Any] = {"memopt": self, "calls": self.calls, "plans": self.plans}
        shown["__prepare_scriptable__"] = refuse_script
        self._shown = {name: one for name, one in shown.items() if not uses(model, name)}
        model.__dict__.update(self._shown)
        model.__dict__[_STATE] = self._plain_state

    def _makes_plans(self, alone: bool) -> PlanMaker:
        return PlanMaker(self.model, self._planner, self.around, alone, self.instead, self.family)

    def __reduce__(self) -> tuple[Any, ...]:
        """Become None in a copy of the model that its class makes by a method of its own."""
        return type(None), ()

    def _plain_state(self) -> Any:
        """Return the state for copies and pickles of the model: a plain model's."""
        state: Any = type(self.model).__getstate__(self.model)  # type: ignore[no-untyped-call]
        if not isinstance(state, dict):
            return state
        state = {
            name: value for name, value in state.items() if not self._is_set_by_memopt(name, value)
        }
        hooks = state.get(FORWARD_PRE_HOOKS)
        if hooks is not None:
            kept = ((key, hook) for key, hook in hooks.items() if key != self._hook.id)
            state[FORWARD_PRE_HOOKS] = type(hooks)(kept)
        return state

    def _is_set_by_memopt(self, name: str, value: Any) -> bool:
        """Return whether an attribute of the model was set by memopt."""
        return name == _STATE or (name in self._shown and value is self._shown[name])

    def count_in(self, calls: Calls) -> None:
        """Count the calls in `calls` from now on."""
        if self.model.__dict__.get("calls") is self.calls:
            self.model.__dict__["calls"] = self._shown["calls"] = calls
        self.calls = calls
        for made in self.plans.made():
            count_in(made.module, calls)

    def remove(self) -> None:
        """Undo the wrap: the model runs as before."""
        self.plans.end()
        self._lengths.forget()
        self.model.__dict__.pop(_CALL, None)
        self._hook.remove()
        self.around.remove()
        own = self.model.__dict__
        for name in [name for name, value in own.items() if self._is_set_by_memopt(name, value)]:
            del own[name]

    def prepare(self, shapes: Iterable[Any]) -> None:
        """Plan for calls with these inputs now, the largest first, since all shapes share its
        arena. If one cannot be planned, leave the model as before."""
        with unplanned(), ExitStack() as undone:
            undone.callback(self.remove)
            calls = [to_call(inputs) for inputs in shapes]
            calls.sort(key=lambda call: -sum(tensor.nbytes for tensor in call.tensors()))
            for call in calls:
                call = self._without_idle_masks(in_order(call.args, call.kwargs))
                self._last_kind = self._kind(call)
                self._made(self._last_kind, call)
            undone.pop_all()

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        # Dynamo sees this much while it captures the model or one around it.
        if captured_around():
            return plain_call(self.model, *args, **kwargs)
        return self._run(*args, **kwargs)

    def _running(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        if passes_on(model):
            return plain_call(model, *args, **kwargs)
        self.around.settled |= torch.is_grad_enabled()
        if not (model.training and torch.is_grad_enabled()):
            with unplanned(), beside_ranks(model, evaluates=True):
                output = plain_call(model, *args, **kwargs)
                return self.calls.fall_back(model, PARTLY_TRAINING, output)
        self.around.before_engine(has_engine(model))
        return with_engine_around(model, self._training_call, args, kwargs)

    def _training_call(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model in training, without an engine's hooks."""
        model, plain = self.model, partial(plain_call, self.model)
        with unplanned(), beside_ranks(model, evaluates=False):
            call, kind, why = in_order(args, kwargs), None, why_not_inside()
            if why is None:
                call, kind = self._call_and_kind(args, kwargs)
            if len(self.plans) and not self._maker.alone:
                why = agreed(model, why, kind, self._on_mismatch == "error")
            if why is not None:
                self.calls.fall_back(model, why)
                return plain(*args, **kwargs)
            self.around.calling(self._lengths.met_as(kind)[0], call, *self.plans.waiting())
            self._in_call.plans = 0
            try:
                made = self._planned(kind, call)
            except NothingToTrainError:
                self._untrained.add(kind)
                return self._untrained_call(kind, plain(*args, **kwargs))
            except (InputsError, ProfilerBusyError) as error:
                if not self._maker.alone:
                    raise
                made = str(error)
            if not isinstance(made, Made):
                output = plain(*args, **kwargs)  # it may fail as it does without memopt
                return output if made is None else self.calls.fall_back(model, made, output)
            self.family.serves(made.plan.program, made.spare_bytes)
            output = self._ran(made, args, kwargs)
            met_as, times = self._lengths.met_as(kind)
            met = partial(self._maker.met, met_as, made)
            self.around.called(met_as, call, output, self._metered_on(call), met, times)
            return output

    def _ran(self, made: Made, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call under a plan: hooks on all modules run inside its step alone."""
        return made.module.forward(*args, **kwargs)

    def _metered_on(self, call: Call) -> torch.device | None:
        """Return the device on which a call's loss is to be metered; None: it is charged."""
        return None if self._planner.charges_loss(call) else device_of(self.model, call)

    def _untrained_call(self, kind: Any, output: Any) -> Any:
        """Count a call with nothing to train, and return its output: a gradient has it planned."""
        if any(isinstance(x, torch.Tensor) and x.requires_grad for x in pytree.tree_leaves(output)):
            self._untrained.discard(kind)
            return self.calls.fall_back(self.model, "it seemed to have nothing to train", output)
        self.calls.original += 1
        return output

    def _without_idle_masks(self, call: Call) -> Call:
        """Return the call, captured without masks that mask nothing where a plan can serve it."""
        looks = self._none_masks and self._on_mismatch == "plan"
        return replace(call, whole_masks=masks_nothing(call)) if looks else call

    def _call_and_kind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Any]:
        """Return a call of the model, and its kind."""
        call = in_order(args, kwargs)
        if self._rounds_by_mask and self._on_mismatch == "plan":
            call = replace(call, whole_masks=none_masks(self.model, call))
            self._none_masks = bool(call.whole_masks)
        return self._backward.as_arrives(call, self._kind(call))

    def _kind(self, call: Call) -> Any:
        """Return the key of calls that one plan may serve."""
        with naming_parts(self._to_part):
            check_leaves(call)
        # What accumulates has a plan with room for gradients from its first micro-batch on.
        parameters = parameters_in(self.model)
        trained = [parameter.requires_grad for parameter in parameters]
        holding = accumulating() or any(x.is_leaf and x.grad is not None for x in parameters)
        leaves = tuple(map(described, call.leaves))
        marks = (call.whole_masks, call.orders)
        return call.spec, leaves, autocast_state(), *marks, tuple(trained), holding

    def _planned(self, kind: Any, call: Call) -> Made | str | None:
        """Return the model under a plan for calls such as this one, made now if there is none, or
        why they run unplanned (None: it is counted). That module checks whether all else is as
        planned.

        Raises:
            NothingToTrainError: such calls have no backward.
        """
        if (ready := self._ready(kind, call)) is not None:
            return ready
        if kind in self._untrained or not asks_for_gradients(self.model, call):
            if not (self.plans or self._untrained):
                check_untrained(self.model)
            raise NothingToTrainError("a call of the wrapped model has nothing to train")
        if self.plans and self._on_mismatch == "error":
            raise GuardError(_NO_PLAN.format(shown(call), difference(self._last_kind, kind)))
        averages = cumulative_average(self.model)
        if self.plans and (averages or self._on_mismatch == "original"):
            return averages or "calls of this kind are not planned"
        if (lazy := uninitialised(self.model)) is not None:
            return lazy
        if (shared := self._lengths.made(kind, call)) is not None:
            return shared
        made = self._made(kind, call)
        if self._maker.alone and not self._in_parts:
            self._lengths.planned(kind, made)
        before, self._last_kind = self._last_kind, kind
        self._count("" if before is None else difference(before, kind) + self._lengths.said())
        return made

    def _ready(self, kind: Any, call: Call) -> Made | None:
        """Return the plan of a kind of call, a better one or one that charges more if need be."""
        if (ready := self.plans.last_used(kind)) is None:
            return None
        made = self._improved(kind, call, ready)
        if not (self._maker.keeps(made, kind, call) or cumulative_average(self.model)):
            made = self._made(kind, call, made)
        return made

    def _improved(self, kind: Any, call: Call, made: Made) -> Made:
        """Return a plan, or a better one that was found."""
        if (better := self._maker.improved(made, kind, call)) is None:
            return made
        self._prepare(kind, call, better)
        self.plans.replace(kind, call, made, better)
        return better

    def _count(self, differs: str) -> None:
        """Count a plan that a call asked for."""
        self._asked += 1
        warn_of_many_plans(self._asked, differs, 'on_mismatch="original"')

    def _prepare(self, kind: Any, call: Call, made: Made) -> None:
        """Prepare a module under a new plan for calls; it no longer holds the example inputs."""
        captured_of(made.module).call.let_go([*self.model.parameters(), *self.model.buffers()])
        count_in(made.module, self.calls)
        if self._maker.alone:
            self._backward.watch(kind, call, made.module, whole=not self._in_parts)

    def _made(
        self, kind: Any, call: Call, instead_of: Made | None = None, beside: Charges = NO_CHARGES
    ) -> Made:
        naming = naming_parts(self._to_part)
        if self._maker.alone and not self.around.can_measure(call):
            raise ProfilerBusyError
        with self._planning, naming, telling_ranks(self.model, "a step is planned"):
            made = self._maker.made(kind, kind[-1], replace(call), beside)
        if instead_of is not None:
            made.again = instead_of.again
        self._prepare(kind, call, made)
        self.plans.add(kind, call, made, instead_of)
        return made

    def _made_in_backward(self, *given: Any) -> Made:
        with unplanned(), engine_off(self.model):
            return self._made(*given)

    def instead(self, model: nn.Module, call: Call, error: GuardError) -> nn.Module:
        """Return an earlier plan's module, or a new one's, for a call whose plan no longer fits."""
        call = self._without_idle_masks(call)
        call, kind = self._backward.as_arrives(call, self._kind(call))
        for made in self.plans.of(kind):
            if accepts(made.module, call):
                self.plans.use(kind, made)
                return made.module
        _LOG.info("planning again: %s", error)
        self._lengths.forget()
        # Loops that average weights (SWA) set batch norm so for an epoch without backward.
        enough = self._in_call.plans == _MOST_IN_A_CALL or self.plans.are_enough(kind, error)
        if enough or cumulative_average(model):
            return model
        self._in_call.plans += 1
        try:
            made = self._made(kind, call)
        except (InputsError, NothingToTrainError):
            return model
        self._count(str(error).partition(";")[0])
        return made.module
