"""Computes the loss of a training step, and tells which tensors of an output have a backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from memopt.step.inputs import Call
from memopt.step.unheard import unheard
from memopt.torch_private import pytree


def as_targets(given: Any) -> tuple[Any, ...]:
    """Return a loss's arguments after the output as a tuple; a single one may come by itself."""
    return tuple(given) if isinstance(given, (tuple, list)) else (given,)


def check_targets(loss_fn: Callable[..., Any] | None, targets: Any) -> None:
    """Refuse targets without a loss that takes them."""
    given = targets is not None and (callable(targets) or bool(as_targets(targets)))
    if loss_fn is None and given:
        raise ValueError("targets= needs loss_fn=, which is called as loss_fn(output, *targets)")


@dataclass(frozen=True)
class Loss:
    """The user's loss: `function(output, *targets)`; a single target may stand for its tuple.

    Attributes:
        function: the loss.
        targets: the arguments after the output.
        alone: whether outputs that it does not read are left out.
    """

    function: Callable[..., torch.Tensor]
    targets: tuple[Any, ...] = ()
    alone: bool = False

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ValueError(
                f"loss_fn must be callable as loss_fn(output, *targets), got {self.function!r}"
            )
        object.__setattr__(self, "targets", as_targets(self.targets))

    def detached(self) -> Loss:
        """Return the same loss, with targets without their history; see `Call.detached`."""
        return replace(self, targets=Call(self.targets, {}).detached().args)

    @property
    def parts(self) -> tuple[Any, ...]:
        """Return the objects that run or are read with the loss."""
        return self.function, self.targets

    def value(self, output: Any) -> torch.Tensor:
        """Return the loss of an output.

        Raises:
            ValueError: the loss is no scalar tensor with a gradient.
        """
        with unheard():
            found = self.function(output, *self.targets)
        if not isinstance(found, torch.Tensor) or found.numel() != 1 or not found.requires_grad:
            shown = type(found).__name__
            if isinstance(found, torch.Tensor):
                gradient = "" if found.requires_grad else " without a gradient"
                shown = f"a tensor of shape {list(found.shape)}{gradient}"
            raise ValueError(
                "loss_fn(output, *targets) must return one number that depends on the output, "
                f"such as loss.mean(), got {shown}"
            )
        return found


class LossOfOutputs:
    """Stands for an unknown loss that uses the leaves of an output at these positions: their
    gradients are laid out as they are, and it needs no memory of its own."""

    def __init__(self, positions: frozenset[int]) -> None:
        self._positions = sorted(positions)

    def __call__(self, output: Any) -> torch.Tensor:
        """Return a loss of an output. If the output has none of these leaves (another kind of call
        returned it), the loss uses all leaves."""
        known = differentiable(output)
        used = [known[i] for i in self._positions if i in known]
        found: torch.Tensor = _Used.apply(*(used or known.values()))  # type: ignore[no-untyped-call]
        return found


class _Used(torch.autograd.Function):
    """A number that depends on tensors."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return tensors[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return tuple(torch.zeros_like(one) for one in ctx.saved_tensors)


def differentiable(output: Any, unused: tuple[int, ...] = ()) -> dict[int, torch.Tensor]:
    """Return the tensors of an output pytree that have a backward, each once, by their first
    position among its leaves. The leaves at `unused` are left out."""
    found: dict[int, tuple[int, torch.Tensor]] = {}
    for i, v in enumerate(pytree.tree_leaves(output)):
        if isinstance(v, torch.Tensor) and v.requires_grad and i not in unused:
            found.setdefault(id(v), (i, v))
    return dict(found.values())
