"""A small model whose regions take few compilations, and its step."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from benchmarks.steps import peak_of
from memopt.api.plan import Plan

WIDTH = 48
ROWS = 64


class Block(nn.Module):
    """A product, then operators that one kernel computes: a region in each half of the step."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        y = functional.silu(self.linear(x))
        return functional.dropout(y, self.p, self.training) + x


def network(p: float = 0.25, depth: int = 3) -> nn.Sequential:
    """Equal blocks: their regions are equal, too."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block(p) for _ in range(depth)), nn.Linear(WIDTH, 1))


def inputs() -> Tensor:
    """Rows of numbers, the same in every test."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def loss_of(output: Tensor) -> Tensor:
    """The step's loss."""
    return output.square().sum()


def peak_bytes(model: nn.Module, run: nn.Module) -> int:
    """The measured peak of a step above what is resident."""
    x = inputs()
    return peak_of(model, lambda: loss_of(run(x)).backward(), torch.device("cpu"))


@functools.cache
def store_all(p: float = 0.25) -> tuple[nn.Sequential, Plan]:
    """The network and its store-all with compiled kernels."""
    model = network(p)
    return model, memopt.plan(
        model,
        inputs(),
        strategy="store-all",
        kernels="compiled",
        loss_fn=loss_of,
        progress=False,
    )


@dataclass(frozen=True)
class Step:
    """What a step gives: the output, and the gradients by name."""

    output: Tensor
    gradients: dict[str, Tensor]

    def same_bits(self, other: Step) -> bool:
        """Whether another step gave the same, bit for bit."""
        return torch.equal(self.output, other.output) and all(
            torch.equal(value, other.gradients[name]) for name, value in self.gradients.items()
        )


def step(model: nn.Module, run: nn.Module | None = None, seed: int = 3) -> Step:
    """One step after `manual_seed`, by the model or what runs in its place."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(seed)
    output = (run or model)(inputs())
    loss_of(output).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return Step(output.detach(), found)
