"""Parameters, buffers, gradients and optimizer state without elements in whole steps."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

import memopt
from tests.whole_steps.test_failing_steps import Fault, FaultAt
from tests.whole_steps.test_train_step import assert_same


class Sparse(nn.Module):
    """Has parameters without elements: of its own, of a layer, and a slice of a storage that has
    some; a buffer, and an activation of a layer of none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.none = nn.Linear(6, 3), nn.Linear(6, 0)
        self.own = nn.Parameter(torch.zeros(0, 3))
        self.slice = nn.Parameter(torch.zeros(4, 8)[:, 4:4])
        self.register_buffer("kept", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        self.kept.add_(1)
        y = torch.cat([self.layer(x), self.none(x).tanh()], 1)
        return y + (2 * self.own).sum() + self.slice.sum() + self.kept.sum()


def batch(number: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(number)
    return torch.randn(4, 6, generator=random), torch.randn(4, 3, generator=random)


def made(undo: bool = False, **how: Any) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = Sparse()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = batch(0)
    how = {"strategy": "offload-graph", "budget": "min", **how}
    plan = memopt.plan(
        model, x, loss_fn=mse_loss, targets=(y,), optimizer=optimizer, progress=False, **how
    )
    return model, optimizer, plan.train_step(model, mse_loss, optimizer, undo=undo)


HOW: dict[str, dict[str, Any]] = {
    "undone": {"undo": True},
    "moved and undone": {"movable": "all", "undo": True},
    "repeated": {"movable": "all", "steady_state": True},
    "offloaded and clipped": {"offload_optimizer": True, "clip_norm": 1.0},
    "recomputed": {"strategy": "rotor", "whole_step": True, "offload_optimizer": True},
    "placed": {"strategy": "olla", "place": True, "offload_optimizer": True},
}


@pytest.mark.parametrize("how", HOW.values(), ids=HOW)
def test_steps_are_eagers(how: dict[str, Any]) -> None:
    model, optimizer, step = made(**how)
    other = copy.deepcopy(model)
    eager = torch.optim.Adam(other.parameters(), lr=0.1)
    for number in range(2):
        x, y = batch(number)
        step(x, targets=(y,))
        mse_loss(other(x), y).backward()
        if "clip_norm" in how:
            nn.utils.clip_grad_norm_(other.parameters(), how["clip_norm"])
        eager.step()
        eager.zero_grad()
    assert_same(model.state_dict(), other.state_dict())
    assert_same(optimizer.state_dict()["state"], eager.state_dict()["state"])


@pytest.mark.parametrize("how", [{"movable": "all"}, {"offload_optimizer": True}])
def test_failed_steps_are_taken_back(how: dict[str, Any]) -> None:
    model, optimizer, step = made(undo=True, **how)
    x, y = batch(0)
    step(x, targets=(y,))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    failed = 0
    while True:
        try:
            with FaultAt(1 + 5 * failed):
                step(x, targets=(y,))
            break
        except (Fault, memopt.ExecutionError):
            failed += 1
            assert_same((model.state_dict(), optimizer.state_dict()), before)
    assert failed > 10
