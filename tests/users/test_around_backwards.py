"""What is there when a planned backward begins, and what its forward did not know of, is charged
from the next step on: a graph that is kept, gradients, outputs and inputs of other calls, the loss
of a call that a checkpoint runs again; or is still there when it is over: gradients that it was
given."""

from __future__ import annotations

import gc
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.pricing.memory import metered

CPU = torch.device("cpu")
ROWS, WIDTH, HIDDEN = 32, 64, 256


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(2)]
    return nn.Sequential(*(layer for block in blocks for layer in block))


def batch() -> Tensor:
    return torch.ones(ROWS, WIDTH)


class Loop:
    """A training loop without an optimizer's state, and what it holds from step to step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.held = model, list[Tensor]()

    def kept_graph(self) -> None:
        output = self.model(batch())
        output.sum().backward(retain_graph=True)
        output.square().sum().backward()

    def asked_gradients(self) -> None:
        output = self.model(batch())
        weights = [*self.model.parameters()]
        held = torch.autograd.grad(output.sum(), weights, retain_graph=True)
        output.square().sum().backward()
        del held

    def dropped_calls(self) -> None:
        self.held = [*self.held[-2:], self.model(batch().repeat(16, 1))]

    def looked_for_anomalies(self) -> None:
        with torch.autograd.detect_anomaly():
            self.model(batch()[:2]).sum().backward()

    def looked_for_anomalies_in_a_kept_graph(self) -> None:
        with torch.autograd.detect_anomaly():
            self.model(batch()[:2]).sum().backward(retain_graph=True)

    def calls_in_turn(self) -> None:
        first, second = self.model(batch()), self.model(batch())
        first.sum().backward()
        second.sum().backward()

    def calls_in_one_backward(self) -> None:
        first, second = self.model(batch()), self.model(batch())
        (first.sum() + second.sum()).backward()

    def held_output(self) -> None:
        output = self.model(batch())
        output.sum().backward()
        self.held = [output]

    def given_gradient(self) -> None:
        output = self.model(batch())
        output.backward(torch.full_like(output, 0.1))

    def checkpointed(self) -> None:
        output = checkpoint(self.model, batch(), use_reentrant=False)
        output.repeat(32, 1).square().sum().backward()

    def step(self, name: str) -> None:
        getattr(self, name)()
        self.model.zero_grad()


LOOPS = (
    "kept_graph",
    "asked_gradients",
    "dropped_calls",
    "looked_for_anomalies",
    "looked_for_anomalies_in_a_kept_graph",
    "calls_in_turn",
    "calls_in_one_backward",
    "held_output",
    "given_gradient",
    "checkpointed",
)


def peak_bytes(loop: Loop, name: str) -> int:
    """Of a step, with what is there when it begins."""
    gc.collect()
    there = sum(one.nbytes for one in (*loop.model.parameters(), *loop.held))
    with metered(CPU) as used:
        loop.step(name)
    return there + used.peak_bytes


def wrapped(budget: Any, place: bool = False) -> Loop:
    return Loop(memopt.wrap(network(), budget, "rotor", place=place, progress=False))


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.parametrize("name", LOOPS)
def test_from_the_third_step_on_the_budget_holds(name: str) -> None:
    """With "min" there is not a byte to spare."""
    loop = wrapped("min")
    for _ in range(5):
        loop.step(name)
    calls, budget = loop.model.calls, max(one.budget for one in loop.model.plans)
    before = calls.planned
    assert peak_bytes(loop, name) <= budget
    assert calls.planned > before
    assert not calls.original


@pytest.mark.parametrize("name", ["calls_in_one_backward", "kept_graph"])
def test_each_call_under_way_has_an_arena_of_its_own_within_the_budget(name: str) -> None:
    """No larger one than its plan's, such as the first plan has, which knew of none beside it."""
    loop = wrapped("min", place=True)
    for _ in range(5):
        loop.step(name)
    budget = max(one.budget for one in loop.model.plans) + 30_000
    loop, texts = trained(budget, name, place=True)
    assert loop.model.plans[-1].arena is not None
    assert not any("exceed their budget of" in text for text in texts)
    assert peak_bytes(loop, name) <= budget


def test_the_state_of_an_optimizer_that_has_stepped_before_is_charged() -> None:
    """A model that is wrapped anew, whose calls may get no backward."""
    loop = wrapped("min")
    optimizer = torch.optim.Adam(loop.model.parameters())
    loop.calls_in_turn()
    optimizer.step()
    loop.model.zero_grad()
    states_bytes = sum(one.nbytes for state in optimizer.state.values() for one in state.values())
    memopt.unwrap(loop.model)
    memopt.wrap(loop.model, "min", "rotor", progress=False)
    loop.model(batch())
    (plan,) = memopt.running(loop.model).plans
    least = memopt.plan(network(), batch(), budget="min", strategy="rotor", progress=False)
    assert plan.budget >= least.peak_bytes + states_bytes


def test_updates_in_hooks_on_gradients_are_charged() -> None:
    """As torch's tutorial has it. With few rows, what AdamW makes is beyond the planned peak."""
    model = memopt.wrap(network(), "min", "rotor", progress=False)
    optimizers = [torch.optim.AdamW([one], 1e-3, foreach=False) for one in model.parameters()]

    def updating(optimizer: torch.optim.Optimizer) -> Callable[[Tensor], None]:
        def update(_parameter: Tensor) -> None:
            optimizer.step()
            optimizer.zero_grad()

        return update

    for one, optimizer in zip(model.parameters(), optimizers, strict=True):
        one.register_post_accumulate_grad_hook(updating(optimizer))
    for _ in range(5):
        model(batch()[:2]).sum().backward()
    calls = model.calls.planned
    states = [one for optimizer in optimizers for one in optimizer.state.values()]
    there = sum(x.nbytes for state in states for x in state.values())
    there += sum(one.nbytes for one in model.parameters())
    with metered(CPU) as used:
        model(batch()[:2]).sum().backward()
    assert there + used.peak_bytes <= model.plans[-1].budget
    assert model.calls.planned == calls + 1


def least_bytes() -> int:
    plan = memopt.plan(network(), batch(), budget="min", strategy="rotor", progress=False)
    assert plan.budget is not None
    return plan.budget


def trained(budget: int, name: str, place: bool = False) -> tuple[Loop, list[str]]:
    """A loop after five steps, and what memopt warned of."""
    loop = wrapped(budget, place)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(5):
            loop.step(name)
    return loop, [str(one.message) for one in told]


TOLD = {
    "kept_graph": "a graph that its backward keeps (retain_graph=True)",
    "calls_in_turn": "1 more call(s) that await their backward",
    "held_output": "of what the loop keeps (of its loss, outputs, gradients)",
    "given_gradient": "the gradients of the outputs, which the loop holds during the backward",
}


@pytest.mark.parametrize("name", TOLD)
def test_a_budget_that_is_exceeded_is_told_of_and_the_one_that_is_named_is_kept(name: str) -> None:
    _, texts = trained(least_bytes(), name)
    exceeds = next(text for text in texts if "exceed their budget of" in text)
    assert TOLD[name] in exceeds
    found = re.search(r"give at least budget=(\d+)", exceeds)
    assert found is not None
    loop, texts = trained(int(found[1]), name)
    assert not any("exceed their budget of" in text for text in texts)
    assert peak_bytes(loop, name) <= int(found[1])


def test_a_backward_that_finds_gradients_beside_a_call_that_waits_is_refused() -> None:
    """Where they have room only if they are dropped before it."""
    loop = wrapped(least_bytes() + 150_000)

    def steps() -> None:
        for _ in range(6):
            loop.calls_in_turn()
            loop.model.zero_grad(set_to_none=False)

    with pytest.raises(memopt.InfeasibleBudgetError, match="a backward is to add to gradients"):
        steps()
