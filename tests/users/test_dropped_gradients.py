"""Gradients that are there at a forward: dropped before the backward, as Lightning does, or added
to. Both train within their budgets, and a remedy that is named works at every later step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import InfeasibleBudgetError
from memopt.pricing.memory import metered


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


QUICK: dict[str, Any] = {"strategy": "rotor", "progress": False}


class Network(nn.Sequential):
    """Computes its own loss, as Lightning's modules and many others do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return Network(*(layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.Tanh())))


X = torch.linspace(-1, 1, 128 * 64).view(128, 64)


def plain(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        loss = model(X)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def dropping(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for _ in range(steps):
        loss = model(X)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def accumulating(model: nn.Module, steps: int = 3) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(3 * steps):
        loss = model(X) / 3
        loss.backward()
        losses.append(loss.item())
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def smallest(**options: bool) -> int:
    plan = memopt.plan(network(), X, budget="min", **QUICK, **options)
    assert plan.budget is not None
    return plan.budget


def between() -> int:
    """A budget within which gradients can be there in the forward, and not to the end."""
    return (smallest() + smallest(accumulate=True)) // 2


def wrapped(budget: int | str) -> nn.Module:
    return memopt.wrap(network(), budget, **QUICK)


def test_dropped_gradients_need_no_larger_budget() -> None:
    budget = between()
    model = wrapped(budget)
    assert plain(wrapped(budget)) == plain(network())
    assert dropping(model) == dropping(network())
    assert model.calls.planned == 3
    made = model.memopt.plans[-1]
    assert made.budget == budget
    assert any("dropped before the backward" in note for note in made.notes)


def test_a_forward_beside_gradients_keeps_the_budget() -> None:
    budget = between()
    model = wrapped(budget)
    dropping(model, 2)
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    assert all(p.grad is not None for p in model.parameters())
    with metered(torch.device("cpu")) as used:
        loss = model(X)
    resident_bytes = model.memopt.plans[-1].resident_bytes - 64
    assert resident_bytes + gradient_bytes + used.peak_bytes <= budget
    model.zero_grad()
    with metered(torch.device("cpu")) as used:
        loss.backward()
    assert resident_bytes + used.peak_bytes <= budget


def test_accumulation_is_stopped_before_it_exceeds_and_the_remedy_works() -> None:
    budget = between()
    model = wrapped(budget)
    with pytest.raises(InfeasibleBudgetError, match="add to gradients") as stopped:
        accumulating(model)
    named = re.findall(r"budget=(\d+)", str(stopped.value))
    assert named == [str(stopped.value.smallest_budget_bytes)]
    for remedy in (int(named[0]), named[0]):
        assert accumulating(wrapped(remedy)) == accumulating(network())


def test_the_remedy_for_a_first_call_does_for_the_later_ones() -> None:
    with pytest.raises(InfeasibleBudgetError) as beyond:
        plain(wrapped(1000))
    named = re.findall(r"budget=(\d+)", str(beyond.value))
    assert named == [str(beyond.value.smallest_budget_bytes)]
    assert int(named[0]) == smallest(accumulate=True)
    assert f"({smallest()} if gradients are never there" in str(beyond.value)
    for remedy in (int(named[0]), named[0]):
        assert accumulating(wrapped(remedy)) == accumulating(network())
        assert dropping(wrapped(remedy)) == dropping(network())
    assert plain(wrapped(smallest())) == plain(network())


def test_where_even_the_forward_has_no_room_the_remedy_works() -> None:
    """A forward of much more than its backward: gradients beside it are beyond the budget."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 512), nn.Linear(512, 8))
    x = torch.randn(4, 8)
    plan = memopt.plan(model, x, budget="min", progress=False)
    memopt.wrap(model, plan.budget - 1, progress=False)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(InfeasibleBudgetError) as beyond:
        model(x)
    (named,) = re.findall(r"budget=(\d+)", str(beyond.value))
    memopt.unwrap(model)
    memopt.wrap(model, int(named), progress=False)
    model(x).sum().backward()
