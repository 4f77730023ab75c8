"""Hooks on, and `retain_grad()` of, outputs of a planned call from which others are computed.

Autograd completes the gradient of such an output between the functions that compute the others and
those that compute itself. A planned call is one function: autograd hands it the part of that
gradient that comes from outside, and calls hooks with that. So the call runs again without a plan,
with the hooks where eager has them.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from memopt.errors import ExecutionError
from memopt.step.backend import autocast_off
from memopt.torch_private import pytree
from memopt.torch_private.engine_hooks import is_of_several, users_hooks
from memopt.user_code.own_backward import gradient_hooks_off, has_reentrant

INNER = (
    "an output of a planned call, from which others of its outputs are computed, has a hook on its "
    "gradient or retains it, and a part of that gradient comes from inside of the plan"
)
REMEDY = (
    "give the model an argument of zeros that requires a gradient, add it to that tensor in the "
    "forward (h + zeros), and hook or read the argument's gradient; or train without a plan "
    "(memopt.unwrap(model), or planned.original)"
)


class InnerOutputs:
    """The outputs of a call from which others are computed.

    Args:
        output: what the caller gets.
        positions: of these outputs among its leaves → of those that are computed from them.
    """

    def __init__(self, output: Any, positions: Mapping[int, frozenset[int]]) -> None:
        leaves = pytree.tree_leaves(output) if positions else []
        self._computed = positions
        self._given = {
            i: weakref.ref(leaves[i])
            for i in positions
            if isinstance(leaves[i], torch.Tensor) and leaves[i].requires_grad
        }

    def asked(self, begun: Collection[int]) -> bool:
        """Return whether one that gets a part of its gradient from inside of the plan, where a
        backward begins at the outputs `begun`, has a hook, or retains its gradient."""
        return next(self._asked(begun), None) is not None

    def _asked(self, begun: Collection[int]) -> Iterator[tuple[list[int], torch.Tensor]]:
        """Yield each such output once, with all positions at which it is returned."""
        found: dict[int, tuple[list[int], torch.Tensor]] = {}
        for position, given in self._given.items():
            tensor = None if self._computed[position].isdisjoint(begun) else given()
            if tensor is not None and (tensor.retains_grad or users_hooks(tensor)):
                found.setdefault(id(tensor), ([], tensor))[0].append(position)
        yield from found.values()

    def hooked(
        self, again: Sequence[Any], begun: Mapping[int, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]]:
        """Let the hooks be on the outputs of a call that runs again.

        Args:
            again: the leaves of its output.
            begun: the gradients that come from outside, by position.

        Returns:
            Of each output that retains its gradient: the output, the one again, and the gradient
            from outside, which autograd has retained already.

        Raises:
            ExecutionError: a hook has been called with a gradient from outside, or is one of
                several tensors, which counts those of one backward, or the output is what the
                forward leaves in an attribute, which it does not do again.
        """
        found = []
        for positions, tensor in self._asked(begun):
            hooks, position = users_hooks(tensor), positions[0]
            outside = next((begun[one] for one in positions if one in begun), None)
            if position >= len(again):
                raise ExecutionError(
                    f"{INNER}: the forward leaves it in an attribute. Return it, or {REMEDY}"
                )
            if hooks and outside is not None:
                raise ExecutionError(
                    f"{INNER}: the hook on output {position} was called without it. You can "
                    f"{REMEDY}"
                )
            if any(map(is_of_several, hooks)):
                raise ExecutionError(
                    f"{INNER}: a hook of several tensors (register_multi_grad_hook) is on output "
                    f"{position}. You can {REMEDY}"
                )
            for hook in hooks:
                again[position].register_hook(hook)
            if tensor.retains_grad:
                again[position].retain_grad()
                found.append((tensor, again[position], outside))
        return found


def gradients_of(
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
    wanted: Sequence[torch.Tensor],
    retained: Sequence[tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]],
) -> tuple[Any, ...]:
    """Return the gradients of the tensors `wanted`, without their hooks, from those of others.
    Leave those of outputs with those that retain theirs (`InnerOutputs.hooked`)."""
    outputs, gradients = [output for output, _ in pairs], [gradient for _, gradient in pairs]
    differentiated = torch.is_grad_enabled()
    with autocast_off(), gradient_hooks_off(wanted):
        found: tuple[Any, ...]
        if not differentiated and has_reentrant(outputs):
            found = _accumulated(outputs, wanted, gradients)
        else:
            found = torch.autograd.grad(
                outputs, wanted, gradients, create_graph=differentiated, allow_unused=True
            )
    for tensor, again, outside in retained:
        if again.grad is not None:
            _retain(tensor, again.grad, outside)
    return found


def _accumulated(
    outputs: Sequence[torch.Tensor],
    wanted: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor],
) -> tuple[Any, ...]:
    """Return the gradients of tensors by a backward that accumulates them, the only one that a
    reentrant checkpoint takes; restore their own."""
    kept = [(tensor, tensor.grad if tensor.is_leaf else None) for tensor in wanted]
    try:
        for tensor in wanted:
            if tensor.is_leaf:
                tensor.grad = None
            else:
                tensor.retain_grad()
        torch.autograd.backward(outputs, gradients)
        return tuple(tensor.grad for tensor in wanted)
    finally:
        for tensor, gradient in kept:
            tensor.grad = gradient


def _retain(tensor: torch.Tensor, gradient: torch.Tensor, outside: torch.Tensor | None) -> None:
    """Add a gradient to an output's `grad`, in place of the part of it that was added there.

    Raises:
        ExecutionError: an earlier backward has added one, too.
    """
    kept = tensor.grad
    if outside is not None and kept is not None:
        if not torch.equal(kept, outside):
            raise ExecutionError(f"{INNER}, for the second time. You can {REMEDY}")
        kept = None
    tensor.grad = gradient if kept is None else kept + gradient
