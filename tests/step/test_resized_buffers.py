"""Buffers that get their size in the first forward, as those of observers of ranges do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import (
    FusedMovingAvgObsFakeQuantize,
    MovingAveragePerChannelMinMaxObserver,
    PerChannelMinMaxObserver,
    get_default_qat_qconfig,
    prepare_qat,
)

import memopt
from memopt.step.inputs import Call
from memopt.user_code.restored_state import forward_restored
from tests.whole_steps.test_train_step import assert_same


class Observed(nn.Module):
    """Keeps the least outputs, and counts its calls before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 8)
        self.register_buffer("early", torch.tensor(0))
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("late", torch.tensor(0))
        self.register_buffer("shrunk", torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        self.early.add_(1)
        y: Tensor = self.linear(x)
        low = y.detach().amin(0)
        if self.low.shape != low.shape:
            self.low.resize_(low.shape).copy_(low)
            self.shrunk.set_(torch.zeros(2))
        self.low.copy_(torch.minimum(self.low, low))
        self.late.add_(1)
        return y - self.low


def observed() -> nn.Module:
    torch.manual_seed(0)
    return Observed()


X = torch.linspace(-1, 1, 12).view(3, 4)


def test_a_forward_is_taken_back_with_the_sizes_of_buffers() -> None:
    model = observed()
    before = copy.deepcopy(model.state_dict())
    storages = [buffer.untyped_storage().nbytes() for buffer in model.buffers()]
    with forward_restored(model, Call((X,), {})):
        assert model.low.shape == (8,)
    assert_same(model.state_dict(), before)
    assert [buffer.untyped_storage().nbytes() for buffer in model.buffers()] == storages


def test_refused_until_the_model_has_been_called_once() -> None:
    model = observed()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        memopt.CaptureError, match=r"the buffer 'low' its size.*call the model once"
    ):
        memopt.plan(model, X, budget="min", progress=False)
    assert_same(model.state_dict(), before)
    model(X)
    other = copy.deepcopy(model)
    planned = memopt.plan(model, X, budget="min", progress=False).apply(model)
    for x in (X, 2 * X):
        assert torch.equal(planned(x), other(x))
        assert_same(model.state_dict(), other.state_dict())


def test_a_wrapped_model_stays_as_it_was_at_every_failing_call() -> None:
    model = observed()
    before = copy.deepcopy(model.state_dict())
    memopt.wrap(model, budget="min", progress=False)
    for _ in range(2):
        with pytest.raises(memopt.CaptureError, match="planned or wrapped"):
            model(X)
        assert_same(model.state_dict(), before)


def qat() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    model.qconfig = get_default_qat_qconfig("x86")  # type: ignore[assignment]
    return prepare_qat(model)


def fused() -> nn.Module:
    return FusedMovingAvgObsFakeQuantize(
        observer=MovingAveragePerChannelMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_channel_symmetric,
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*reduce_range.*")
@pytest.mark.parametrize("make", [qat, lambda: nn.Sequential(nn.Linear(4, 6), fused())])
def test_fake_quantizers_are_planned_once_their_buffers_have_a_size(make) -> None:
    """They were refused. The first call sizes the buffers, and runs as it is."""
    model = make()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(memopt.CaptureError, match="has no ranges before"):
        memopt.plan(model, X, budget="min", progress=False)
    assert_same(model.state_dict(), before)
    other = copy.deepcopy(model)
    memopt.wrap(model, "min", progress=False)
    with pytest.warns(UserWarning, match="has no ranges before"):
        model(X).sum().backward()
    other(X).sum().backward()
    for x in (2 * X, -X, 3 * X):
        model(x).square().sum().backward()
        other(x).square().sum().backward()
        assert_same(model.state_dict(), other.state_dict())
        assert_same([p.grad for p in model.parameters()], [p.grad for p in other.parameters()])
    model.apply(torch.ao.quantization.disable_observer)
    other.apply(torch.ao.quantization.disable_observer)
    assert_same(model(4 * X), other(4 * X))
    assert_same(model.state_dict(), other.state_dict())
    assert (model.calls.planned, model.calls.original) == (4, 1)


def test_an_observer_that_sizes_its_buffers_in_every_forward_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 6), PerChannelMinMaxObserver())
    model(X)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(memopt.CaptureError, match=r"torch\.ao's.*take the fused ones"):
        memopt.plan(model, X, budget="min", progress=False)
    assert_same(model.state_dict(), before)


class Quantized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        scale = weight.detach().abs().amax(1) / 127
        zero = torch.zeros(6, dtype=torch.int32)
        whole = torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -128, 127)
        return nn.functional.linear(x, whole, self.linear.bias)


def test_quantizing_in_the_forward_is_planned() -> None:
    torch.manual_seed(0)
    model = Quantized()
    planned = memopt.plan(model, X, budget="min", progress=False).apply(model)
    expected = torch.autograd.grad(model(X).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(planned(X).square().sum(), list(model.parameters()))
    assert_same(found, expected)
