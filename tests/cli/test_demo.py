"""The demo: seven rounds with their spread, and a plan before anything is measured."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt import demo, demo_models


def _task() -> demo.DemoTask:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(6)]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(64, 24), torch.zeros(64, dtype=torch.long)

    return demo.DemoTask("six layers", nn.Sequential(*layers), batches, functional.cross_entropy)


def test_without_optional_packages_there_is_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """And each line about one that is left out says what installs it."""
    for package in ("transformers", "torchvision", "sklearn"):
        monkeypatch.setitem(sys.modules, package, None)
    (task,), missing = demo_models.tasks()
    assert [line.rpartition("(")[2] for line in missing] == [
        "pip install transformers)",
        "pip install torchvision scikit-learn)",
    ]
    small = demo_models.decoder(batch=2, length=16, width=32, layers=2)
    inputs, target = next(small.batches())
    small.loss(small.model(inputs), target).backward()
    assert all(parameter.grad is not None for parameter in small.model.parameters())
    assert task.name.startswith("a decoder of 12 layers")
    assert demo.first_plan(small).peak_bytes > 0


def test_median_and_spread() -> None:
    assert demo.ROUNDS >= 7
    assert demo.ratio_and_spread([2.0, 1.0, 9.0], [2.0, 2.0, 3.0]) == ("1.00 x", "0.50-3.00")


def test_first_plan_measures_nothing() -> None:
    plan = demo.first_plan(_task())
    assert not plan.baseline.measured
    assert plan.peak_bytes < plan.baseline.peak_bytes


def test_every_plan_is_reported_and_compared() -> None:
    task, reported = _task(), []
    plans = demo.plans_of(task, lambda name, plan: reported.append((name, plan)))
    assert dict(reported) == plans
    table = demo.compare(task, plans)
    assert [str(c.header) for c in table.columns][3:5] == ["time / eager", "spread"]
    assert table.row_count == len(plans) + 1
