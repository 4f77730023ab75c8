"""Inputs and buffers that a step updates in place, and in-place operators inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import memopt
from memopt.errors import CaptureError
from tests.executor.harness import Case, check, prepare


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.register_buffer("mean", torch.randn(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def update(self, y: Tensor) -> None:
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
            self.count += 1


class UpdatesInput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x * 2)
        x.add_(1)
        return self.b(y).tanh() * x


class UpdatesPartOfInput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x * 2)
        x[0].mul_(2)
        return self.b(y).tanh() * x


class UpdatesBuffer(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).tanh()
        self.update(y)
        return self.b(y)


class ReadsThenUpdates(Layers):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.mean.sin() * 2
        y = (self.a(x) * scale).tanh()
        self.update(y)
        return self.b(y) * scale


class ReadsViewThenUpdates(Layers):
    def forward(self, x: Tensor) -> Tensor:
        scale = self.mean.view(2, 3).t().sin().reshape(6) * 2
        y = (self.a(x) * scale).tanh()
        self.update(y)
        return self.b(y) * scale


class UpdatesThenReads(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.update(x)
        return self.b((self.a(x) * self.mean).tanh()) * self.mean.sin()


class AssignsTheSameBuffer(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.b(self.a(x).tanh())


class InPlace(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y.relu_()
        y = self.b(y)
        y.add_(1)
        y[:, 0] = 0
        y[1].mul_(2)
        return y.sigmoid_()


class InPlaceModules(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.a(x), inplace=True)
        return functional.dropout(self.b(y), 0.5, inplace=True)


class FillsOutput(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(8, 6)
        y[:4] = self.a(x)
        y[4:].copy_(self.b(x))
        return y.cumsum(0)


class Normed(nn.Module):
    """Spectral norm moves its power iteration's buffers in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a = spectral_norm(nn.Linear(6, 6))
        self.b = weight_norm(nn.Linear(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).relu())


MODELS = [
    UpdatesInput,
    UpdatesPartOfInput,
    UpdatesBuffer,
    ReadsThenUpdates,
    ReadsViewThenUpdates,
    UpdatesThenReads,
    AssignsTheSameBuffer,
    InPlace,
    InPlaceModules,
    FillsOutput,
    Normed,
]


@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_updates(model: type[nn.Module]) -> None:
    check(Case(model, lambda: (torch.randn(4, 6),)))


@pytest.mark.parametrize("model", [ReadsThenUpdates, ReadsViewThenUpdates], ids=str)
def test_readers_of_an_updated_buffer_run_once(model: type[nn.Module]) -> None:
    graph = prepare(model(), torch.randn(4, 6)).graph
    (sine,) = (o for o in graph.operators if o.target == "aten.sin.default")
    assert not sine.recomputable
    assert any(o.recomputable for o in graph.operators)


class AssignsBuffer(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.mean = 0.9 * self.mean + 0.1 * y.mean(0).detach()
        return self.b(y) * self.mean


class KeepsActivation(Layers):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        self.penalty = y.square().mean()
        return self.b(y)


class Counts(Layers):
    calls: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.calls = iter([1])
        return self.b(self.a(x))


class Logs(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Counts()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.inner(x))


@pytest.mark.parametrize(
    ("model", "where"),
    [
        (Counts, r"Python state of model\.calls in"),
        (Logs, r"Python state of model\.inner\.calls in"),
    ],
    ids=lambda p: getattr(p, "__name__", ""),
)
def test_python_state_is_refused(model: type[nn.Module], where: str) -> None:
    with pytest.raises(CaptureError, match=where + ".*Return such values as outputs"):
        prepare(model(), torch.randn(4, 6))


@pytest.mark.parametrize(("model", "name"), [(AssignsBuffer, "mean"), (KeepsActivation, "penalty")])
def test_python_state_is_left_behind(model: type[nn.Module], name: str) -> None:
    torch.manual_seed(0)
    eager = model()
    mine = copy.deepcopy(eager)
    x = torch.randn(4, 6)
    planned = prepare(mine, x).planned()
    for _ in range(2):
        assert torch.equal(planned(x), eager(x))
        assert torch.equal(getattr(mine, name), getattr(eager, name))


def test_buffers_stay_real_after_the_look_for_assignments() -> None:
    model = AssignsTheSameBuffer()
    before = dict(model.named_buffers())
    prepare(model, torch.randn(4, 6))
    after = dict(model.named_buffers())
    assert all(after[name] is before[name] for name in before)
    assert int(model.count) == 0


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.register_buffer("whole", torch.randn(6))
        self.register_buffer("part", self.whole[:3])

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x) * self.whole.sin()
        with torch.no_grad():
            self.part.add_(1)
        return y * self.whole


def test_updated_buffers_that_share_memory_are_refused() -> None:
    with pytest.raises(CaptureError, match=r"memory another buffer or input shares.*clone"):
        prepare(Overlapping(), torch.randn(4, 6))


def test_an_input_that_was_computed_is_updated_in_place() -> None:
    """The output of another model, which autograd would run again behind it."""
    before, model = nn.Linear(6, 6), UpdatesInput()
    twin, x = copy.deepcopy(model), before(torch.randn(4, 6)) * 1
    given = x.detach().clone()
    plan = memopt.plan(model, x, budget="min", strategy="rotor", progress=False)
    assert plan.check(model, x).measured_peak_bytes <= plan.peak_bytes
    assert torch.equal(x, given)
    found = []
    for one in (plan.apply(model), twin):
        updated = before(given) * 1
        before.zero_grad()
        one(updated).square().mean().backward()
        found.append([updated, before.weight.grad])
    for here, there in zip(*found, strict=True):
        assert torch.equal(here, there)
