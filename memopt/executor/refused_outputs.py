"""Outputs of planned calls that have no planned backward, since the planned loss uses others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from memopt.errors import ExecutionError
from memopt.torch_private import pytree

Instead: TypeAlias = Callable[[Sequence[Any]], Sequence[Any]]
"""Returns gradients of a call's operands from those of its outputs."""


class _Refusing(torch.autograd.Function):
    """Returns the values themselves, with a backward of another kind, or one that raises."""

    @staticmethod
    def forward(ctx: Any, instead: Instead | None, count: int, *tensors: torch.Tensor) -> Any:
        ctx.instead, ctx.count = instead, count
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.aten.alias.default(value) for value in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        if ctx.instead is None:
            raise ExecutionError(
                "this output of the planned model has no gradient: the loss that the plan was made "
                "for does not use it. Plan again with the loss that you train with (loss_fn= of "
                "memopt.plan or memopt.wrap), or, with memopt.plan, without loss_fn= for any"
            )
        return None, None, *([None] * ctx.count), *ctx.instead(gradients)


def refusing_gradients(
    output: Any,
    positions: tuple[int, ...],
    instead: Callable[[tuple[int, ...], Sequence[Any]], Sequence[Any]] | None = None,
    wanted: Sequence[torch.Tensor] = (),
) -> Any:
    """Make a planned model's output raise ExecutionError in a backward of its leaves at
    `positions`. Leaves that are inputs themselves keep their gradient.

    Args:
        output: the output, a pytree.
        positions: of its leaves.
        instead: returns the gradients of the tensors `wanted` from those of the leaves at the
            given positions, rather than the error.
        wanted: leaves of autograd that the output depends on.
    """
    if not positions or not torch.is_grad_enabled():
        return output
    leaves, spec = pytree.tree_flatten(output)
    first: dict[int, int] = {}
    for position in positions:
        if not leaves[position].requires_grad:
            first.setdefault(id(leaves[position]), position)
    if not first:
        return output
    own = tuple(first.values())
    reached = wanted or [torch.empty(0, requires_grad=True, device="cpu")]
    run = None if instead is None else partial(instead, own)
    made = _Refusing.apply(run, len(own), *(leaves[i] for i in own), *reached)  # type: ignore[no-untyped-call]
    by_value = dict(zip(first, made, strict=True))
    for position in positions:
        leaves[position] = by_value.get(id(leaves[position]), leaves[position])
    return pytree.tree_unflatten(leaves, spec)
