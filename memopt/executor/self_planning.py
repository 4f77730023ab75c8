"""A model that runs its training calls under plans, made when a kind of call is first met.

The model stays the object that it is: its class, forward, attributes, files and copies. torch asks
`_compiled_call_impl` before a module's own call (`nn.Module.compile` sets it); so does this. It is
left out of copies and pickles, which are plain models.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memopt.errors import GuardError
from memopt.executor.arena import ArenaFamily
from memopt.executor.module import Calls
from memopt.executor.plan_maker import Made, PlanMaker, Planner, shown
from memopt.executor.surroundings import Surroundings
from memopt.executor.unplanned import runs_unplanned, unplanned
from memopt.models.locks import ForkedLock
from memopt.profiler.as_eager.masks import adds_learned_biases, masks_nothing
from memopt.profiler.backend import autocast_state
from memopt.profiler.dependencies.reader import described
from memopt.profiler.inputs import Call, device_of, to_call
from memopt.profiler.ranks import ranks_of
from memopt.profiler.torch_private import captured_around

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

_NO_PLAN = (
    "the wrapped model has no plan for this kind of call ({call}); pass an example of it in "
    'shapes= of memopt.wrap, with a larger budget= if it says so, or on_mismatch="plan" or '
    '"original"'
)

_LOG = logging.getLogger(__name__)

_CALL = "_compiled_call_impl"


def _opaque(_model: nn.Module, _args: Any) -> None:
    """Under `torch.compile` of the model or of one around it: the model runs as it is called, not
    as a part of that graph. Dynamo sees hooks, and not `_compiled_call_impl`."""
    if torch.compiler.is_dynamo_compiling() and not captured_around():
        torch._dynamo.graph_break()


class SelfPlanning:
    """What makes a model plan its own training calls; `remove()` makes it what it was.

    Args:
        model: the model. Its calls go through here from now on.
        planner: makes plans.
        most_plans: how many kinds of calls stay ready to run; of more, those go that were not
            called for longest.
        on_mismatch: what kinds of calls do that come after the first: "plan", "original", "error".
        with_state: whether the optimizer's state is to be found and charged.

    Attributes:
        model: the model.
        calls: how many calls ran in which way.
        around: what is met around its steps.
        family: the arena that the plans with addresses share.

    Raises:
        ValueError: the model's calls go elsewhere already (`model.compile()`, another wrap).
    """

    def __init__(
        self,
        model: nn.Module,
        planner: Planner,
        most_plans: int,
        on_mismatch: str = "plan",
        with_state: bool = True,
    ) -> None:
        if getattr(model, _CALL, None) is not None:
            raise ValueError(
                "the model's calls are taken already: wrap it before model.compile(), or not "
                "twice (memopt.unwrap(model) undoes it)"
            )
        self.model, self.calls, self.family = model, Calls(), ArenaFamily()
        self._most, self._on_mismatch = most_plans, on_mismatch
        self._biased = adds_learned_biases(model)
        # Of one kind those that something beside the call tells apart, the last used at the end.
        self._ready: OrderedDict[Any, list[Made]] = OrderedDict()
        # Ranks that plan together would have to meet the same.
        self._alone = ranks_of(model) is None
        self.around = Surroundings(model, with_state and self._alone)
        self._planner = planner
        self._maker = PlanMaker(model, planner, self.around, self._alone, self.instead, self.family)
        self._planning = ForkedLock()
        self._run: Callable[..., Any] = torch.compiler.disable(self._running)  # type: ignore[no-untyped-call]
        setattr(model, _CALL, self._call)
        # First, so that dynamo stops before the other hooks.
        self._hook = model.register_forward_pre_hook(_opaque, prepend=True)

    def __reduce__(self) -> tuple[Any, ...]:
        """Nothing, in a copy or a pickle of the model: that one is a plain model."""
        return type(None), ()

    @property
    def plans(self) -> tuple[PlanRecord, ...]:
        """The plans that are ready to run, the one that ran last at the end."""
        return tuple(one.plan for made in self._ready.values() for one in made)

    def count_in(self, calls: Calls) -> None:
        """Count the calls elsewhere from now on."""
        self.calls = calls
        for made in self._ready.values():
            for one in made:
                one.module.count_in(calls)

    def remove(self) -> None:
        """The model runs as before."""
        setattr(self.model, _CALL, None)
        self._hook.remove()
        self.around.remove()

    def prepare(self, shapes: Iterable[Any]) -> None:
        """Plan for calls such as these inputs now: the largest first, whose arena the others of a
        family are to run in."""
        calls = [to_call(inputs) for inputs in shapes]
        calls.sort(key=lambda call: -sum(tensor.nbytes for tensor in call.tensors()))
        with unplanned():
            for call in calls:
                call = self._seen(_in_order(call.args, call.kwargs))
                self._made(self._kind(call), call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        # This much dynamo sees, while it captures the model or one around it.
        if captured_around():
            return self.model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self._run(*args, **kwargs)

    def _running(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        plain: Callable[..., Any] = model._call_impl
        if runs_unplanned():
            return plain(*args, **kwargs)
        with unplanned():
            if not (model.training and torch.is_grad_enabled()):
                self.calls.fall_back(model, "the model itself is in eval mode, parts of it are not")
                return plain(*args, **kwargs)
            call = self._seen(_in_order(args, kwargs))
            kind = self._kind(call)
            self.around.calling(kind)
            made = self._planned(kind, call)
            if made is None:
                return plain(*args, **kwargs)
            output = made.module(*args, **kwargs)
            known = not self._alone or self._planner.charges_loss(call)
            device = None if known else device_of(model, call)
            self.around.called(kind, call, output, device, partial(self._maker.met, kind, made))
            return output

    def _seen(self, call: Call) -> Call:
        """A call with what eager would see in its masks, if it can have a plan of its own."""
        seen = self._biased and self._on_mismatch == "plan" and masks_nothing(call)
        return replace(call, whole_masks=seen)

    def _kind(self, call: Call) -> Any:
        """What calls that one plan may serve have in common."""
        trained, holding = [], False
        for parameter in self.model.parameters():
            trained.append(parameter.requires_grad)
            holding = holding or parameter.grad is not None
        leaves = tuple(map(described, call.leaves))
        return call.spec, leaves, autocast_state(), call.whole_masks, tuple(trained), holding

    def _planned(self, kind: Any, call: Call) -> Made | None:
        """The model under a plan for calls such as this one, made now if there is none. That
        module looks whether all else is as planned."""
        if kind in self._ready:
            self._ready.move_to_end(kind)
            made = self._ready[kind][-1]
            if not self._maker.keeps(made, kind):
                made = self._made(kind, call, made)
            if made.plan.program.offsets is None:
                self.family.idle.clear()
            return made
        if self._ready and self._on_mismatch == "error":
            raise GuardError(_NO_PLAN.format(call=shown(call)))
        if self._ready and self._on_mismatch == "original":
            self.calls.fall_back(self.model, "calls of this kind are not planned")
            return None
        return self._made(kind, call)

    def _made(self, kind: Any, call: Call, instead_of: Made | None = None) -> Made:
        with self._planning:
            made = self._maker.made(kind, kind[-1], call)
        made.module.count_in(self.calls)
        ready = self._ready.setdefault(kind, [])
        if instead_of in ready:
            ready.remove(instead_of)
        ready.append(made)
        self._ready.move_to_end(kind)
        while len(self.plans) > self._most:
            oldest = next(iter(self._ready))
            del self._ready[oldest][0]
            if not self._ready[oldest]:
                del self._ready[oldest]
        return made

    def instead(self, model: nn.Module, call: Call, error: GuardError) -> nn.Module:
        """What a planned module does where something beside the call has changed since it was
        planned (an `OnMismatch`): an earlier plan that fits takes its place, or a new one."""
        call = self._seen(call)
        kind = self._kind(call)
        for made in self._ready.get(kind, ()):
            if made.module.accepts(call):
                self._ready[kind].remove(made)
                self._ready[kind].append(made)
                return made.module
        _LOG.info("planning again: %s", error)
        return self._made(kind, call).module


def _in_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A call, its keywords sorted: one plan serves it in whatever order they are given."""
    return Call(args, dict(sorted(kwargs.items())))
