"""Outputs of planned calls that have no planned backward, since the planned loss uses others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import nn

from memopt.errors import ExecutionError
from memopt.executor.absent_gradients import call_hooks_of_gradients_alone
from memopt.executor.differentiated import AsOriginal, OtherLoss
from memopt.executor.hooked_outputs import InnerOutputs
from memopt.executor.runtime import Runtime
from memopt.step.captured import Captured
from memopt.step.inputs import Call
from memopt.torch_private import pytree
from memopt.torch_private.modules import parameters_in

Instead: TypeAlias = Callable[[Mapping[int, torch.Tensor]], Sequence[Any]]
"""Returns gradients of a call's operands from those of the leaves of its output, by position."""


class _Refusing(torch.autograd.Function):
    """Returns outputs: first those without a planned backward, then those with one. If one of the
    first gets a gradient, another backward than the planned one runs for all of them."""

    @staticmethod
    def forward(
        ctx: Any,
        instead: Instead | None,
        positions: tuple[int, ...],
        refused: int,
        *tensors: torch.Tensor,
    ) -> Any:
        ctx.instead, ctx.positions, ctx.refused = instead, positions, refused
        ctx.others = len(tensors) - len(positions)
        ctx.set_materialize_grads(False)
        # Not aliases, which autograd refuses to change in place.
        return tuple(one.detach() for one in tensors[: len(positions)])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        none, refused = [None] * len(ctx.positions), ctx.refused
        if all(one is None for one in gradients[:refused]):
            planned = gradients[refused:]
            return None, None, None, *none[:refused], *planned, *([None] * ctx.others)
        if ctx.instead is None:
            raise ExecutionError(
                "this output of the planned model has no gradient: the loss that the plan was made "
                "for does not use it. Plan again with the loss that you train with (loss_fn= of "
                "memopt.plan or memopt.wrap), or, with memopt.plan, without loss_fn= for any"
            )
        pairs = zip(ctx.positions, gradients, strict=True)
        return None, None, None, *none, *ctx.instead({i: g for i, g in pairs if g is not None})


def refusing_gradients(
    output: Any,
    positions: tuple[int, ...],
    instead: Instead | None = None,
    wanted: Sequence[torch.Tensor] = (),
) -> Any:
    """Make a planned model's output raise ExecutionError in a backward of its leaves at
    `positions`. Leaves that are inputs themselves keep their gradient.

    Args:
        output: the output, a pytree.
        positions: of its leaves.
        instead: returns the gradients of the tensors `wanted` from those of all leaves that have
            got one, rather than the error.
        wanted: leaves of autograd that the output depends on.
    """
    if not positions or not torch.is_grad_enabled():
        return output
    leaves, spec = pytree.tree_flatten(output)
    refused: dict[int, int] = {}
    for position in positions:
        if not leaves[position].requires_grad:
            refused.setdefault(id(leaves[position]), position)
    if not refused:
        return output
    planned: dict[int, int] = {}
    if instead is not None:
        given = {id(one) for one in wanted}
        for position, leaf in enumerate(leaves):
            if getattr(leaf, "grad_fn", None) is not None and id(leaf) not in given:
                planned.setdefault(id(leaf), position)
    own = (*refused.values(), *planned.values())
    reached = wanted or [torch.empty(0, requires_grad=True, device="cpu")]
    made = _Refusing.apply(instead, own, len(refused), *(leaves[i] for i in own), *reached)  # type: ignore[no-untyped-call]
    by_value = dict(zip((*refused, *planned), made, strict=True))
    leaves = [by_value.get(id(leaf), leaf) for leaf in leaves]
    return pytree.tree_unflatten(leaves, spec)


def handed_out(
    output: Any,
    captured: Captured,
    model: nn.Module,
    call: Call,
    again: AsOriginal,
    runtime: Runtime,
    other_loss: OtherLoss | None,
) -> Any:
    """Return a call's output as its caller gets it: leaves without a planned backward get another
    one (`other_loss`), or none."""
    refused, instead = captured.outputs.gradients.refused, None
    wanted = trained(model, call) if refused and other_loss else []
    if refused and other_loss:
        instead = partial(gradients_of_other_loss, again, runtime, wanted, other_loss)
    output = refusing_gradients(output, refused, instead, wanted)
    again.inner = InnerOutputs(output, captured.outputs.inner)
    return output


def trained(model: nn.Module, call: Call) -> list[torch.Tensor]:
    """Return the leaves of autograd that a call may have gradients of."""
    given = [one for one in call.tensors() if one.requires_grad]
    return [*(one for one in parameters_in(model) if one.requires_grad), *given]


def gradients_of_other_loss(
    again: AsOriginal,
    runtime: Runtime,
    wanted: Sequence[torch.Tensor],
    met: OtherLoss,
    gradients: Mapping[int, torch.Tensor],
) -> Sequence[Any]:
    """Run the call again as `met` plans it, and return the gradients of the tensors `wanted`, given
    those of output leaves by position, some of which have no planned backward."""
    differentiated = torch.is_grad_enabled()  # and a plan's backward has no derivative
    runtime.drop(again)

    def planned(call: Call) -> nn.Module | None:
        if differentiated:
            return None
        return met(call, frozenset(gradients), sum(one.nbytes for one in gradients.values()))

    found = again.gradients_from(gradients, wanted, planned)
    call_hooks_of_gradients_alone(wanted, found)
    return found
