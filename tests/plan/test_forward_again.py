"""A plan whose forward runs again keeps nothing until its backward, and trains as ever."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.api.forward_again import forward_again, small_plans
from memopt.api.reserved import planned_within
from memopt.api.solving import solve
from memopt.models.budget import Budget
from memopt.models.charges import Charges
from memopt.programs.charged import held_bytes, needed_bytes
from memopt.programs.validate import validate
from memopt.strategies.rotor import Rotor

X = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


class Drawn(nn.Module):
    """Draws masks, and changes what it has drawn in place."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: Tensor) -> Tensor:
        masked: Tensor = nn.functional.dropout(self.wide(x), 0.5).relu_()
        return x + self.narrow(masked * 2.0)


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))


def normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("make", [block, normalised, Drawn])
def test_it_keeps_nothing_and_trains_as_ever(
    make: Callable[[], nn.Module], budget: str | None
) -> None:
    torch.manual_seed(0)
    model = make()
    made = memopt.plan(model, X, budget=budget, strategy="rotor", progress=False)
    again = forward_again(made)
    assert again is not None
    assert validate(again.graph, again.program, Budget(None)) is None
    kept = held_bytes(again.graph, again.program)
    assert kept == 0  # the inputs are the caller's
    assert kept < held_bytes(made.graph, made.program)
    assert again.step_time_s > made.step_time_s
    found = again.check(model, X)
    assert found.measured_peak_bytes <= again.peak_bytes
    plain = copy.deepcopy(model)
    planned = again.apply(model)
    for _ in range(2):
        drawn = [stepped(plain), stepped(planned)]
        assert torch.equal(*drawn)
    for one, other in zip(state(model), state(plain), strict=True):
        assert torch.equal(one, other)


def stepped(model: nn.Module) -> Tensor:
    """Make a step; return the state of random numbers after it, and its output."""
    torch.manual_seed(1)
    output = model(X)
    output.square().mean().backward()
    return torch.cat([torch.get_rng_state().double(), output.detach().flatten().double()])


def state(model: nn.Module) -> list[Tensor]:
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    assert gradients
    return [*model.parameters(), *model.buffers(), *gradients]


def test_a_graph_without_a_backward_has_no_such_plan() -> None:
    chain = memopt.plan(block(), X, strategy="store-all", progress=False)
    first, *again = small_plans(chain, chain)
    assert first is chain
    assert all(one is not chain for one in again)


def test_calls_that_wait_beside_a_step_keep_nothing_but_its_inputs() -> None:
    """As a pipeline's micro-batches: the plan of the smallest peak kept much of each."""
    model = nn.Sequential(block(), block(), block())
    made = memopt.plan(model, X.clone().requires_grad_(), strategy="store-all", progress=False)
    assert made.profiled is not None
    solve_for = partial(solve, made.profiled.graph, strategy=Rotor(), device=made.device)
    charges = Charges(waiting_calls=5)
    least = planned_within(solve_for, "min", charges)
    needed = needed_bytes(least.graph, least.program, charges)
    assert least.budget == needed
    # Of each call the output is the caller's.
    assert needed == least.peak_bytes + 5 * X.nbytes
    assert needed < 0.4 * needed_bytes(made.graph, made.program, charges)
    fast = planned_within(solve_for, needed + X.nbytes, charges)
    assert needed_bytes(fast.graph, fast.program, charges) <= needed + X.nbytes
    with pytest.raises(memopt.InfeasibleBudgetError, match=f"Raise the budget to {needed} bytes"):
        planned_within(solve_for, needed - 1, charges)
