"""Costs of parameter updates: kept like those of kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import memopt
from memopt.pricing import updates
from memopt.profiler import session


def planned(optimizer: torch.optim.Optimizer, model: nn.Module, cache: bool = True) -> memopt.Plan:
    return memopt.plan(
        model, torch.randn(4, 8), loss_fn=torch.sum, optimizer=optimizer, strategy="store-all",
        cache=cache, progress=False,
    )  # fmt: skip


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[torch.dtype]:
    """An empty cache, no moment counts as busy; a list that gets each measured parameter's type."""
    measured: list[torch.dtype] = []
    measure = updates._measured

    def counting(kind: type, group: dict[str, object], like: torch.Tensor, *rest: object) -> object:
        measured.append(like.dtype)
        return measure(kind, group, like, *rest)  # type: ignore[arg-type]

    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(updates, "_measured", counting)
    monkeypatch.setattr(session, "_SUSPICIOUS", float("inf"))
    return measured


def test_a_step_planned_again_is_the_same_step(counted: list[torch.dtype]) -> None:
    """So that a smallest budget which was named is one of this step. Its learning rate may have
    another value by then."""
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    first = planned(optimizer, model)
    assert len(counted) == 2  # weights, biases
    optimizer.param_groups[0]["lr"] = 0.01
    assert planned(optimizer, model).graph == first.graph
    assert len(counted) == 2


def test_what_changes_an_update_is_measured_again(counted: list[torch.dtype]) -> None:
    model = nn.Linear(8, 8, bias=False)
    planned(torch.optim.SGD(model.parameters()), model)
    planned(torch.optim.SGD(model.parameters(), momentum=0.9), model)
    planned(torch.optim.AdamW(model.parameters()), model)
    planned(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), capturable=False), model)
    assert len(counted) == 4
    model.double()
    optimizer = torch.optim.SGD(model.parameters())
    memopt.plan(
        model, torch.randn(4, 8).double(), loss_fn=torch.sum, optimizer=optimizer,
        strategy="store-all", progress=False,
    )  # fmt: skip
    assert counted[4:] == [torch.float64]


def test_without_the_cache_they_are_measured_each_time(counted: list[torch.dtype]) -> None:
    model = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(2):
        planned(optimizer, model, cache=False)
    assert len(counted) == 2
