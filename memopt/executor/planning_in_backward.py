"""Plans a call of a wrapped model anew in its backward, which shows what its forward could not
know: which outputs the loss uses, and in which layouts their gradients arrive."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from memopt.errors import MemoptError
from memopt.executor.differentiated import Again
from memopt.executor.module import (
    PlannedModule,
    accepts,
    has_backward,
    when_arrives_otherwise,
    when_other_loss,
)
from memopt.executor.plan_maker import Made, Planner
from memopt.executor.ready_plans import ReadyPlans
from memopt.executor.surroundings import Surroundings
from memopt.models.charges import Charges
from memopt.step.inputs import Call, Orders

_LOG = logging.getLogger(__name__)

_MOST_CHANGES = 4
"""How often a model is planned for gradients in another layout; a loop lays them out alike."""
_ORDERS = 4
"""Where the orders are in a kind of call, see `SelfPlanning._kind`."""

Make: TypeAlias = Callable[[Any, Call, Made | None, Charges], Made]
"""Makes a plan of a kind of call, in place of another one, that charges what is beside the step."""


class PlanningInBackward:
    """Plans calls anew in their backward.

    Args:
        planner, plans, around: of the wrapped model.
        make: makes a plan.
        marked: marks a call as one that a plan of its own can serve.
        forget: drops the plans that calls of several lengths share.
    """

    def __init__(
        self,
        planner: Planner,
        plans: ReadyPlans,
        around: Surroundings,
        make: Make,
        marked: Callable[[Call], Call],
        forget: Callable[[], None],
    ) -> None:
        self._planner, self._plans, self._around = planner, plans, around
        self._make, self._marked, self._forget = make, marked, forget
        self._orders: dict[Any, Orders] = {}
        self._last: Orders = ()
        self._changes = 0

    def as_arrives(self, call: Call, kind: Any) -> tuple[Call, Any]:
        """Return a call and its kind with the layouts in which gradients last arrived for calls of
        its kind, or else for any call."""
        if not self._changes:
            return call, kind
        orders = self._orders.get(_without_orders(kind), self._last)
        return replace(call, orders=orders), _with_orders(kind, orders)

    def watch(self, kind: Any, call: Call, module: PlannedModule, whole: bool) -> None:
        """Plan a module's calls anew if gradients arrive in other layouts, or if the loss uses
        other outputs than the planner guessed. Where nothing is known of the loss of a `whole`
        model, plan anew if the plan has no backward for the outputs that it uses (a part is opened
        then)."""
        when_arrives_otherwise(module, partial(self._for_other_order, kind))
        if self._planner.guesses_loss(call):
            when_other_loss(module, partial(self._for_other_loss, kind))
        elif whole and not self._planner.charges_loss(call):
            when_other_loss(module, partial(self._for_other_loss, kind, fewer=True), fewer=True)

    def _for_other_loss(
        self,
        kind: Any,
        call: Call,
        used: frozenset[int],
        gradient_bytes: int,
        fewer: bool = False,
    ) -> nn.Module | None:
        """Return the module that runs a call whose loss uses these leaves of the output, where the
        call was planned for another loss (an `OtherLoss`), or, with `fewer`, for one that uses more
        leaves. Later calls are planned for it, too, unless losses take turns at fewer leaves."""
        if fewer and self._planner.outputs and not used <= self._planner.outputs:
            return None
        _LOG.info("the loss uses other outputs than planned: planning for it")
        self._planner.train_with(used)
        self._forget()
        call = replace(self._marked(call), orders=kind[_ORDERS])
        ready = self._plans.of(kind)
        for made in [] if fewer else ready:
            if has_backward(made.module, used) and accepts(made.module, call):
                return made.module
        if not self._can_plan(call):
            for made in ready:
                made.once = True
            return None
        return self._made(kind, call, ready[-1] if ready else None, gradient_bytes)

    def _for_other_order(self, kind: Any, orders: Orders, gradient_bytes: int) -> Again | None:
        """Return a function that plans a call for gradients that arrive in these orders (an
        `OtherOrder`). Later calls of its kind are planned for them, too."""
        if self._changes == _MOST_CHANGES:
            return None
        _LOG.info("gradients arrive in another layout than planned: planning for it")
        self._changes += 1
        self._last = tuple(sorted({**dict(kind[_ORDERS]), **dict(orders)}.items()))
        self._orders[_without_orders(kind)] = self._last

        def again(call: Call) -> nn.Module | None:
            now, other = self.as_arrives(self._marked(call), kind)
            for made in self._plans.of(other):
                if accepts(made.module, now):
                    return made.module
            if not self._can_plan(now):
                return None
            try:
                return self._made(other, now, None, gradient_bytes)
            except MemoptError:
                return None

        return again

    def _can_plan(self, call: Call) -> bool:
        return self._around.stop() and self._around.can_measure(call)

    def _made(
        self, kind: Any, call: Call, instead_of: Made | None, gradient_bytes: int
    ) -> nn.Module:
        beside = Charges(kept_bytes=self._around.held_bytes(), forward_bytes=gradient_bytes)
        return self._make(kind, call, instead_of, beside).module


def _with_orders(kind: Any, orders: Orders) -> Any:
    return (*kind[:_ORDERS], orders, *kind[_ORDERS + 1 :])


def _without_orders(kind: Any) -> Any:
    return _with_orders(kind, ())
