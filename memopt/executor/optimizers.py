"""Reports the steps of every optimizer of the process to registered objects."""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.hooks import RemovableHandle


class ToldOfSteps(Protocol):
    """An object that is informed of optimizers' steps.

    Attributes:
        settled: whether not to warn any more of steps in which its model was not called.
    """

    settled: bool

    def model(self) -> nn.Module | None:
        """Return the model, if it is still there."""
        ...

    def stepping(self, optimizer: Optimizer) -> None:
        """Note that an optimizer is about to step."""
        ...

    def stepped(self, optimizer: Optimizer) -> None:
        """Note that an optimizer has stepped."""
        ...

    def charge_state(self, optimizer: Optimizer) -> None:
        """Look at the state of an optimizer that has stepped before."""
        ...


class AllOptimizers:
    """Calls back at every optimizer's steps, by one pair of hooks on all optimizers. The hooks are
    removed when nobody listens, but not while the garbage collector runs, which may be in the midst
    of a step that calls its hooks."""

    def __init__(self) -> None:
        self._told: weakref.WeakSet[ToldOfSteps] = weakref.WeakSet()
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._hooks: list[RemovableHandle] = []

    def tell(self, one: ToldOfSteps) -> None:
        """Report each later step to `one`, and each optimizer whose steps were reported."""
        for optimizer in list(self._known):
            one.charge_state(optimizer)
        self._told.add(one)
        if not self._hooks:
            self._hooks.append(register_optimizer_step_pre_hook(self._stepping))
            self._hooks.append(register_optimizer_step_post_hook(self._stepped))

    def tell_no_more(self, one: ToldOfSteps) -> None:
        """Stop reporting steps to `one`."""
        self._told.discard(one)
        while self._hooks and not self._told:
            self._hooks.pop().remove()

    def settled(self) -> set[nn.Parameter]:
        """Return the parameters of all models that are `settled`."""
        models = [one.model() for one in list(self._told) if one.settled]
        return {one for model in models if model is not None for one in model.parameters()}

    def _stepping(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        for one in list(self._told):
            one.stepping(optimizer)

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._known.add(optimizer)
        for one in list(self._told):
            one.stepped(optimizer)


OPTIMIZERS = AllOptimizers()
