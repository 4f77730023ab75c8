"""A model that runs its training calls under plans, made when a kind of call is first met.

The model stays the object that it is: its class, forward, attributes, files and copies. torch asks
`_compiled_call_impl` before a module's own call (`nn.Module.compile` sets it); so does this. It is
left out of copies and pickles, which are plain models.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from memopt.errors import GuardError
from memopt.executor.module import Calls, OnMismatch, PlannedModule
from memopt.models.locks import ForkedLock
from memopt.profiler.backend import autocast_state
from memopt.profiler.dependencies.reader import described
from memopt.profiler.inputs import Call, to_call
from memopt.profiler.torch_private import captured_around

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord

Made: TypeAlias = tuple[PlannedModule, "PlanRecord"]
Planner: TypeAlias = Callable[[nn.Module, Call, bool, OnMismatch], Made]
"""(the model, a call of it, whether its parameters hold gradients, who takes calls for which the
plan does not hold any more) → the model under a plan for such calls, and that plan."""

_NO_PLAN = (
    "the wrapped model has no plan for this kind of call; pass an example of it in shapes= of "
    'memopt.wrap, or on_mismatch="plan" or "original"'
)

_LOG = logging.getLogger(__name__)

_CALL = "_compiled_call_impl"
_INSIDE = threading.local()
"""Whether this thread is inside a call of a wrapped model: those within it run plainly."""


def _opaque(_model: nn.Module, _args: Any) -> None:
    """Under `torch.compile` of the model or of one around it: the model runs as it is called, not
    as a part of that graph. Dynamo sees hooks, and not `_compiled_call_impl`."""
    if torch.compiler.is_dynamo_compiling() and not captured_around():
        torch._dynamo.graph_break()


@contextlib.contextmanager
def _inside() -> Iterator[None]:
    before = getattr(_INSIDE, "running", False)
    _INSIDE.running = True
    try:
        yield
    finally:
        _INSIDE.running = before


class SelfPlanning:
    """What makes a model plan its own training calls; `remove()` makes it what it was.

    Args:
        model: the model. Its calls go through here from now on.
        planner: makes plans.
        most_plans: how many kinds of calls stay ready to run; of more, those go that were not
            called for longest.
        on_mismatch: what kinds of calls do that come after the first: "plan", "original", "error".

    Attributes:
        model: the model.
        calls: how many calls ran in which way.

    Raises:
        ValueError: the model's calls go elsewhere already (`model.compile()`, another wrap).
    """

    def __init__(
        self, model: nn.Module, planner: Planner, most_plans: int, on_mismatch: str = "plan"
    ) -> None:
        if getattr(model, _CALL, None) is not None:
            raise ValueError(
                "the model's calls are taken already: wrap it before model.compile(), or not "
                "twice (memopt.unwrap(model) undoes it)"
            )
        self.model, self.calls = model, Calls()
        self._planner, self._most, self._on_mismatch = planner, most_plans, on_mismatch
        self._ready: OrderedDict[Any, Made] = OrderedDict()
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
        return tuple(plan for _, plan in self._ready.values())

    def count_in(self, calls: Calls) -> None:
        """Count the calls elsewhere from now on."""
        self.calls = calls
        for one, _ in self._ready.values():
            one.count_in(calls)

    def remove(self) -> None:
        """The model runs as before."""
        setattr(self.model, _CALL, None)
        self._hook.remove()

    def prepare(self, inputs: Any) -> None:
        """Plan for calls such as `inputs` now."""
        call = to_call(inputs)
        with _inside():
            call = _in_order(call.args, call.kwargs)
            self._made(self._kind(call), call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        # This much dynamo sees, while it captures the model or one around it.
        if captured_around():
            return self.model._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]
        return self._run(*args, **kwargs)

    def _running(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model
        unplanned: Callable[..., Any] = model._call_impl
        if getattr(_INSIDE, "running", False):
            return unplanned(*args, **kwargs)
        with _inside():
            if not (model.training and torch.is_grad_enabled()):
                self.calls.fall_back(model, "the model itself is in eval mode, parts of it are not")
                return unplanned(*args, **kwargs)
            planned = self._planned(_in_order(args, kwargs))
            return (planned or unplanned)(*args, **kwargs)

    def _kind(self, call: Call) -> Any:
        """What calls that one plan may serve have in common."""
        holding = any(p.grad is not None for p in self.model.parameters())
        return call.spec, tuple(map(described, call.leaves)), autocast_state(), holding

    def _planned(self, call: Call) -> PlannedModule | None:
        """The model under a plan for calls such as this one, made now if there is none. That
        module looks whether all else is as planned."""
        kind = self._kind(call)
        if kind in self._ready:
            self._ready.move_to_end(kind)
            return self._ready[kind][0]
        if self._ready and self._on_mismatch == "error":
            raise GuardError(_NO_PLAN)
        if self._ready and self._on_mismatch == "original":
            self.calls.fall_back(self.model, "calls of this kind are not planned")
            return None
        return self._made(kind, call)

    def _made(self, kind: Any, call: Call) -> PlannedModule:
        with self._planning:
            made = self._planner(self.model, call, kind[-1], partial(self._made_again, kind))
        made[0].count_in(self.calls)
        self._ready[kind] = made
        while len(self._ready) > self._most:
            self._ready.popitem(last=False)
        return made[0]

    def _made_again(
        self, kind: Any, model: nn.Module, call: Call, error: GuardError
    ) -> PlannedModule:
        """Where something beside a call of the kind has changed since it was planned, a new plan
        takes its place."""
        _LOG.info("planning again: %s", error)
        return self._made(kind, call)


def _in_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """A call, its keywords sorted: one plan serves it in whatever order they are given."""
    return Call(args, dict(sorted(kwargs.items())))
