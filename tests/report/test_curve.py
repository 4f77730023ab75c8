"""Curves in one call, as CSV, and the savings beside them."""

from __future__ import annotations

import csv
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import memopt
from memopt.api.spread import budgets_between
from memopt.models.instances import rotor_toy
from memopt.step.optimizer_state import optimizer_state, smaller_states


def test_points_are_even_from_the_smallest_budget() -> None:
    made = memopt.curve(rotor_toy(), strategies=["rotor"], points=7, progress=False)
    assert len(made.cells) == 7
    smallest = memopt.plan(rotor_toy(), budget="min", strategy="rotor").budget
    budgets = [budget for budget in made.budgets if budget is not None]
    assert budgets[0] == smallest
    gaps = {later - earlier for earlier, later in pairwise(budgets)}
    assert max(gaps) - min(gaps) <= 1
    times = [cell.step_time_s for cell in made.cells if cell.step_time_s is not None]
    assert times == sorted(times, reverse=True)
    assert len(times) == 7


def test_points() -> None:
    assert budgets_between(10, 20, 5) == (10, 12, 15, 17, 20)
    assert budgets_between(10, 10, 5) == (10,)
    with pytest.raises(ValueError, match="points must be at least 2"):
        memopt.curve(rotor_toy(), points=1, progress=False)


def test_csv(tmp_path: Path) -> None:
    made = memopt.compare(rotor_toy(), strategies=["rotor", "store-all"], progress=False)
    text = made.to_csv(tmp_path / "c.csv")
    assert (tmp_path / "c.csv").read_text(encoding="utf-8") == text
    rows = list(csv.DictReader(text.splitlines()))
    assert [row["strategy"] for row in rows] == [cell.strategy for cell in made.cells]
    for row, cell in zip(rows, made.cells, strict=True):
        assert row["status"] == cell.status.value
        for name in ("budget_bytes", "peak_bytes", "step_time_s", "gap"):
            value = getattr(cell, name)
            assert row[name] == ("" if value is None else str(value))
    assert any(row["peak_bytes"] == "" for row in rows)


def test_smaller_optimizer_state() -> None:
    parameters = [torch.empty(100, 100, requires_grad=True), torch.empty(5)]
    state = optimizer_state("adamw-fp32", parameters)
    eight = optimizer_state("adamw-8bit", parameters)
    assert smaller_states(state, parameters) == (
        ("adamw-8bit", state.bytes_total - eight.bytes_total),
    )
    assert smaller_states(eight, parameters) == ()
    model = torch.nn.Linear(100, 100)
    instance = optimizer_state(torch.optim.AdamW(model.parameters()), model.parameters())
    assert [name for name, _ in smaller_states(instance, model.parameters())] == ["adamw-8bit"]
    assert smaller_states(optimizer_state("sgd-momentum", parameters), parameters) == ()
