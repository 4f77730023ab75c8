"""`torch.compile(model, backend="memopt")`."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import memopt
from benchmarks.steps import peak_of
from memopt.integrations import torch_compile
from memopt.integrations.torch_compile import compiled_steps, memopt_backend

WIDTH = 64


class Net(nn.Module):
    """Three products, with or without graph breaks between them."""

    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm, self.last = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 1)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x)).sin().cos()
        if self.breaks:
            torch._dynamo.graph_break()
        x = self.norm(self.second(x)).sin().cos()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(x)


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """As the entry point of an installed memopt does."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compiled(model: nn.Module, **options: Any) -> Any:
    return torch.compile(model, backend=memopt_backend, options=options)


def both(model: nn.Module, run: Any, twin: nn.Module, x: Tensor) -> None:
    """A step of each has the same bits."""
    for one in (model, twin):
        one.zero_grad(set_to_none=True)
    found, expected = run(x), twin(x)
    assert torch.equal(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
    for mine, theirs in zip(model.buffers(), twin.buffers(), strict=True):
        assert torch.equal(mine, theirs)


def test_entry_point() -> None:
    text = Path(__file__).parents[3].joinpath("pyproject.toml").read_text()
    entry = tomllib.loads(text)["project"]["entry-points"]["torch_dynamo_backends"]["memopt"]
    assert entry == f"{memopt_backend.__module__}:{memopt_backend.__name__}"


@pytest.mark.parametrize("breaks", [False, True])
def test_steps_are_eagers_and_within_the_budget(breaks: bool) -> None:
    model = Net(breaks)
    twin = copy.deepcopy(model)
    x = torch.randn(256, WIDTH)

    def step(run: Any) -> Any:
        return lambda: run(x).square().sum().backward()

    resident = sum(p.numel() * 4 for p in (*model.parameters(), *model.buffers(), x))
    budget = resident + round(
        (0.95 if breaks else 0.8) * peak_of(twin, step(twin), torch.device("cpu"))
    )
    twin = copy.deepcopy(model)
    run = compiled(model, budget=budget)
    with mock.patch.object(torch_compile, "plan", wraps=torch_compile.plan) as planning:
        for _ in range(3):
            both(model, run, twin, x)
        asked = planning.call_count
        both(model, run, twin, x)
    assert planning.call_count == asked
    assert resident + peak_of(model, step(run), torch.device("cpu")) <= budget
    made = compiled_steps()[-1]
    assert len(made.graphs) == (3 if breaks else 1)
    assert ("2 breaks" if breaks else "1 graph") in made.report()
    assert "test_torch_compile.py:" in made.report()


def test_another_batch_is_planned_anew() -> None:
    model = Net(False)
    twin = copy.deepcopy(model)
    run = compiled(model, budget="min")
    for rows in (32, 48, 32, 64):
        both(model, run, twin, torch.randn(rows, WIDTH))
    x = torch.randn(80, WIDTH)
    torch._dynamo.mark_dynamic(x, 0)
    both(model, run, twin, x)


def test_calls_without_gradients_run_as_they_are() -> None:
    model = Net(False)
    run = compiled(model, budget=1000)
    x = torch.randn(8, WIDTH)
    with torch.no_grad():
        assert torch.equal(run(x), copy.deepcopy(model)(x))
    run.eval()
    with torch.inference_mode():
        assert run(x).shape == (8, 1)


def test_a_plan_made_before_torch_compile_was_used_still_runs() -> None:
    """Dynamo replaces `nn.Module.__init__`, which a forward that makes a module calls."""

    class Making(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = nn.Softplus()(super().forward(x))
            return y

    model, x, init = Making(4, 1), torch.randn(2, 4), nn.Module.__init__
    planned = memopt.plan(model, x, progress=False).apply(model)

    def tagging(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)

    with mock.patch.object(nn.Module, "__init__", tagging):
        planned(x).sum().backward()
    assert planned.calls.planned == 1


def test_two_forwards_before_their_backwards() -> None:
    model = Net(True)
    run = compiled(model, budget="100MiB")
    x = torch.randn(16, WIDTH)
    for _ in range(3):
        (run(x).sum() + run(x).sum()).backward()
    assert set(compiled_steps()[-1].graphs.values()) == {2}


def test_too_small_a_budget_names_the_smallest() -> None:
    for breaks in (False, True):
        run = compiled(Net(breaks), budget=100)
        with pytest.raises(memopt.InfeasibleBudgetError) as caught:
            run(torch.randn(16, WIDTH))
        assert caught.value.smallest_budget_bytes


def test_unknown_options_are_refused() -> None:
    run = compiled(Net(False), bugdet=100)
    with pytest.raises(Exception, match="backend='memopt' takes the options budget, strategy"):
        run(torch.randn(16, WIDTH))


def test_compiled_kernels() -> None:
    model = Net(False)
    run = compiled(model, kernels="compiled", strategy="store-all")
    x = torch.randn(32, WIDTH)
    expected = copy.deepcopy(model)(x)
    torch.testing.assert_close(run(x), expected, rtol=1e-4, atol=1e-5)
    (only,) = compiled_steps()[-1]._now
    assert any(one.target.startswith("memopt.fused") for one in only.plan.graph.operators)


@pytest.mark.parametrize("breaks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_autocast_and_frozen_parameters_after_the_first_step(breaks: bool) -> None:
    """Each kind of call is planned as it is, also when the budget is divided anew meanwhile."""
    model = Net(breaks)
    twin, x = copy.deepcopy(model), torch.randn(8, WIDTH)
    run = compiled(model, budget="min", strategy="rotor", progress=False)
    for step in range(5):
        for one in (model, twin):
            one.first.requires_grad_(step != 1)
            one.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=step == 3):
            found, expected = run(x), twin(x)
        assert torch.equal(found, expected)
        found.float().square().sum().backward()
        expected.float().square().sum().backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad, theirs.grad)  # type: ignore[arg-type]
