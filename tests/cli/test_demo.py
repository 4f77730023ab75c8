"""The demo: seven rounds with their spread, and a plan before anything is measured."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt import demo


def _task() -> demo.DemoTask:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(24, 24), nn.GELU()) for _ in range(6)]

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            yield torch.ones(64, 24), torch.zeros(64, dtype=torch.long)

    return demo.DemoTask("six layers", nn.Sequential(*layers), batches, functional.cross_entropy)


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
