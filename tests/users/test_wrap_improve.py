"""`memopt.wrap(improve=True)`: a plan at once, and a better one between two steps, with eager's
bits."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

import pytest
import torch
from torch import nn

import memopt
from memopt.api import improving
from memopt.api.improving import Improving
from memopt.api.wrap import OwnCallsPlanner
from memopt.executor.ready_plans import ReadyPlans
from memopt.files.plan_store import PlanStore
from memopt.programs.solution import Solution
from memopt.strategies import Auto, Rotor, Strategy
from memopt.strategies.apart import SolveRequest
from tests.faults.injected import failing

PATIENCE_S = 120.0
BUDGET = 0.6


def loss_of(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(5):
        layers += [nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.LayerNorm(64)]
    return nn.Sequential(*layers)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = loss_of(model(x))
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def wrapped(limit_s: float | None, strategy: Strategy | None = None) -> nn.Module:
    """A network that is planned with all that its loop needs."""
    return memopt.wrap(
        network(),
        BUDGET,
        strategy or Auto(),
        loss_fn=loss_of,
        optimizer="adamw",
        time_limit_s=limit_s,
        progress=False,
    )


def trained(model: nn.Module, steps: int, between: object = None) -> list[torch.Tensor]:
    """The losses of so many steps; `between` runs after the third."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters())
    x, losses = torch.randn(256, 64), []
    for number in range(steps):
        losses.append(step(model, optimizer, x))
        if number == 2 and callable(between):
            between()
    return losses


@pytest.fixture
def alone(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def waited_for(model: nn.Module) -> None:
    """Wait for the search of the plan that ran last."""
    made = next(memopt.running(model).plans.made())  # type: ignore[union-attr]
    assert isinstance(made.search, Improving)
    end_s = time.monotonic() + PATIENCE_S
    while not made.search.ended:
        assert time.monotonic() < end_s
        time.sleep(0.1)


def test_a_better_plan_takes_over_with_the_same_bits(
    alone: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="memopt.api.improving")
    plain = trained(network(), 8)
    model = wrapped(4.0)
    seen: list[memopt.Plan] = []

    def swap() -> None:
        seen.extend(memopt.running(model).plans)  # type: ignore[union-attr]
        waited_for(model)

    losses = trained(model, 8, swap)
    assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=True))
    first, (last,) = seen[0], memopt.running(model).plans  # type: ignore[union-attr]
    assert first.strategy == Auto(at_once=True)
    assert last.strategy == Auto()
    assert last.step_time_s < first.step_time_s
    assert last.budget == first.budget
    assert last.peak_bytes <= last.budget
    assert [x.message.count("takes over") for x in caplog.records] == [1]
    # The better plan is kept on disk: the next process begins with it, and looks for no other.
    again = wrapped(4.0)
    losses = trained(again, 4)
    assert all(torch.equal(a, b) for a, b in zip(plain, losses, strict=False))
    (kept,) = memopt.running(again).plans  # type: ignore[union-attr]
    assert kept.strategy == Auto()
    assert kept.program == last.program


@dataclass
class Answered:
    """A search that has ended; a `SolvedApart`."""

    answer: Solution
    ended: bool = True

    def solution(self) -> Solution:
        return self.answer

    def stop(self) -> None:
        del self.answer


def test_a_better_plan_takes_over_after_ctrl_c(
    alone: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Wherever the call that was to take it over was interrupted."""
    caplog.set_level(logging.INFO, logger="memopt.api.improving")
    model = wrapped(60.0)
    (expected,) = trained(model, 1)
    made = next(memopt.running(model).plans.made())  # type: ignore[union-attr]
    assert isinstance(made.search, Improving)
    made.search.stop()
    # The same plan once more, as if it were faster and the search had ended with it.
    found = SolveRequest(
        Auto(at_once=True), made.plan.graph, made.plan.budget, made.plan.device, None
    )
    made.search._search = Answered(found.solution())  # type: ignore[assignment]
    monkeypatch.setattr(improving, "FASTER", -1.0)
    for home, name in ((PlanStore, "renew"), (OwnCallsPlanner, "apply"), (ReadyPlans, "replace")):
        with monkeypatch.context() as patch:
            patch.setattr(home, name, failing(getattr(home, name), 1, KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                trained(model, 1)
        assert next(memopt.running(model).plans.made()) is made  # type: ignore[union-attr]
    model.load_state_dict(network().state_dict())
    assert torch.equal(trained(model, 1)[0], expected)
    better = next(memopt.running(model).plans.made())  # type: ignore[union-attr]
    assert better is not made
    assert better.search is made.search is None
    assert [x.message.count("takes over") for x in caplog.records] == [1]


def test_what_is_not_worth_a_search_begins_none(alone: None) -> None:
    for model in (wrapped(None), wrapped(4.0, Rotor())):
        trained(model, 1)
        made = next(memopt.running(model).plans.made())  # type: ignore[union-attr]
        assert made.search is None


def test_the_smallest_budget_is_searched_before_the_first_step(alone: None) -> None:
    def normed() -> nn.Sequential:
        blocks = [nn.Sequential(nn.Linear(24, 24), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
        return nn.Sequential(*blocks, nn.BatchNorm1d(24))

    options = {"loss_fn": loss_of, "progress": False}
    x = torch.randn(16, 24)
    model = memopt.wrap(normed(), "min", **options)
    loss_of(model(x)).backward()  # type: ignore[no-untyped-call]
    (plan,) = model.plans
    least = memopt.plan(normed(), (x,), budget="min", **options)
    at_once = memopt.plan(normed(), (x,), budget="min", strategy=Auto(at_once=True), **options)
    assert plan.peak_bytes == least.peak_bytes < at_once.peak_bytes


def test_unwrapping_ends_the_search(alone: None) -> None:
    model = wrapped(60.0)
    trained(model, 1)
    made = next(memopt.running(model).plans.made())  # type: ignore[union-attr]
    search = made.search
    assert isinstance(search, Improving)
    memopt.unwrap(model)
    assert made.search is None
    assert search.ended


def test_the_smallest_plan_needs_no_more_than_eager(alone: None) -> None:
    """It kept batch norm's new statistics for a backward that does not look at them."""
    torch.manual_seed(0)
    layers = [nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4)]
    model = memopt.wrap(nn.Sequential(*layers), "min", progress=False)
    with torch.autocast("cpu", torch.bfloat16):
        output = model(torch.randn(4, 16))
    loss_of(output.float()).backward()  # type: ignore[no-untyped-call]
    (plan,) = model.plans
    assert plan.peak_bytes <= plan.baseline.peak_bytes
