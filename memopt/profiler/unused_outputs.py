"""Outputs of a model that the user's loss does not use: traced, and handed out, without a gradient.

A Hugging Face model given `labels` returns its loss and its logits. Autograd would make a zero
gradient as large as the logits and carry it through the backward; a plan for a known loss does not.
Such an output still looks as eager's does (it requires a gradient), and refuses one.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from memopt.errors import CaptureError, ExecutionError


def detach_outputs(traced: GraphModule, positions: tuple[int, ...]) -> None:
    """Detach outputs of a dynamo graph, in place; `positions` are among its output's leaves.

    Raises:
        CaptureError: the model does not return the same outputs each time it is called.
    """
    if not positions:
        return
    output = next(node for node in traced.graph.nodes if node.op == "output")
    leaves = list(output.args[0])
    if max(positions) >= len(leaves):
        raise CaptureError(
            f"the model returned {len(leaves)} values when it was captured and at least "
            f"{max(positions) + 1} when its loss was measured; memopt needs the same in every step"
        )
    with traced.graph.inserting_before(output):
        for position in positions:
            leaves[position] = traced.graph.call_method("detach", (leaves[position],))
    output.args = (tuple(leaves),)
    traced.recompile()


class _Refusing(torch.autograd.Function):
    """The value itself, with a backward that raises."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, _reached: torch.Tensor) -> torch.Tensor:
        return value.view_as(value)

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
    for position in positions:
        reached = torch.empty(0, requires_grad=True)
        leaves[position] = _Refusing.apply(leaves[position], reached)  # type: ignore[no-untyped-call]
    return pytree.tree_unflatten(leaves, spec)
