"""Warns where the parts of a gradient are added in another order than without a plan.

Autograd adds the parts of a gradient one after the other, over all uses in a backward. A planned
call adds its own parts first and hands over the sum: behind parts of other calls, or of uses
outside of the model, last bits can differ; also where a reentrant checkpoint adds its part to a
gradient of earlier calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from memopt.executor.hook_order import HookOrder
from memopt.models.warned import warn
from memopt.step.captured import Captured, Primal
from memopt.step.nodes import CHECKPOINTED
from memopt.torch_private.modes import backward_number, when_backward_is_over
from memopt.torch_private.tensors import hook_first

_SUM = torch.ops.aten.add.Tensor
_COPIES = frozenset((torch.ops.aten.clone.default,))
_LATER = (
    "and in the same backward also by another call or outside of the model: planned, the parts of "
    "its gradient are added call by call, unplanned, one after the other, so that last bits can "
    "differ. For equal bits let one planned call hold all uses: all inputs at once (torch.cat), "
    "the loss in the forward, or memopt around the module that holds this one; or train without a "
    "plan (memopt.unwrap(model), or planned.original); this is said once"
)
_APART = (
    "in a reentrant checkpoint, and has a gradient of earlier calls: unplanned, each checkpoint "
    "adds its part to that, planned, their sum is added, so that last bits can differ. For equal "
    "bits call checkpoint with use_reentrant=False, which does not; this is said once"
)


class AddedLater:
    """Checks, in each backward of a captured model, whether gradients that it sums are added to
    others."""

    def __init__(self, captured: Captured) -> None:
        self._names = {
            i: _name(primal)
            for i, (primal, gradient) in enumerate(
                zip(captured.primals, captured.gradients, strict=True)
            )
            if _is_sum(gradient)
        }
        self._apart = {i for i in self._names if _in_reentrant(captured, captured.primals[i])}
        self._hooks = HookOrder(captured)

    def look(self, primals: Sequence[Any], gradient_of: Callable[[int], Any]) -> None:
        """Have autograd report when it has all parts of a gradient that planned calls have summed,
        and call the hooks on gradients in eager's order.

        Args:
            primals: the values of the joint graph's inputs.
            gradient_of: position → its gradient, of this call; None where there is none.
        """
        self._hooks.arrange(primals)
        for i in self._names if backward_number() != -1 else ():
            value, gradient = primals[i], gradient_of(i)
            if isinstance(gradient, torch.Tensor) and value.requires_grad:
                _Arrival(self, i, value, gradient)
            if i in self._apart and value.is_leaf and value.grad is not None:
                self.warn(i, _APART)

    def warn(self, position: int, words: str = _LATER) -> None:
        """Say, once, that last bits can differ; `position`: the joint graph's input."""
        name = self._names.get(position)
        self._names = {}
        if name is None:
            return
        warn(f"{name} is used more than once in a call of a planned model, {words}")


class _Arrival:
    """A hook on a value for one backward. Autograd adds later parts to the first one, in place: if
    another tensor arrives, a call's sum was not the first."""

    def __init__(
        self, added: AddedLater, position: int, value: torch.Tensor, gradient: torch.Tensor
    ) -> None:
        self._added, self._position = added, position
        self._address, self._task = gradient.data_ptr(), backward_number()
        # Before hooks of the user's, which may hand on another tensor.
        handle = hook_first(value, self)
        when_backward_is_over(handle.remove)

    def __call__(self, gradient: torch.Tensor) -> None:
        if backward_number() == self._task and gradient.data_ptr() != self._address:
            self._added.warn(self._position)


def _name(primal: Primal) -> str:
    if primal.index is not None:
        return f"argument {primal.index}"
    return primal.name or "a tensor of the model"


def _is_sum(gradient: Any) -> bool:
    """Return whether a gradient is a sum of several parts, or a view or copy of one."""
    while isinstance(gradient, Node):
        if gradient.target is _SUM:
            return sum(isinstance(one, Node) for one in gradient.args) > 1
        if not (gradient.target in _COPIES or getattr(gradient.target, "is_view", False)):
            return False
        gradient = gradient.args[0]
    return False


def _in_reentrant(captured: Captured, primal: Primal) -> bool:
    """Return whether a joint graph's input is used in a checkpoint that may be reentrant."""
    used = any(CHECKPOINTED in user.meta for user in primal.node.users)
    return used and captured.outputs.reentrant
