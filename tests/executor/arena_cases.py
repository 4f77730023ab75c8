"""The model, loss and plans that the tests of planned addresses share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

import memopt
from memopt.api.plan import Plan
from memopt.programs.instructions import Program


class Net(nn.Module):
    """Convolutions, norms, attention and dropout: kernels of every kind of form, and of none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.mix = nn.Linear(8, 24)
        self.drop = nn.Dropout(0.3)
        self.last = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = nn.functional.max_pool2d(torch.relu(self.norm(self.stem(x))), 2)
        tokens = x.flatten(2).transpose(1, 2)
        q, k, v = self.mix(tokens).split(8, -1)
        weights = torch.softmax(q @ k.transpose(1, 2) * 0.3, -1)
        tokens = tokens + self.drop(weights @ v)
        tokens = self.last(torch.cat([tokens[:, :2], tokens[:, 2:] * 2], 1))
        return self.head(tokens.mean(1)), tokens[:, 0]


Case = tuple[Net, torch.optim.Optimizer, Plan]


def build() -> tuple[Net, Tensor, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))


def loss_of(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output[0], target) + output[1].square().mean()


@functools.cache
def step_plan(strategy: str = "olla", budget: int | None = None) -> Case:
    """One planned step for each kind of plan; tests train its model on."""
    model, x, y = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    plan = memopt.plan(
        model, x, loss_fn=loss_of, targets=(y,), optimizer=optimizer, strategy=strategy,
        budget=budget, place=True, cache=False, progress=False,
    )  # fmt: skip
    return model, optimizer, plan


@functools.cache
def module_plan() -> tuple[Net, Plan]:
    model, x, _ = build()
    return model, memopt.plan(model, x, strategy="olla", cache=False, progress=False)


def with_offsets(plan: Plan, change: Callable[[int, int, int], int]) -> Plan:
    assert plan.program is not None
    assert plan.program.offsets is not None
    moved = [(i, t, change(i, t, o)) for i, t, o in plan.program.offsets]
    made = Program(plan.program.instructions, moved, plan.program.unplaced)
    return replace(plan, program=made)


def eager_step(model: Net, x: Tensor, y: Tensor, seed: int) -> tuple[Any, dict[str, Tensor]]:
    """Outputs and gradients of one unplanned step."""
    torch.manual_seed(seed)
    model.zero_grad()
    output = model(x)
    loss_of(output, y).backward()  # type: ignore[no-untyped-call]
    return output, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def same(found: Any, expected: Any) -> bool:
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(same(found[k], expected[k]) for k in found)
    if isinstance(expected, (list, tuple)):
        return all(same(a, b) for a, b in zip(found, expected, strict=True))
    return bool(torch.equal(found, expected))
