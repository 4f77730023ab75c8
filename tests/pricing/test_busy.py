"""Costs from a busy moment do not stay in the cache."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch
from torch import nn

from memopt.models.graph import Graph, Operator, Tensor
from memopt.pricing.cache import ProfileCache
from memopt.pricing.measure import MeasureOptions
from memopt.profiler import session
from memopt.profiler.session import measured_again_if_busy, profile_model
from memopt.step.profiled import Baseline


def _poison(directory: Path) -> None:
    """Every kernel's time in the cache a thousand times too long, the step's left alone."""
    (file,) = directory.glob("*.sqlite")
    with closing(sqlite3.connect(file)) as connection, connection:
        rows = connection.execute("SELECT key, value FROM costs").fetchall()
        for key, text in rows:
            value = json.loads(text)
            if "|baseline " not in key:
                value["time_s"] *= 1000
            connection.execute("UPDATE costs SET value = ? WHERE key = ?", (json.dumps(value), key))


def test_kernels_that_outlast_the_step_are_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    inputs = torch.randn(512, 256)
    options = MeasureOptions(cap_s=0.5, max_rounds=3, cache=ProfileCache(tmp_path))
    first = profile_model(model, inputs, options=options)
    _poison(tmp_path)
    shares: list[float] = []
    said: list[str] = []

    def progress(share: float, what: str) -> None:
        shares.append(share)
        said.append(what)

    again = profile_model(model, inputs, options=options, progress=progress)
    assert said.count("measuring the unplanned step") == 2
    assert shares == sorted(shares)
    poisoned = 1000 * sum(operator.time_s for operator in first.graph.operators)
    assert sum(operator.time_s for operator in again.graph.operators) < poisoned / 10
    # On a busy machine the new costs may be of a busy moment, too.
    monkeypatch.setattr(session, "_SUSPICIOUS", float("inf"))
    third = profile_model(model, inputs, options=options)
    assert third.graph == again.graph  # the cache has the new costs


def test_steps_whose_kernels_outlast_them_are_measured_again_and_said() -> None:
    """What a module's and a whole step's profile share."""
    graph = Graph([Tensor("x", 8)], [Operator("f", (), (0,), 9.0)])
    renewed: list[bool] = []

    def measured(step_time_s: float) -> Callable[[MeasureOptions], tuple[Graph, Baseline]]:
        def run(options: MeasureOptions) -> tuple[Graph, Baseline]:
            renewed.append(options.renew)
            # The machine calms down, or not.
            return graph, Baseline(1, 9.0 if options.renew and step_time_s > 2 else 1.0, True)

        return run

    _, step, notes = measured_again_if_busy(measured(3.0), MeasureOptions())
    assert (step.step_time_s, notes, renewed) == (9.0, (), [False, True])
    _, step, (note,) = measured_again_if_busy(measured(1.0), MeasureOptions())
    assert "9.0 times as long as the unplanned step" in note
