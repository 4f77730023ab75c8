"""Dropout gives eager's bits on the CPU, whatever the probability and the dtype."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from memopt.step.dropout import dropout, kept_scale

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_probability(dtype: torch.dtype) -> None:
    values = torch.randn(200).to(dtype)
    for percent in range(1, 101):
        p = percent / 100
        x = values.clone().requires_grad_()
        torch.manual_seed(percent)
        expected = functional.dropout(x, p)
        expected.sum().backward()
        drawn = torch.random.get_rng_state()
        torch.manual_seed(percent)
        found, mask = dropout(values, p, True)
        assert torch.equal(torch.random.get_rng_state(), drawn)
        assert torch.equal(found, expected)
        ones = torch.ones_like(values)
        backward = torch.ops.aten.native_dropout_backward(ones, mask, kept_scale(p, dtype))
        assert torch.equal(backward, x.grad)


@pytest.mark.parametrize("place", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_in_a_plan(dtype: torch.dtype, place: bool) -> None:
    """float32 rounds 0.15's number twice, bfloat16 0.1's; 1 draws nothing."""
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.15), nn.Dropout(0.1), nn.Linear(8, 8)]
    model = nn.Sequential(*layers, nn.Dropout(0.15), nn.Linear(8, 4)).to(dtype)
    gone = nn.Dropout(1.0)
    x, target = torch.randn(64, 8).to(dtype), torch.randint(0, 4, (64,))

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.model(x)
            return y + gone(y)

    both = Both()
    planned = memopt.plan(both, x, budget="min", strategy="rotor", place=place).apply(both)
    results = []
    for module in (both, planned):
        both.zero_grad()
        torch.manual_seed(1)
        loss = functional.cross_entropy(module(x), target)
        loss.backward()
        gradients = [p.grad for p in both.parameters()]
        results.append([loss, torch.random.get_rng_state(), *gradients])
    for found, expected in zip(*results, strict=True):
        assert found is not None
        assert expected is not None
        assert torch.equal(found, expected)


class DropsNothing(nn.Module):
    """A dropout of a tensor with gaps, whose result is updated in place."""

    def __init__(self, p: float, train: bool) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(4)
        self.drop = nn.Dropout(p).train(train)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)[..., ::2] * 1
        z = self.drop(self.layer(x)[..., ::2])
        self.drop(y).add_(1)
        return self.norm(z) + y


@pytest.mark.parametrize(("p", "train"), [(0.0, True), (0.5, False)])
def test_a_dropout_that_drops_nothing_is_what_it_is_given(p: float, train: bool) -> None:
    """Traces copied it: memory, other bits in what adds along its strides, and updates in place of
    its result did not reach what it was given."""
    torch.manual_seed(0)
    model = DropsNothing(p, train)
    twin, x = copy.deepcopy(model), torch.randn(16, 8)
    plan = memopt.plan(model, x, strategy="store-all", cache=False, progress=False)
    assert "aten.clone.default" not in {one.target for one in plan.graph.operators}
    assert torch.equal(plan.apply(model)(x), twin(x))
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), twin.buffers(), strict=True))
