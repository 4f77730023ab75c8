"""What was captured once serves every plan of the same call."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.capture import captures
from memopt.capture.capture import capture
from memopt.stages import capturing


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """The calls that were captured, in order."""
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    calls: list[Any] = []

    def counted(model: nn.Module, call: Any, *rest: Any) -> Any:
        calls.append(call)
        return capture(model, call, *rest)

    monkeypatch.setattr(capturing, "capture", counted)
    # The default argument of the one that profiling calls.
    inner: Any = captures.reused_capture.__wrapped__  # type: ignore[attr-defined]
    monkeypatch.setattr(inner, "__defaults__", (counted,))
    return calls


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 4))


def steps(model: nn.Module) -> list[torch.Tensor]:
    """Four kinds of calls: two shapes, with and without gradients that are there."""
    torch.manual_seed(1)
    gradients = []
    for rows in (8, 6):
        model.zero_grad()
        for _ in range(2):
            model(torch.randn(rows, 16)).square().mean().backward()
        gradients += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients


def test_four_kinds_of_two_shapes_are_captured_twice(made: list[Any]) -> None:
    expected = steps(network())
    # Once when they are planned, and once after a restart, from files.
    for _ in range(2):
        made.clear()
        model = memopt.wrap(network(), "min", progress=False)
        found = steps(model)
        assert len(model.memopt.plans) == 4
        assert len(made) == 2
        assert all(map(torch.equal, found, expected))
        assert model.calls.planned == 4


def test_a_loaded_plan_is_captured_once(made: list[Any], tmp_path: Path) -> None:
    model, inputs = network(), torch.randn(8, 16)
    memopt.plan(model, inputs, budget="min", progress=False).save(tmp_path / "plan")
    made.clear()
    twin = network()
    plan = memopt.load(tmp_path / "plan")
    plan.check(twin)
    plan.apply(twin)(inputs).sum().backward()
    assert len(made) == 1
    twin[2].p = 0.5
    plan.apply(twin)
    assert len(made) == 2


def test_another_setting_layout_or_leaf_is_another_capture(made: list[Any]) -> None:
    model, inputs = network(), torch.randn(8, 16)

    def planned(given: torch.Tensor) -> memopt.Plan:
        return memopt.plan(model, given, budget="min", progress=False)

    kept = [planned(inputs), planned(inputs)]
    assert len(made) == 1
    other = torch.randn(8, 16)
    kept.append(planned(other))
    assert len(made) == 1
    assert kept[-1].profiled is not None
    assert kept[-1].profiled.captured.call.args[0] is other
    kept.append(planned(torch.randn(16, 8).t()))
    kept.append(planned(inputs.clone().requires_grad_()))
    model[2].p = 0.1
    kept.append(planned(inputs))
    model.eval()
    kept.append(planned(inputs))
    with torch.autocast("cpu"):
        kept.append(planned(inputs))
    assert len(made) == 6


def test_models_and_captures_go_when_nobody_holds_them() -> None:
    model = network()
    plan = memopt.plan(model, torch.randn(8, 16), budget="min", progress=False)
    assert plan.profiled is not None
    held = [weakref.ref(model), weakref.ref(plan.profiled.captured)]
    del plan
    gc.collect()
    assert held[1]() is None
    del model
    gc.collect()
    assert held[0]() is None
