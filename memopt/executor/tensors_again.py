"""The tensors with which a call runs again: what the model held then, and aliases of arguments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.errors import ExecutionError
from memopt.step.captured import Captured
from memopt.step.inputs import Call
from memopt.torch_private.tensors import storage_key
from memopt.user_code.own_backward import reaches

Refusal: TypeAlias = Callable[[str], ExecutionError]
"""(why a forward cannot run again) → the error that says it, and names a remedy."""


def replaced_since(
    captured: Captured, model: nn.Module, held: Sequence[Any], refusal: Refusal
) -> dict[int, Any]:
    """Return what a call held (as of `Captured.held_values`) where the model holds other tensors
    now, by these' ids. (`torch.func.functional_call` puts tensors there for a call alone.)

    Raises:
        ExecutionError: one that the model does not register.
    """
    primals = (one for one in captured.primals if one.held)
    found = {}
    for primal, new, old in zip(primals, captured.held_values(model, ()), held, strict=True):
        if primal.reader is None and new is not old:
            found[id(new)] = old
        elif new is not old and storage_key(new) != storage_key(old):
            raise refusal("a tensor in an attribute of the model is another since")
    return found


def apart(
    call: Call, wanted: Sequence[torch.Tensor], replaced: dict[int, Any], refusal: Refusal
) -> tuple[Call, list[torch.Tensor]]:
    """Return the call, and the tensors `wanted`, with aliases in place of arguments, and put some
    in place of what the model held. Aliases have none of the user's hooks, and pass no gradient on
    to what the arguments were computed from: autograd adds the arguments' gradients there, so it
    would be added twice.

    Raises:
        ExecutionError: a second derivative goes on through them, and reaches a parameter.
    """
    made: dict[int, torch.Tensor] = {}
    differentiated = torch.is_grad_enabled()

    def one(tensor: torch.Tensor) -> torch.Tensor:
        stays = not differentiated or isinstance(tensor, nn.Parameter) or not tensor.requires_grad
        if id(tensor) not in made and not (tensor.is_leaf and stays):
            with torch.enable_grad():
                past = tensor if differentiated else tensor.detach().requires_grad_()
                made[id(tensor)] = past.view_as(tensor)
        return made.get(id(tensor), tensor)

    inner = call.with_tensors(one)
    given = [*call.tensors(), *(tensor for tensor in replaced.values() if not tensor.is_leaf)]
    replaced.update({key: one(tensor) for key, tensor in replaced.items()})
    held = [tensor for tensor in wanted if id(tensor) not in made]
    if differentiated and any(reaches(tensor, held) for tensor in given):
        raise refusal("an argument or a parameter of it is computed from other parameters")
    return inner, [made.get(id(tensor), tensor) for tensor in wanted]
