"""Steps of a model in parts that call other parts than those that were metered."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.executor.calls import Calls
from memopt.pricing.memory import metered
from tests.users.part_models import Deepening, Shares

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")
FEW, ALL = torch.tensor(2), torch.tensor(6)

pytestmark = pytest.mark.filterwarnings("ignore:.*Its sub-modules are planned instead")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def in_parts(budget: Any) -> Any:
    return memopt.wrap(Deepening(), budget, "rotor", parts="auto", progress=False)


def step(model: nn.Module, depth: torch.Tensor) -> None:
    model.zero_grad()
    model(X, depth).square().mean().backward()


def peak_bytes(model: nn.Module, depth: torch.Tensor) -> int:
    """The peak of a step that begins without gradients, in total bytes."""
    model.zero_grad()
    held = [*model.parameters(), X, depth]
    with metered(CPU) as used:
        step(model, depth)
    return sum(one.nbytes for one in held) + used.peak_bytes


def test_a_deeper_step_than_any_metered_one_is_said_and_planned_for() -> None:
    """The plans were made for the two blocks that the metered steps called: all others exceeded
    the budget without a word."""
    bounds = []
    for budget in ("min", None):
        model = in_parts(budget)
        for _ in range(4):
            step(model, ALL)
        bounds.append(model.memopt.parts.shared.peak_bytes())
    least, most = bounds
    budget = least + (most - least) // 3
    model, plain = in_parts(budget), Deepening()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*budget of")
        for _ in range(6):
            step(model, FEW)
        for _ in range(2):
            step(model, torch.tensor(1))
        step(model, ALL)
    with pytest.warns(UserWarning, match=rf"more than its budget of {budget} bytes.*same parts"):
        step(model, ALL)
    step(plain, ALL)
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)
    measured = peak_bytes(model, ALL)
    assert measured <= model.memopt.parts.shared.peak_bytes() <= budget
    assert measured < peak_bytes(plain, ALL)


def test_the_smallest_budget_that_is_named_grows_with_the_deepest_step() -> None:
    """A budget that was enough for the metered steps alone was the last that was named."""
    model = in_parts(2**12)
    for number in range(6):
        with pytest.warns(match="give at least budget=") if number == 2 else nullcontext():
            step(model, FEW)
    step(model, ALL)
    with pytest.warns(UserWarning, match="give at least budget=") as said:
        step(model, ALL)
    (named,) = [str(one.message).split("budget=")[1].split(".")[0] for one in said]
    enough = in_parts(int(named))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*budget of")
        for _ in range(6):
            step(enough, ALL)
    assert peak_bytes(enough, ALL) <= int(named)


def test_what_a_planned_part_shares_with_the_model_is_not_tried() -> None:
    """A level of it was, in each step, and the part was planned again for what that left there."""
    model = memopt.wrap(Shares(), "min", "rotor", parts="auto", progress=False)
    for _ in range(4):
        model.zero_grad()
        model(X).square().mean().backward()
    assert memopt.running(model).calls == Calls(planned=4)
    report = memopt.running(model).report()  # type: ignore[union-attr]
    assert "not planned: inner: not called" in report
    assert "inner.0" not in report


def test_the_report_of_a_model_that_one_plan_holds_shows_that_plan() -> None:
    """It said "0 plans of parts", and no more."""
    model: Any = memopt.wrap(nn.Linear(16, 4), strategy="rotor", parts="auto", progress=False)
    assert model.memopt.report() == "not in parts: no plans yet"
    model(X).sum().backward()
    assert model.memopt.report().startswith("not in parts: planned [64, 16]: ")


class Coder(nn.Module):
    """An autoencoder without a forward: its loop calls its two halves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(6)]
        self.encoder, self.decoder = nn.Sequential(*layers[:3]), nn.Sequential(*layers[3:])


def coded(model: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model.decoder(model.encoder(X)).square().mean().backward()
        optimizer.step()


def test_parts_that_the_loop_calls_by_itself_share_the_budget() -> None:
    """They ran their smallest plans whatever the budget, and exceeded it without a word."""

    def in_halves(budget: Any) -> Any:
        names = ["encoder", "decoder"]
        return memopt.wrap(Coder(), budget, "rotor", parts=names, progress=False)

    model = in_halves("min")
    coded(model, 4)
    least = model.memopt.parts.shared.peak_bytes()
    budget = least + least // 4
    model, plain = in_halves(budget), Coder()
    coded(model, 4)
    with metered(CPU) as used:
        coded(model, 1)
    held_bytes = sum(one.nbytes for one in (*model.parameters(), X))
    assert least < held_bytes + used.peak_bytes <= budget
    coded(plain, 5)
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert model.calls == Calls(planned=10)
    model = in_halves(least // 2)
    with pytest.warns(UserWarning, match=f"exceed their budget of {least // 2} bytes"):
        coded(model, 4)


@pytest.mark.filterwarnings("error:.*is trained and was not called")
def test_a_model_of_which_the_loop_calls_one_part_alone_is_in_use() -> None:
    """A warning said that nothing is planned."""
    model: Any = memopt.wrap(Coder(), "min", "rotor", parts=["encoder"], progress=False)
    coded(model, 2)
    assert model.calls == Calls(planned=2)


def test_each_part_that_has_a_backward_of_its_own_is_a_step() -> None:
    """As a generator and a critic; a frozen one, or one that keeps nothing, is none."""
    model, plain = Coder(), Coder()
    memopt.wrap(model, 2**20, "rotor", parts=["encoder", "decoder"], progress=False)
    for one in (model, plain):
        optimizer = torch.optim.SGD(one.parameters(), 0.1)
        for _ in range(4):
            made = one.encoder(X)
            one.decoder(made.detach()).square().mean().backward()
            optimizer.step()
            one.decoder.requires_grad_(False)
            one.decoder(made).sum().backward()
            one.decoder.requires_grad_(True)
            optimizer.step()
            optimizer.zero_grad()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    assert model.calls.original == 0  # type: ignore[union-attr]


class HoldsScript(nn.Module):
    """Calls a module of torch.jit.script, which no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.scripted = torch.jit.script(nn.Sequential(nn.Linear(16, 16), nn.ReLU()))
        self.rest = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.rest(self.scripted(x))
        return made


def test_the_parts_around_a_scripted_module_are_named() -> None:
    """The refusal ended in an AttributeError of torch.jit's."""
    model = memopt.wrap(HoldsScript(), "min", progress=False)
    with pytest.raises(memopt.CaptureError, match=r"torch\.jit\.script.*\(rest\)$"):
        model(X)
    memopt.wrap(memopt.unwrap(model), "min", parts="auto", progress=False)
    model(X).sum().backward()
    assert model.calls == Calls(planned=1)
