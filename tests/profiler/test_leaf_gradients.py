"""Gradients that autograd keeps in another memory layout than the backward makes them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.executor.harness import Case, check

Forward = Callable[[nn.Module, Tensor], Any]


class Weights(nn.Module):
    """A weight in rows, one in columns, and what a test does with them."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.linspace(-1, 1, 128 * 256).reshape(128, 256))
        self.columns = nn.Parameter(torch.linspace(-2, 1, 128 * 256).reshape(256, 128).t())
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self, x)


FORWARDS: dict[str, Forward] = {
    "expanded": lambda m, x: m.rows.sum() + m.columns.mean() + x.exp().sum(),
    "transposed": lambda m, x: (m.rows.t().contiguous().exp() + m.columns.t() * x.sum()).sum(0),
    "sliced": lambda m, x: m.columns[:, 3:].exp().sum(0) + x[:, 1:].sum() + x[1:].mean(),
    "one": lambda m, x: m.rows + m.columns + x[:1, :1].sum(),
}
INPUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.linspace(-1, 1, 64 * 48).reshape(64, 48).t(),
    "gaps": lambda: torch.linspace(-1, 1, 64 * 96).reshape(64, 96)[:, ::2],
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_predicted_is_measured(forward: Forward, inputs: Callable[[], Tensor]) -> None:
    model, x = Weights(forward), inputs().requires_grad_()
    for how in ({"strategy": "store-all"}, {"strategy": "rotor", "budget": "min"}):
        plan = memopt.plan(model, x, progress=False, **how)  # type: ignore[arg-type]
        measured = plan.check(model).measured_peak_bytes
        assert 0.995 * plan.peak_bytes <= measured <= plan.peak_bytes, how


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_bits_and_layouts_of_eager(forward: Forward, inputs: Callable[[], Tensor]) -> None:
    model, x = Weights(forward), inputs()
    check(Case(lambda: Weights(forward), lambda: (inputs().requires_grad_(),)))
    planned = memopt.plan(model, x.requires_grad_(), strategy="store-all", progress=False)
    kept = []
    for module in (model, planned.apply(model)):
        module(x).sum().backward()
        gradients = [one.grad for one in (x, *model.parameters())]
        kept.append([(g.stride(), g) for g in gradients if g is not None])
        model.zero_grad()
        x.grad = None
    for (strides, a), (others, b) in zip(*kept, strict=True):
        assert strides == others
        assert torch.equal(a, b)


def test_gradients_of_computed_inputs_are_passed_on() -> None:
    """Also, neither planning nor a check runs the backward of what computed them."""
    model = Weights(lambda m, x: (m.rows.sum() + m.columns.sum()) * x.sum())
    seed = torch.ones(48, 64, requires_grad=True)
    plan = memopt.plan(model, seed * 2, strategy="store-all", progress=False)
    x = seed * 2
    assert seed.grad is None
    assert plan.check(model, x).measured_peak_bytes <= plan.peak_bytes
    assert seed.grad is None
    planned = plan.apply(model)
    (found,) = torch.autograd.grad(planned(x), x)
    (expected,) = torch.autograd.grad(model(x), x)
    assert torch.equal(found, expected)
