"""Passes gradients of a train step's inputs on, as autograd would."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch

from memopt.errors import ExecutionError
from memopt.torch_private.tensors import has_gradient_hooks
from memopt.user_code.own_backward import reaches


def check_behind(leaves: list[Any], parameters: Iterable[torch.Tensor]) -> None:
    """Refuse inputs whose own backward reads what the step updates before it could run.

    Raises:
        ExecutionError: an input was computed from a parameter of the step's model.
    """
    computed = [
        (position, leaf)
        for position, leaf in enumerate(leaves)
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    if not computed:
        return
    own = list(parameters)
    for position, leaf in computed:
        if reaches(leaf, own):
            raise ExecutionError(
                f"argument {position} was computed from the model's own parameters, which a train "
                "step updates before their gradient from there could be added: pass it detached, "
                "or plan without loss_fn= and step the optimizer yourself"
            )


def pass_on(gradients: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Give inputs their gradients, those of computed inputs to the graphs that computed them.

    Args:
        gradients: (input, gradient) pairs; emptied. Autograd makes no copy of a gradient that
            nothing else holds.
    """
    times = Counter(id(tensor) for tensor, _ in gradients)
    tensors, rest = list[torch.Tensor](), list[torch.Tensor]()
    while gradients:
        tensor, gradient = gradients.pop(0)
        if times[id(tensor)] == 1 and _plain(tensor, gradient):
            tensor.grad = gradient
        else:
            tensors.append(tensor)
            rest.append(gradient)
        del gradient
    if rest:
        with torch.enable_grad():
            end = _Given.apply(rest, *tensors)  # type: ignore[no-untyped-call]
        torch.autograd.backward([end], [torch.empty(0, device="cpu")])


class _Given(torch.autograd.Function):
    """A backward that hands out a list of gradients, and empties it."""

    @staticmethod
    def forward(ctx: Any, gradients: list[torch.Tensor], *_: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return torch.empty(0, device="cpu")

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[torch.Tensor | None, ...]:
        given = (None, *ctx.gradients)
        ctx.gradients.clear()
        return given


def _plain(tensor: torch.Tensor, gradient: torch.Tensor) -> bool:
    return (
        tensor.is_leaf
        and tensor.grad is None
        and not has_gradient_hooks(tensor)
        and tensor.stride() == gradient.stride()
    )
