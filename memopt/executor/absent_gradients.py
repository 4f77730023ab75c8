"""Keeps hooks on gradients from being called for gradients that a loss does not give.

Autograd goes on to each input of a node, with None where the node returns None, and calls the hooks
there. Without a plan, autograd does not reach inputs that the loss does not use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from memopt.torch_private.modes import when_backward_is_over
from memopt.torch_private.tensors import gradient_hooks, has_gradient_hooks, hook_first


def call_hooks_of_gradients_alone(values: Sequence[Any], gradients: Sequence[Any]) -> None:
    """Let the running backward call the hooks of values without a gradient from this node only if
    another node gives them one.

    Args:
        values: what a node returns gradients for.
        gradients: these; None: there is none.
    """
    for value, gradient in zip(values, gradients, strict=True):
        if gradient is None and isinstance(value, torch.Tensor) and has_gradient_hooks(value):
            hooks = [hook for some in gradient_hooks(value) for hook in (some or {}).values()]
            if value.requires_grad and not any(isinstance(hook, _IfArrived) for hook in hooks):
                _HooksAwaiting(value)


class _IfArrived:
    """A hook that is called if a gradient has arrived."""

    def __init__(self, hook: Callable[[Any], Any], arrival: _HooksAwaiting) -> None:
        self._hook, self._arrival = hook, arrival

    def __call__(self, value: Any) -> Any:
        return self._hook(value) if self._arrival.arrived else None


class _HooksAwaiting:
    """Notes whether a value gets a gradient in the running backward, ahead of its hooks."""

    def __init__(self, value: torch.Tensor) -> None:
        self.arrived = False
        for hooks in gradient_hooks(value):
            for number, hook in (hooks or {}).items():
                hooks[number] = _IfArrived(hook, self)
                when_backward_is_over(partial(_restore, hooks, number, hook))
        when_backward_is_over(hook_first(value, self).remove)

    def __call__(self, gradient: torch.Tensor | None) -> None:
        self.arrived = gradient is not None


def _restore(hooks: dict[int, Any], number: int, hook: Callable[[Any], Any]) -> None:
    if number in hooks:  # its handle did not remove it
        hooks[number] = hook
