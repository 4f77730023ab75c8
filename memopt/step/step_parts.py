"""The parts of a captured whole step: its module, its updates and their places."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from memopt.models.step_rules import StepRules
from memopt.step.build import Lowering
from memopt.step.captured import Captured
from memopt.step.fused import Fused
from memopt.step.inputs import Call
from memopt.step.step_optimizer import Update


class StepModule(nn.Module):
    """A model and its loss as one module: `forward(targets, *args, **kwargs)` is the loss.

    Attributes:
        in_messages: its name in messages, empty: the user knows its parts, `model` and `loss_fn`.
    """

    in_messages = ""

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.training = model.training

    def forward(self, targets: tuple[Any, ...], *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the loss of one batch."""
        loss: torch.Tensor = self.loss_fn(self.model(*args, **kwargs), *targets)
        return loss

    def names_in_model(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the names that sub-modules have in the model; leave out the loss's."""
        return tuple(name.removeprefix("model.") for name in names if name.startswith("model."))


@dataclass(frozen=True)
class UpdateSite:
    """One update operator.

    Attributes:
        name: the parameter's name in the StepModule.
        gradient: the node whose value is its gradient.
        reads: the graph's tensors that the update reads: gradient, parameter and `value`.
        value: the node whose value the forward gives the parameter before its update
            (`nn.Embedding(max_norm=...)`); None: the forward does not change the parameter.
    """

    name: str
    gradient: Node
    reads: tuple[int, ...]
    value: Node | None = None

    @property
    def arguments(self) -> tuple[Any, ...]:
        """Return the arguments of the update's call."""
        given = (self.name, self.gradient)
        return given if self.value is None else (*given, self.value)


@dataclass(frozen=True)
class StepParts:
    """A captured step before its updates are added.

    Attributes:
        module: model and loss; kept alive, the capture refers to it weakly.
        call: the example call of `module`.
        captured: the joint graph; all gradients are results.
        lowering: the joint graph's lowering.
        update: the target that all update operators call.
        sites: the updates, in the optimizer's order.
        fused: the record of how it got its kernels.
        rules: what happens to gradients before the updates.
        once: the capture of one micro-batch.
        mutated: positions of the primals (buffers, inputs) that the step changes.
        largest: the node that is finite if all gradients are; None: they are not unscaled.
    """

    module: StepModule
    call: Call
    captured: Captured
    lowering: Lowering
    update: Update
    sites: tuple[UpdateSite, ...]
    fused: Fused
    rules: StepRules
    once: Captured
    mutated: tuple[int, ...]
    largest: Node | None = None


def update_name(site: UpdateSite) -> str:
    """Return the name of a site's operator."""
    return f"update.{site.name.removeprefix('model.')}"
