"""Tiny models for tests of plans and their files, and what a step of them leaves behind."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memopt
from memopt.api.plan import Plan
from memopt.profiler import Loss, MeasureOptions, ProfileCache, Profiled, profile_model
from tests.zoo import call

Made = tuple[nn.Module, Any, Callable[[Any], Tensor]]


class Block(nn.Module):
    """Linear, GELU, dropout."""

    def __init__(self, width: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(nn.functional.gelu(self.linear(x)))


class Nested(nn.Module):
    """Takes tensors, None, numbers and strings, nested; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(16) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(16))

    def forward(
        self,
        pair: tuple[Tensor, list[Any]],
        mask: Tensor | None = None,
        *,
        options: dict[str, Any],
    ) -> dict[str, Tensor]:
        x, (factor, power) = pair
        if mask is not None:
            x = x * mask
        for layer in self.layers:
            x = x + layer(x) * options["gain"]
        if options["name"] == "scaled":
            x = x * self.scale**power
        return {"result": x * factor}


class Convolutions(nn.Module):
    """Convolutions with batch norm, whose statistics move once per step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *[
                layer
                for _ in range(3)
                for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
            ]
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.body(image).mean(dim=(2, 3))


def mlp() -> Made:
    model = nn.Sequential(*[Block(32) for _ in range(6)])
    return model, _random(64, 32), _square


def nested() -> Made:
    inputs = {
        "pair": (_random(8, 16), [2.0, 2]),
        "mask": None,
        "options": {"gain": 0.5, "name": "scaled"},
    }
    return Nested(), inputs, lambda output: _square(output["result"])


def convolutions() -> Made:
    # Channels last, so that a wrongly stored stride would be refused.
    image = _random(4, 4, 8, 8).to(memory_format=torch.channels_last)
    return Convolutions(), image, _square


MODELS: dict[str, Callable[[], Made]] = {
    "mlp": mlp,
    "nested": nested,
    "convolutions": convolutions,
}


def make(name: str) -> Made:
    """The model with the same weights every time, its inputs and its loss."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def profiled(made: Made) -> Profiled:
    """The model, profiled in a hurry."""
    model, inputs, loss = made
    options = MeasureOptions(cap_s=0.5, max_rounds=3, cache=ProfileCache())
    return profile_model(model, inputs, loss=Loss(loss), options=options)


def tight_plan(
    one: Profiled,
    strategy: str | memopt.strategies.Strategy = "rotor",
    time_limit_s: float | None = None,
) -> Plan:
    """The plan at the smallest budget of the strategy."""
    return memopt.plan(
        one, budget="min", strategy=strategy, time_limit_s=time_limit_s, progress=False
    )


def step_digest(name: str, module: nn.Module) -> str:
    """SHA-256 of what a step of a tiny model leaves behind, bit for bit."""
    _, inputs, loss = make(name)
    return digest_of_step(module, inputs, loss)


def digest_of_step(module: nn.Module, inputs: Any, loss: Callable[[Any], Tensor]) -> str:
    """SHA-256 of a step's outputs, gradients, buffers and the next random draw, bit for bit."""
    torch.manual_seed(7)
    output = call(module, (inputs,) if isinstance(inputs, Tensor) else inputs)
    loss(output).backward()
    values = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    values += [p.grad for _, p in sorted(module.named_parameters()) if p.grad is not None]
    values += [buffer for _, buffer in sorted(module.named_buffers())]
    values.append(torch.rand(4))
    digest = hashlib.sha256()
    for value in values:
        digest.update(value.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def _random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _square(output: Tensor) -> Tensor:
    return output.square().mean()
