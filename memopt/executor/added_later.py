"""Warns when one backward goes through several calls of a model that uses a value more than once.

Autograd adds the parts of a gradient one after the other, over all calls. A planned call adds its
own parts first and hands over the sum, so that last bits can differ.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from memopt.step.captured import Captured
from memopt.torch_private.modes import backward_number

_SUM = torch.ops.aten.add.Tensor
_COPIES = frozenset((torch.ops.aten.clone.default,))


class _Backward:
    """The running backward, and the values whose gradients planned calls have summed in it."""

    task = -1
    values: frozenset[int] = frozenset()


class AddedLater:
    """Checks, in each backward of a captured model, whether it has gone through another call.

    Args:
        captured: the captured model.
    """

    def __init__(self, captured: Captured) -> None:
        self._names = {
            i: primal.name or "a tensor of the model"
            for i, (primal, gradient) in enumerate(
                zip(captured.primals, captured.gradients, strict=True)
            )
            if _is_sum(gradient)
        }

    def look(self, primals: Sequence[Any]) -> None:
        """Warn, once, if the running backward has already summed a gradient of one of `primals`.

        Args:
            primals: the values of the joint graph's inputs.
        """
        if not self._names:
            return
        task = backward_number()
        values = frozenset(id(primals[i]) for i in self._names)
        before = _Backward.values if _Backward.task == task else frozenset()
        _Backward.task, _Backward.values = task, before | values
        name = next((n for i, n in self._names.items() if id(primals[i]) in before), None)
        if name is None:
            return
        self._names = {}
        warnings.warn(
            f"{name} is used more than once in a call of the planned model, and this backward goes "
            "through several calls: planned, the parts of its gradient are added call by call, "
            "unplanned, one after the other, so that last bits can differ. For equal bits give all "
            "inputs in one call (torch.cat), or train without a plan (memopt.unwrap(model), or "
            "planned.original); this is said once",
            stacklevel=2,
        )


def _is_sum(gradient: Any) -> bool:
    """Return whether a gradient is a sum of several parts, or a view or copy of one."""
    while isinstance(gradient, Node):
        if gradient.target is _SUM:
            return sum(isinstance(one, Node) for one in gradient.args) > 1
        if not (gradient.target in _COPIES or getattr(gradient.target, "is_view", False)):
            return False
        gradient = gradient.args[0]
    return False
