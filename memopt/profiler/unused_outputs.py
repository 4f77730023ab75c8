"""Outputs of a model that the user's loss does not use: traced, and handed out, without a gradient.

A Hugging Face model given `labels` returns its loss and its logits. Autograd would make a zero
gradient as large as the logits and carry it through the backward; a plan for a known loss does not.
Such an output still looks as eager's does (it requires a gradient), and refuses one.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from memopt.errors import ExecutionError


class _Refusing(torch.autograd.Function):
    """The value itself, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, _reached: torch.Tensor) -> torch.Tensor:
        alias: torch.Tensor = torch.ops.aten.alias.default(value)
        return alias

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        raise ExecutionError(
            "this output of the planned model has no gradient: the loss that the plan was made for "
            "does not use it. Plan again with the loss that you train with "
            "(memopt.plan(..., loss_fn=...)), or without loss_fn= for any"
        )


def refusing_gradients(output: Any, positions: tuple[int, ...]) -> Any:
    """A planned model's output; its leaves at `positions` raise ExecutionError in a backward."""
    if not positions or not torch.is_grad_enabled():
        return output
    leaves, spec = pytree.tree_flatten(output)
    made: dict[int, torch.Tensor] = {}
    for position in positions:
        value = leaves[position]
        if id(value) not in made:
            reached = torch.empty(0, requires_grad=True)
            made[id(value)] = _Refusing.apply(value, reached)  # type: ignore[no-untyped-call]
        leaves[position] = made[id(value)]
    return pytree.tree_unflatten(leaves, spec)
