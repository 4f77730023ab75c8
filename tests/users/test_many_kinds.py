"""Calls of ever other kinds: what a user learns of the plans that are made for them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import memopt
from memopt.executor import calls as calls_module
from memopt.executor.plan_maker import Made
from tests.faults.injected import failing


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(calls_module, "_MANY", (3, 12))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 4)
        self.power = 1.0

    def forward(self, x: torch.Tensor, scale: float | torch.Tensor = 1.0) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * scale * self.power
        return y


def by_size(model: nn.Module, step: int) -> torch.Tensor:
    y: torch.Tensor = model(torch.ones(step + 1, 4))
    return y


def by_number(model: nn.Module, step: int) -> torch.Tensor:
    y: torch.Tensor = model(torch.ones(2, 4), 0.1 * step)
    return y


def by_attribute(model: nn.Module, step: int) -> torch.Tensor:
    model.power = 0.1 * step
    y: torch.Tensor = model(torch.ones(2, 4))
    return y


CASES = [
    (by_size, r"argument 0: float32\[2, 4\].*, then float32\[3, 4\]"),
    (by_number, r"argument 1: 0\.1, then 0\.2"),
    (by_attribute, r"model\.power: planned 0\.1, got 0\.2"),
]


@pytest.mark.parametrize(("call", "differs"), CASES)
def test_many_plans_are_counted_and_what_differs_is_said(
    call: Callable[[nn.Module, int], torch.Tensor], differs: str
) -> None:
    model = memopt.wrap(Scaled(), budget="min", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2):
            call(model, step)
    with pytest.warns(UserWarning, match=f"3 plans were made.*{differs}.*on_mismatch"):
        call(model, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(model, 3)


def test_planning_again_after_apply_is_counted() -> None:
    model = Scaled()
    plan = memopt.plan(model, torch.ones(9, 4), budget="min", progress=False)
    planned = plan.apply(model, on_mismatch="plan")
    for step in range(2):
        by_size(planned, step)
    with pytest.warns(UserWarning, match=r"3 plans were made.*got float32\[3, 4\].*on_mismatch="):
        by_size(planned, 2)


def test_a_number_that_is_passed_as_a_tensor_has_one_plan_and_eagers_bits() -> None:
    model, plain = memopt.wrap(Scaled(), budget="min", progress=False), Scaled()
    for step in range(4):
        x, scale = torch.randn(2, 4), 0.1 * step
        model.zero_grad()
        plain.zero_grad()
        output = model(x, torch.tensor(scale))
        output.square().sum().backward()
        expected = plain(x, scale)
        expected.square().sum().backward()
        assert torch.equal(output, expected)
        assert torch.equal(model.linear.weight.grad, plain.linear.weight.grad)
        model.zero_grad()
    assert len(memopt.running(model).plans) == 1


def test_shapes_that_are_planned_ahead_are_not_counted() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        memopt.wrap(Scaled(), shapes=[torch.ones(rows, 4) for rows in range(1, 5)], progress=False)


def test_kinds_that_displace_each_other_are_counted_with_the_remedy() -> None:
    model = memopt.wrap(Scaled(), budget="min", most_plans=2, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in (0, 1, 0, 1):
            by_size(model, step)
    with pytest.warns(UserWarning, match=r"3 plans were made"):
        by_size(model, 2)
    with pytest.warns(UserWarning, match=r"1 plans were made once more.*most_plans=2.*pad"):
        by_size(model, 0)


def test_each_plan_has_a_line_and_stays_after_unwrapping(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = Scaled()
    memopt.wrap(model, budget="1MiB", progress=False)
    plans = model.plans
    with caplog.at_level("INFO", logger="memopt"):
        by_size(model, 3).sum().backward()
    lines = [one.getMessage() for one in caplog.records if one.getMessage() in plans.lines]
    (line,) = lines
    assert re.fullmatch(r"planned \[4, 4\]: \d+ B of 1\.0 MiB, \+0\.0%, [a-z-]+", line)
    memopt.unwrap(model)
    assert not hasattr(model, "plans")
    assert [plan.budget for plan in plans] == [2**20]
    assert repr(plans) == line


def test_no_kind_holds_its_first_batch() -> None:
    model, batches = memopt.wrap(Scaled(), "min", "rotor", progress=False), []
    for size in (3, 5):
        x = torch.randn(size, 4)
        batches.append(StorageWeakRef(x.untyped_storage()))  # type: ignore[no-untyped-call]
        model(x).sum().backward()
        del x
        model.zero_grad()
    assert [one.expired() for one in batches] == [True, True]  # type: ignore[no-untyped-call]
    assert all(plan.check(model).measured_peak_bytes <= plan.peak_bytes for plan in model.plans)
    model.power = 2.0  # the model is traced again, without the first batch
    with torch.no_grad():
        expected = model(torch.ones(3, 4))
    assert torch.equal(model(torch.ones(3, 4)), expected)


def test_ctrl_c_while_a_plan_is_displaced_leaves_the_others_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It left the kind of the displaced plan without any, of which the next call took the last."""
    model = memopt.wrap(Scaled(), "min", most_plans=1, progress=False)
    by_size(model, 0).sum().backward()  # type: ignore[no-untyped-call]
    with monkeypatch.context() as patch:
        patch.setattr(Made, "stop", failing(Made.stop, 1, KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            by_size(model, 1)
    twin = Scaled()
    for step in (0, 1, 0):
        assert torch.equal(by_size(model, step), by_size(twin, step))
        assert len(memopt.running(model).plans) == 1  # type: ignore[union-attr]
