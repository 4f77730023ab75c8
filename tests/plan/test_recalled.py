"""Plans of `memopt.plan` are kept by graph and costs: planning again does not solve again."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.api import recalled, solving
from memopt.plan_record import STOPPED
from memopt.strategies import Rotor

BEGUN = "begun"


@pytest.fixture(autouse=True)
def keeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(recalled, "KEPT_FROM_S", 0.0)


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As many entries as steps were solved. Every solve reports that it has begun."""
    found: list[int] = []
    solve = solving.solve

    def counting(*args: Any, **how: Any) -> Any:
        found.append(1)
        with contextlib.suppress(KeyboardInterrupt):
            how["progress"](0.0, BEGUN)
        return solve(*args, **how)

    monkeypatch.setattr(solving, "solve", counting)
    return found


def stop(_fraction: float, what: str) -> None:
    """The user stops the search as soon as it has begun."""
    if what == BEGUN:
        raise KeyboardInterrupt


def network(width: int = 32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(4)))


def planned(model: nn.Module, **how: Any) -> memopt.Plan:
    how = {"budget": "min", "strategy": "rotor", "progress": False, **how}
    return memopt.plan(model, torch.ones(8, 32), **how)


def gradients(plan: memopt.Plan, model: nn.Module) -> list[torch.Tensor]:
    plan.apply(model)(torch.ones(8, 32)).square().mean().backward()
    return [p.grad for p in model.parameters()]


def test_planning_again_does_not_solve_again(solved: list[int]) -> None:
    models = network(), network()
    first, second = map(planned, models)
    assert solved == [1]
    assert second == first
    assert second.profiled.captured.model() is models[1]
    assert second.code == first.code
    assert all(map(torch.equal, gradients(first, models[0]), gradients(second, models[1])))


def test_what_a_plan_depends_on_is_solved_for(solved: list[int]) -> None:
    planned(network())
    for count, how in enumerate(
        (
            {"budget": None},
            {"strategy": Rotor(slots=50)},
            {"strategy": "store-all", "budget": None},
            {"optimizer": "adamw"},
            {"place": True},
            {"time_limit_s": 5.0},
            {"cache": False},
            {"accumulate": True},
        ),
        2,
    ):
        planned(network(), **how)
        assert len(solved) == count, how


def test_other_code_with_the_same_graph_is_recalled_and_other_graphs_are_not(
    solved: list[int],
) -> None:
    class Same(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for one in self:
                x = one(x)
            return x

    class Other(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * 2

    planned(network())
    planned(Other(*network()))
    assert len(solved) == 2
    same = Same(*network())
    expected = planned(network(), cache=False)
    assert len(solved) == 3
    found = gradients(planned(same), same)
    plain = network()
    assert all(map(torch.equal, found, gradients(expected, plain)))


def test_short_searches_and_stopped_ones_are_not_kept(
    solved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert STOPPED in planned(network(), progress=stop).notes
    assert STOPPED not in planned(network()).notes
    assert len(solved) == 2
    monkeypatch.setattr(recalled, "KEPT_FROM_S", float("inf"))
    for _ in range(2):
        planned(network(), budget=None)
    assert len(solved) == 4


def test_a_wrapped_model_keeps_no_plan_whose_search_was_stopped(solved: list[int]) -> None:
    def wrapped(progress: Any) -> nn.Module:
        model = memopt.wrap(network(), "min", "rotor", progress=progress)
        model(torch.ones(8, 32)).square().mean().backward()
        return model

    wrapped(stop)
    (plan,) = wrapped(False).plans
    assert STOPPED not in plan.notes
    assert len(solved) == 2
    wrapped(False)
    assert len(solved) == 2
