"""Has autograd call hooks on gradients in the order in which it calls them without a plan.

Autograd calls a parameter's hooks when its gradient is complete: during the backward without a
plan, and after the planned backward has returned all gradients with one. The order is then that of
autograd's heap, unless the nodes that accumulate gradients have sequence numbers. Norms that hooks
add up, random numbers that they draw and counts that they keep depend on it.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node

from memopt.executor.drawing_hooks import DrawingHooks
from memopt.step.captured import Captured
from memopt.torch_private.modes import accumulate_in_order
from memopt.torch_private.tensors import any_gradient_hooks

_IN_ORDER = 2
"""How many gradients of one kernel autograd takes in their order. That of more (a recurrent
layer's) depends on what else is in its heap."""


class HookOrder:
    """Orders the hooks on the gradients of a captured model: its joint graph computes gradients in
    the order in which autograd completes them."""

    def __init__(self, captured: Captured) -> None:
        places = {node: place for place, node in enumerate(captured.module.graph.nodes)}
        found = {i: one for i, one in enumerate(captured.gradients) if isinstance(one, Node)}
        self._positions = sorted(found, key=lambda i: (places[found[i]], i))
        self._known = max(Counter(map(_kernel, found.values())).values(), default=0) <= _IN_ORDER
        self._drawing = DrawingHooks(captured.device or torch.device("cpu"))

    def arrange(self, primals: Sequence[Any]) -> None:
        """Have the running backward take the gradients of the joint graph's inputs in order.

        Args:
            primals: their values.
        """
        found = (primals[i] for i in self._positions)
        values = [one for one in found if isinstance(one, torch.Tensor)]  # or a DTensor's mesh
        if any_gradient_hooks(values):
            leaves = [one for one in values if one.is_leaf and one.requires_grad]
            if not (accumulate_in_order(leaves) and self._known):
                self._drawing.look(values)


def _kernel(gradient: Node) -> Any:
    return gradient.args[0] if gradient.target is operator.getitem else gradient
