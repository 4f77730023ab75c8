"""A forward computes with numbers of its activations as eager does, or asks whether one is NaN."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.errors import CaptureError


class _Counting(nn.Module):
    """Computes with a number, and assigns a buffer anew."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last = nn.Linear(8, 4)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        h = self.last(x)
        self.steps = self.steps + 1
        return h * (1 / h.abs().sum().item()) + int(h.argmax().item())


class _Numbered(nn.Module):
    """Computes with numbers between two layers."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.call = nn.Linear(8, 32), nn.Linear(32, 4), call

    def forward(self, x: Tensor) -> Any:
        return self.last(self.call(torch.tanh(self.first(x))))


def _in_place(h: Tensor) -> Tensor:
    h = h.clone()
    h.mul_(h.abs().max().item())
    h[0] = h.sum().item()
    return h


def _kept_apart(h: Tensor) -> Tensor:
    m = h.sum().item()
    return h * (m + 0.1 - 0.1) + h * m * (m - m) + h * (m / 3 * 3)


def _several(h: Tensor) -> Tensor:
    m, n = h.abs().max().item(), h.norm().item()
    return h * min(1.0, 1 / (n + 1e-6)) + math.sqrt(m) - m**2


def _rounded(h: Tensor) -> Tensor:
    half = h.bfloat16()
    whole = torch.arange(32) * h.mean().item()
    return (half / half.abs().max().item()).float() * (h.sum() * h.mean().item()) + whole


def _given(h: Tensor) -> Tensor:
    h = torch.where(h > 0, h.clamp(max=h.std().item()), h.mean().item())
    return functional.elu(h, alpha=h.abs().mean().item()) + int(h[:, 0].argmax())


def _by_a_count(h: Tensor) -> Tensor:
    n = (h > 0).sum().item()
    return h * min(0.9, (1 + n) / n)


def _reversed(h: Tensor) -> Tensor:
    return h.mean().item() - h + h.mean().item() / (h + 2)


def _whole(h: Tensor) -> Tensor:
    m = h.norm().item()
    return h * round(m) + round(m, 2)


def _of_math(h: Tensor) -> Tensor:
    m, at = h.abs().max().item(), int(h[0].argmax())
    scale = math.exp(-m) * math.log(m + 1, 3)
    return h * scale + math.pow(at + 1, 1.5) if 0 < scale < at + 9 else h


def _beside_branch(h: Tensor) -> Tensor:
    m = h.abs().max().item()
    return h / m if 0.5 < m < math.inf else h


def _trained(model: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    torch.manual_seed(0)
    for x in inputs:
        optimizer.zero_grad()
        out = model(x)
        out.square().sum().backward()
        optimizer.step()
        found += [out.detach(), *(one.detach().clone() for one in model.parameters())]
        found.append(torch.get_rng_state())
    return found


def _unread(h: Tensor) -> Tensor:
    """Draws, which it does not read."""
    h / (1 + h.abs().mean().item())
    functional.dropout(h, 0.15)
    return h


def _counted(h: Tensor) -> Tensor:
    """Reads how many a selection has, and how often each is there (as quantizers do)."""
    codes = h.argmax(1)
    used, positive = codes.unique().numel(), len((h > 0).nonzero())
    codes[0] = codes[1]
    share = torch.where(h[0] > 0)[0].shape[0] / torch.unique(codes).size(0)
    return h * (used / positive) + torch.bincount(codes, minlength=32) * share


CALLS = [
    _counted,
    _unread,
    _in_place,
    _kept_apart,
    _several,
    _rounded,
    _given,
    _by_a_count,
    _reversed,
    _whole,
    _of_math,
    _beside_branch,
]


@pytest.mark.parametrize("call", CALLS, ids=lambda one: one.__name__)
def test_numbers_have_the_bits_of_python(call: Callable[[Tensor], Tensor]) -> None:
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    model = _Numbered(call)
    expected = _trained(copy.deepcopy(model), inputs)
    plan = memopt.plan(model, inputs[0], strategy="rotor", budget="min", progress=False)
    planned = plan.apply(model)
    assert all(map(torch.equal, _trained(planned, inputs), expected))
    calls = memopt.running(planned).calls
    assert (calls.planned, calls.original) == (3, 0)


def test_a_number_beyond_the_bins_runs_unplanned() -> None:
    def binned(h: Tensor) -> Tensor:
        return h * torch.bincount((100 * h[:, 0]).long().abs(), minlength=90)[-1]

    inputs = [torch.zeros(4, 8), torch.ones(4, 8), torch.zeros(4, 8)]
    model = _Numbered(binned)
    with torch.no_grad():
        model.first.weight.fill_(0.3)
    expected = _trained(copy.deepcopy(model), inputs)
    planned = memopt.plan(model, inputs[0], progress=False).apply(model)
    with pytest.warns(UserWarning, match=r"is False in this call, and planned as True"):
        assert all(map(torch.equal, _trained(planned, inputs), expected))
    calls = memopt.running(planned).calls
    assert (calls.planned, calls.original) == (2, 1)


def test_numbers_beside_a_buffer_that_is_assigned_anew() -> None:
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    model = _Counting()
    expected = _trained(copy.deepcopy(model), inputs)
    planned = memopt.wrap(model, None, progress=False, improve=False)
    assert all(map(torch.equal, _trained(planned, inputs), expected))
    assert (int(planned.steps), memopt.running(planned).calls.planned) == (3, 3)


class _Logging(nn.Module):
    """Leaves numbers behind, and returns some."""

    def __init__(self, changes: Callable[[_Logging, float], None] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.changes, self.mean = nn.Linear(8, 4), changes, 0.0
        self.log: dict[str, Any] = {"norms": []}

    def forward(self, x: Tensor) -> Any:
        h = self.last(x)
        self.mean = h.mean().item() if self.changes is None else self.mean
        if self.changes is not None:
            self.changes(self, h.abs().max().item())
        self.log["norms"] = [h.norm().item(), {"at": int(h.argmax()), "rows": len(x)}]
        return h.square().mean(), {"loss": h.square().mean().item(), "twice": (self.mean, h)}


def test_numbers_that_a_forward_leaves_behind_or_returns() -> None:
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    twin = _Logging()
    model = memopt.wrap(copy.deepcopy(twin), "min", progress=False, improve=False)
    for x in inputs:
        left = []
        for one in (twin, model):
            loss, returned = one(x)
            loss.backward()
            returned["twice"] = (returned["twice"][0], returned["twice"][1].tolist())
            left.append((loss.item(), returned, one.mean, one.log))
        assert repr(left[0]) == repr(left[1])
    assert memopt.running(model).calls.planned == 3


def _average(model: _Logging, number: float) -> None:
    model.mean = 0.9 * model.mean + 0.1 * number


def _largest(model: _Logging, number: float) -> None:
    if number > model.mean:
        model.mean = number


@pytest.mark.parametrize("changes", [_average, _largest])
def test_numbers_made_of_their_last_value(changes: Callable[[_Logging, float], None]) -> None:
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    twin = _Logging(changes)
    model = memopt.wrap(copy.deepcopy(twin), "min", progress=False, improve=False)
    for x in inputs:
        assert repr(model(x)[1]["twice"][0]) == repr(twin(x)[1]["twice"][0])
        assert repr(model.mean) == repr(twin.mean)


ADDS_TRUTHS = torch.__version__ >= (2, 13)
"""Whether torch adds True to a number that is open; else the count is refused."""


class _Scheduled(_Numbered):
    """Counts its calls, and computes with the count."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__(call)
        self.steps, self.rate, self.second = 0, 1.0, 0

    def forward(self, x: Tensor) -> Any:
        self.steps += 1
        self.second += self.training if ADDS_TRUTHS else int(self.training)
        self.rate = max(self.rate * 0.9, 0.75)
        h = self.call(torch.tanh(self.first(x)) * min(1.0, self.steps / 4)) / self.rate
        return self.last(h * 0.9**self.second if self.steps > 2 else h)


@pytest.mark.parametrize("way", ["plan", "wrap"])
def test_a_forward_computes_with_its_counters(way: str) -> None:
    inputs = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(6)]

    def trained(model: Any, module: Any) -> list[Any]:
        seen: list[Any] = []
        for step, x in enumerate(inputs):
            if step == 3:
                module.eval()
                seen.append(module(x).tolist())
                module.train()
            module(x).square().sum().backward()
            seen.append([p.grad.tolist() for p in model.parameters()])
            seen.append(repr((model.steps, model.rate, model.second)))
            model.zero_grad()
        return seen

    model = _Scheduled(torch.relu)
    expected = trained(model, model)
    model = _Scheduled(torch.relu)
    module: Any = model
    if way == "plan":
        module = memopt.plan(model, inputs[0], budget="min", progress=False, cache=False).apply(
            model
        )
    else:
        memopt.wrap(model, "min", progress=False, improve=False)
    assert (model.steps, model.rate) == (0, 1.0)
    assert trained(model, module) == expected


class _Doubling(torch.autograd.Function):
    """Reads a counter in its backward."""

    @staticmethod
    def forward(context: Any, h: Tensor, model: Any) -> Tensor:
        context.model = model
        return h * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Any:
        return gradient * context.model.steps, None


@pytest.mark.parametrize("by", ["function", "checkpoint"])
def test_a_counter_that_the_backward_may_read_is_refused(by: str) -> None:
    class Late(_Scheduled):
        def forward(self, x: Tensor) -> Any:
            h = super().forward(x)
            if by == "function":
                return _Doubling.apply(h, self)
            return checkpoint(torch.tanh, h, use_reentrant=False)

    with pytest.raises(CaptureError, match=r"model\.steps.*count outside of the forward"):
        memopt.plan(Late(torch.relu), torch.ones(4, 8), progress=False)


LIMITS = {"most": 1e-6}


class _Limited(_Numbered):
    def forward(self, x: Tensor) -> Any:
        h = self.last(torch.tanh(self.first(x)))
        return h * 2 if h.abs().max().item() > LIMITS["most"] else h


def test_a_number_that_is_compared_with_another_global_is_looked_at() -> None:
    model, x = _Limited(torch.sin), torch.ones(4, 8)
    planned = memopt.wrap(copy.deepcopy(model), None, "store-all", progress=False)
    for limit in (1e-6, 9.0, 1e-6):
        LIMITS["most"] = limit
        assert torch.equal(planned(x), model(x))


class _Selecting(_Counting):
    def forward(self, x: Tensor) -> Any:
        self.steps = self.steps + 1
        return self.last(x[x[:, 0] > 0])


def test_a_selection_beside_a_buffer_that_is_assigned_anew_is_refused() -> None:
    x = torch.randn(4, 8)
    with pytest.raises(CaptureError, match=r"selects by a mask.*add_\(1\)"):
        memopt.plan(_Selecting(), x, strategy="store-all", progress=False)


def _is_nan(h: Tensor) -> Tensor:
    m = h.sum().item()
    return h * 3 if m != m else h


def _is_ordered(h: Tensor) -> Tensor:
    m = h.sum().item()
    return h if m <= m else h * 3


def _is_finite(h: Tensor) -> Tensor:
    m = h.sum().item()
    return h if m - m == 0 else h * 3


def _is_infinite(h: Tensor) -> Tensor:
    m = torch.where(h.isnan(), math.inf, h).sum().item()
    return h * 3 if m == math.inf else h


@pytest.mark.parametrize(
    "call", [_is_nan, _is_ordered, _is_finite, _is_infinite], ids=lambda one: one.__name__
)
def test_a_number_compared_with_itself_is_looked_at(call: Callable[[Tensor], Tensor]) -> None:
    model, x = _Numbered(call), torch.ones(4, 8)
    broken = x.clone()
    broken[0, 0] = math.nan
    expected = [model(x), model(broken)]
    planned = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the second goes otherwise
        got = [planned(x), planned(broken)]
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1].nan_to_num(7), expected[1].nan_to_num(7))
    assert memopt.running(planned).calls.original == 1


def test_one_number_decides_two_branches() -> None:
    model, x = _Numbered(lambda h: h * 2 if -1000 < h.sum().item() < 1000 else h), torch.ones(4, 8)
    planned = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    assert torch.equal(planned(x), model(x))
    assert memopt.running(planned).calls.planned == 1


def test_an_error_of_a_number_is_the_forwards() -> None:
    """It comes amid the draws of the forward, as in eager."""
    draws = nn.Dropout(0.5)
    model = _Numbered(lambda h: draws(draws(h) * (1 / h[0, 0].item())))
    planned = memopt.plan(model, torch.ones(4, 8), strategy="store-all", progress=False)
    step = planned.apply(model)
    with torch.no_grad():
        model.first.weight.zero_()
        model.first.bias.zero_()
    left = []
    for call in (model, step):
        torch.manual_seed(0)
        with pytest.raises(ZeroDivisionError, match="float division by zero"):
            call(torch.ones(4, 8))
        left.append(torch.get_rng_state())
    assert torch.equal(*left)


def test_sizes_in_a_list_of_numbers_are_refused() -> None:
    def divided(h: Tensor) -> Tensor:
        positive = (h[0] > 0).sum()
        first, last = h.split(torch.stack([positive, 32 - positive]).tolist(), 1)
        return torch.cat([first * 2, last], 1)

    with pytest.raises(CaptureError, match="a shape depends on the values of a tensor"):
        memopt.plan(_Numbered(divided), torch.randn(4, 8), progress=False)


def test_a_power_that_is_a_number_is_refused_with_its_line() -> None:
    model, x = _Numbered(lambda h: h ** h.abs().max().item()), torch.ones(4, 8)
    if torch.__version__ < (2, 14):
        with pytest.raises(CaptureError, match=r"h \*\* h\.abs\(\)\.max\(\)\.item\(\)"):
            memopt.plan(model, x, strategy="store-all", progress=False)
        return
    # Later derivatives hold the number.
    model.call = lambda h: h.abs() ** h.abs().max().item()
    inputs = [s * torch.randn(4, 8) for s in (1, 30, 0)]
    expected = _trained(copy.deepcopy(model), inputs)
    planned = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    assert all(map(torch.equal, expected, _trained(planned, inputs)))


def test_an_estimate_plans_numbers_whose_values_are_not_there() -> None:
    plan = memopt.plan(
        _Numbered(_several).to("meta"),
        torch.ones(4, 8, device="meta"),
        strategy="store-all",
        mode="estimate",
        device="H100",
        progress=False,
    )
    assert plan.peak_bytes > 0
