"""Operators that torch would take apart while tracing, recurrent layers, and mixed dtypes: the
planned step runs the kernels that eager runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from memopt.torch_private.whole_kernels import kernels_kept_whole
from tests.executor.harness import Case, check
from tests.torch_private.hiding import hide, of_another_torch


def images() -> tuple[Tensor, ...]:
    return (torch.linspace(-2, 2, 2 * 3 * 7 * 6).reshape(2, 3, 7, 6),)


def rows() -> tuple[Tensor, ...]:
    return (torch.linspace(-2, 2, 2 * 3 * 7).reshape(2, 3, 7),)


def volumes() -> tuple[Tensor, ...]:
    return (torch.linspace(-2, 2, 2 * 3 * 5 * 6 * 4).reshape(2, 3, 5, 6, 4),)


class Resized(nn.Module):
    """Interpolation between two trained scalings."""

    def __init__(self, mode: str, **options: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.5, -1.0]))
        self.mode, self.options = mode, options

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.scale.view(1, 3, *[1] * (x.dim() - 2))
        return functional.interpolate(y, mode=self.mode, **self.options).sin()


@pytest.mark.parametrize("form", [{"scale_factor": 1.7}, {"size": 9}])
@pytest.mark.parametrize(
    ("mode", "inputs"),
    [
        ("nearest", rows),
        ("nearest", images),
        ("nearest-exact", volumes),
        ("linear", rows),
        ("bilinear", images),
        ("bicubic", images),
        ("trilinear", volumes),
    ],
)
def test_interpolation_has_the_bits_of_eager(
    mode: str, inputs: Callable[[], Any], form: dict[str, Any]
) -> None:
    check(Case(lambda: Resized(mode, **form), inputs))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_antialiased_interpolation(mode: str) -> None:
    check(Case(lambda: Resized(mode, size=(3, 4), antialias=True), images))


def test_a_margin_loss_is_that_of_eager() -> None:
    class Margin(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 4)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            return functional.multilabel_margin_loss(self.layer(x), labels)

    labels = torch.tensor([[0, 1, -1, 2], [3, -1, 0, 0]])
    check(Case(Margin, lambda: (torch.linspace(-1, 1, 12).reshape(2, 6), labels)))


def test_the_decompositions_are_back_afterwards() -> None:
    overload = torch.ops.aten.upsample_bilinear2d.vec
    before = dict(overload.py_kernels)
    with kernels_kept_whole():
        assert before != overload.py_kernels
    assert before == overload.py_kernels


def test_an_operator_that_a_torch_does_not_have_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.11 has no lanczos interpolation: nothing could be captured."""
    name = "torch.ops.aten._upsample_lanczos2d_aa.vec"
    of_another_torch(monkeypatch, name)
    hide(monkeypatch, name)
    with kernels_kept_whole():
        pass


class Recurrent(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)


def sequences() -> tuple[Tensor, ...]:
    return (torch.linspace(-2, 2, 7 * 4 * 16).reshape(7, 4, 16).sin(),)


@pytest.mark.parametrize(
    "layer",
    [
        lambda: nn.LSTM(16, 8),
        lambda: nn.LSTM(16, 8, 2, dropout=0.3, bidirectional=True),
        lambda: nn.LSTM(16, 8, bias=False, batch_first=True),
        lambda: nn.LSTM(16, 8, proj_size=4),
        lambda: nn.RNN(16, 8, nonlinearity="relu"),
    ],
)
def test_recurrent_layers(layer: Callable[[], nn.Module]) -> None:
    check(Case(lambda: Recurrent(layer()), sequences))


def test_gru_computes_what_eager_does() -> None:
    """To rounding: eager's gates are views with gaps, whose kernels round otherwise."""
    model = Recurrent(nn.GRU(16, 8, 2, bidirectional=True))
    (x,) = sequences()
    expected = model(x)[0]
    expected.square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    model.zero_grad()
    found = memopt.plan(model, x, strategy="rotor", progress=False).apply(model)(x)[0]
    found.square().sum().backward()
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close([p.grad for p in model.parameters()], gradients)


def test_the_peak_of_an_lstm_is_the_predicted_one() -> None:
    """Its workspace, which fake tensors do not know, is measured."""
    model = Recurrent(nn.LSTM(128, 128, 2))
    plan = memopt.plan(model, torch.randn(20, 16, 128), strategy="store-all", progress=False)
    assert plan.graph is not None
    assert max(t.size_bytes for t in plan.graph.tensors if t.name.endswith(".3")) > 2**20
    measured = plan.check(model)
    assert measured.peak_ratio == pytest.approx(1.0, abs=0.005)


class Factored(nn.Module):
    """A backward that solves with the pivots of the forward's factorisation."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.slogdet(self.layer(x) + 9 * torch.eye(6))[1]


class Segments(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        lengths = torch.tensor([2, 1, 3])
        return torch.segment_reduce(self.layer(x)[0], "sum", lengths=lengths)


class Folded(nn.Module):
    """Its fold returns a larger storage than its fake kernel says."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.5, 1.5, -1.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = functional.unfold(x * self.scale.view(1, 3, 1, 1), 3)
        return functional.fold(y, x.shape[2:], 3) * 2


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Factored, lambda: torch.linspace(-1, 1, 36).reshape(6, 6).cos()),
        (Segments, lambda: torch.linspace(-1, 1, 36).reshape(6, 6).cos()),
        (Folded, lambda: images()[0]),
    ],
)
def test_kernels_that_need_fitting_values_are_measured_on_them(
    model: Callable[[], nn.Module], inputs: Callable[[], Tensor]
) -> None:
    torch.manual_seed(0)
    module, x = model(), inputs()
    expected = module(x)
    expected.square().sum().backward()
    gradients = [p.grad for p in module.parameters()]
    module.zero_grad()
    plan = memopt.plan(module, x, strategy="rotor", progress=False)
    found = plan.apply(module)(x)
    found.square().sum().backward()
    assert torch.equal(found, expected)
    assert all(torch.equal(p.grad, g) for p, g in zip(module.parameters(), gradients, strict=True))
