"""A random training loop as it runs, its forwards and its losses (`tests.fuzz.loops`)."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree


@dataclass
class Loop:
    """One run of a loop: its model, optimizer and what it saw."""

    seed: int
    model: nn.Module
    inputs: Callable[[int], tuple[Tensor, ...]]
    dice: random.Random
    wrap: Callable[[nn.Module], nn.Module] | None
    context: Callable[[], Any]
    optimizer: torch.optim.Optimizer = field(init=False)
    seen: list[tuple[str, Any]] = field(default_factory=list)
    held: list[Any] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    average: nn.Module | None = None
    step: int = 0

    def __post_init__(self) -> None:
        self.average = copy.deepcopy(self.model) if self.dice.random() < 0.3 else None
        self.choose_optimizer()

    def choose_optimizer(self) -> None:
        kind = self.dice.choice((torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = kind(trained or list(self.model.parameters()), lr=0.01)

    def saw(self, name: str, value: Any) -> None:
        """Keep a copy of what the loop sees."""
        leaves = pytree.tree_leaves(value)
        for place, leaf in enumerate(leaves):
            kept = copied_aside(leaf) if isinstance(leaf, Tensor) else leaf
            self.seen.append((f"step {self.step}: {name} {place}", kept))

    def look(self) -> None:
        """Keep what a step left."""
        for name, value in self.model.named_parameters():
            self.saw(f"{name}.grad", "none" if value.grad is None else value.grad)
        self.saw("state", self.model.state_dict())
        self.saw("random", [torch.get_rng_state()])


def copied_aside(value: Tensor) -> Tensor:
    """A copy in memory that is not torch's, which no meter counts."""
    memory = torch.from_numpy(numpy.empty(value.numel() * value.itemsize, numpy.uint8))
    return memory.view(value.dtype).view(value.shape).copy_(value.detach())


def forward(
    loop: Loop, batch: int | None = None, grad: bool = False
) -> tuple[Any, tuple[Any, ...]]:
    """Call the model on a batch."""
    size = loop.dice.choice((8, 8, 8, 6)) if batch is None else batch
    inputs = loop.inputs(size)
    if grad:
        inputs = tuple(x.requires_grad_() if x.is_floating_point() else x for x in inputs)
    with loop.context():
        out = loop.model(*inputs)
    loop.saw("output", out)
    return out, inputs


def outputs(out: Any) -> list[Tensor]:
    """The differentiable outputs."""
    leaves = pytree.tree_leaves(out)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]


def loss_of(loop: Loop, out: Any) -> Tensor | None:
    """A loss of all or some outputs, of a drawn kind."""
    leaves = outputs(out)
    if len(leaves) > 1 and loop.dice.random() < 0.3:
        leaves = [loop.dice.choice(leaves)]
    kind = loop.dice.choice(
        ("square", "mean", "sum", "max", "slice", "softmax", "transposed", "two")
    )
    total: Tensor | None = None
    for leaf in leaves:
        real = (torch.view_as_real(leaf) if leaf.is_complex() else leaf).float()
        one = _loss(kind, real)
        total = one if total is None else total + one
    return total


def backward(loop: Loop, out: Any, factor: float | Tensor = 1.0) -> Tensor | None:
    """Run the backward of a drawn loss of the outputs, if any can be trained; return the loss."""
    loss = loss_of(loop, out)
    if loss is not None:
        (loss * factor).backward()
    return loss


def _loss(kind: str, real: Tensor) -> Tensor:
    if kind == "mean":
        return real.mean()
    if kind == "sum":
        return real.sum()
    if kind == "max":
        return real.max()
    if kind == "slice":
        return real.reshape(-1)[: max(1, real.numel() // 2)].square().mean()
    if kind == "softmax":
        return -real.reshape(len(real) if real.ndim else 1, -1).log_softmax(-1)[..., 0].mean()
    if kind == "transposed":
        flat = real.reshape(real.shape[0], -1) if real.ndim else real.reshape(1, 1)
        return (flat.t() @ flat).square().mean()
    if kind == "two":
        return real.square().mean() + real.abs().mean().sqrt()
    return real.square().mean()
