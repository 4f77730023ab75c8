"""Custom autograd functions that cannot be traced run as they are, and exactly."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt

_SEEN: list[int] = []


class _IntoViews(torch.autograd.Function):
    """Products written into views, with constants and tensors kept as attributes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, step: int) -> Any:
        ctx.set_materialize_grads(False)
        buffer = x.new_empty(x.shape[0], step)
        total, parts = x.new_zeros(x.shape[0]), []
        for start in range(0, weight.shape[0], step):
            rows = weight[start : start + step]
            tile = buffer[:, : rows.shape[0]]
            torch.mm(x, rows.to(x.dtype).t(), out=tile)
            parts.append(tile.amax(-1))
            total += tile.exp().sum(-1)
        ctx.save_for_backward(x, weight, bias, total)
        ctx.step, ctx.kept = step, {"x": x, "doubled": x * 2}
        largest = torch.stack(parts).amax(0)
        ctx.mark_non_differentiable(largest)
        return total.log(), None, largest

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None, *_: Any) -> Any:
        x, weight, _bias, total = ctx.saved_tensors
        assert gradient is not None
        factor = (gradient / total).unsqueeze(-1)
        scores = factor * (x @ weight.to(x.dtype).t()).exp()
        half = ctx.kept["doubled"] / 2
        wanted = ctx.needs_input_grad[0]
        found = scores @ weight.to(x.dtype) if wanted else None
        return found, (scores.t().float() @ half.float()), None, None


class _OnTheHost(torch.autograd.Function):
    """Numpy behind autograd's back, in the newer form with a context of its own."""

    @staticmethod
    def forward(x: Tensor, power: int) -> Tensor:
        return torch.from_numpy(x.detach().numpy() ** power)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.save_for_backward(inputs[0], output)
        ctx.power = inputs[1]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, _ = ctx.saved_tensors
        return gradient * torch.from_numpy(ctx.power * x.detach().numpy() ** (ctx.power - 1)), None


class _Draws(torch.autograd.Function):
    """Drops what it draws, by kernels that it calls itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.from_numpy((torch.rand(x.shape) > 0.5).numpy()).to(x.dtype)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


class _Selects(torch.autograd.Function):
    """Sizes inside that depend on the data."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, labels: Tensor) -> Tensor:
        rows = torch.from_numpy((labels >= 0).numpy()).nonzero().squeeze(-1)
        ctx.save_for_backward(x, labels)
        return x[rows].square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, labels = ctx.saved_tensors
        return gradient * 2 * x * (labels >= 0).unsqueeze(-1), None


class _Model(nn.Module):
    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 16), nn.Linear(16, 40)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, torch.tanh(self.first(x))).mean()


def _chunked(model: Any, h: Tensor) -> Tensor:
    value, _, largest = _IntoViews.apply(h, model.last.weight, None, 12)
    again, _, _ = _IntoViews.apply(h * 2, model.last.weight, None, step=40)
    return torch.cat([value + largest, again])


def _labelled(_model: Any, h: Tensor) -> Tensor:
    labels = torch.arange(len(h)) % 3 - 1
    return _Selects.apply(h, labels)


CALLS = {
    "views": _chunked,
    "host": lambda _, h: _OnTheHost.apply(h, 3),
    "draws": lambda _, h: _Draws.apply(h),
    "selects": _labelled,
}


def _steps(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(7)
    found = []
    for _ in range(2):
        model.zero_grad()
        loss = run(x)
        loss.backward()
        found += [
            loss.detach(),
            *(p.grad.clone() for p in model.parameters() if p.grad is not None),
        ]
    return found


@pytest.mark.parametrize("budget", [None, "min"])
@pytest.mark.parametrize("kind", CALLS)
def test_functions_that_cannot_be_traced_run_as_they_are(kind: str, budget: str | None) -> None:
    torch.manual_seed(0)
    model, x = _Model(CALLS[kind]), torch.randn(24, 16)
    reference = copy.deepcopy(model)
    plan = memopt.plan(model, (x,), budget=budget, strategy="joint" if budget else "store-all")
    expected = _steps(reference, reference, x)
    got = _steps(plan.apply(model), model, x)
    assert len(got) == len(expected)
    assert all(map(torch.equal, got, expected))


def test_the_budget_is_kept() -> None:
    model, x = _Model(_chunked), torch.randn(512, 16)
    plan = memopt.plan(model, (x,), budget="min", strategy="joint")
    check = memopt.plan(model, (x,), budget=plan.budget, strategy="joint").check(model, (x,))
    assert 0.99 * check.predicted_peak_bytes <= check.measured_peak_bytes <= plan.budget


def test_autocast_is_as_when_it_was_traced() -> None:
    model, x = _Model(_chunked), torch.randn(24, 16)
    reference = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        planned = memopt.plan(model, (x,), budget="min").apply(model)
        one, other = planned(x), reference(x)
    one.backward()
    other.backward()
    assert torch.equal(one, other)
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or torch.equal(p.grad, q.grad)


class _Changing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.number = float(x.detach().numpy().sum())
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.number


def test_an_attribute_that_changes_with_the_data_is_an_error() -> None:
    model, x = _Model(lambda _, h: _Changing.apply(h)), torch.randn(4, 16)
    with pytest.raises(memopt.MemoptError, match=r"_Changing.*attribute 'number'"):
        memopt.plan(model, (x,)).apply(model)(x)


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.mm(x, x.t(), out=x.new_empty(len(x), 2 * len(x))[:, : len(x)])
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


def test_a_function_that_changes_what_it_is_given_is_refused() -> None:
    model, x = _Model(lambda _, h: _InPlace.apply(h * 1)), torch.randn(4, 16)
    with pytest.raises(memopt.CaptureError, match=r"_InPlace.*in place"):
        memopt.plan(model, (x,))


@memopt.opaque
class _Counts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        _SEEN.append(1)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        _SEEN.append(2)
        return gradient * 2


def test_planning_leaves_no_trace_and_steps_leave_theirs() -> None:
    model, x = _Model(lambda _, h: _Counts.apply(h)), torch.randn(4, 16)
    _SEEN.clear()
    planned = memopt.plan(model, (x,), budget="min", strategy="joint").apply(model)
    assert not _SEEN
    for _ in range(3):
        planned(x).backward()
    assert _SEEN == [1, 2] * 3


def _made(factor: float) -> Any:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.from_numpy(x.detach().numpy() * factor)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * factor

    return Scaled


def test_classes_of_one_name_are_told_apart() -> None:
    two, three = _made(2.0), _made(3.0)
    model, x = _Model(lambda _, h: two.apply(h) + three.apply(h)), torch.randn(4, 16)
    reference = copy.deepcopy(model)
    expected = _steps(reference, reference, x)
    plan = memopt.plan(model, (x,))
    assert all(map(torch.equal, _steps(plan.apply(model), model, x), expected))
    # Python's exit aborts in torch where forms of one operator differ in their count of operands.
    assert plan.profiled is not None
    names = [str(node.target) for node in plan.profiled.captured.module.graph.nodes]
    own = [name for name in names if name.startswith("memopt_opaque")]
    assert len(own) == 4
    assert all(name.endswith(".default") for name in own)


def test_the_class_is_as_it_was_after_planning() -> None:
    function = _made(2.0)
    model, x = _Model(lambda _, h: function.apply(h)), torch.randn(4, 16)
    memopt.plan(model, (x,))
    assert "apply" not in vars(function)
    one = x.clone().requires_grad_()
    node = function.apply(one).grad_fn
    assert type(node).__name__ == "ScaledBackward"


@memopt.opaque
def _loss_of_some(logits: Tensor, labels: Tensor, scale: float = 1.0) -> Tensor:
    rows = (labels != -100).nonzero().squeeze(-1)
    return nn.functional.cross_entropy(logits[rows], labels[rows]) * scale


class _WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 10))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return _loss_of_some(self.body(x), labels, scale=0.5)


def test_an_opaque_loss_may_drop_rows() -> None:
    torch.manual_seed(0)
    model, x = _WithLoss(), torch.randn(24, 16)
    reference = copy.deepcopy(model)
    labels = torch.arange(24) % 10
    planned = memopt.plan(model, (x, labels), budget="min", strategy="joint").apply(model)
    for dropped in (0, 5, 11):
        some = labels.clone()
        some[:dropped] = -100
        losses = [one(x, some) for one in (planned, reference)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)


@memopt.opaque
def _repeated_rows(hidden: Tensor, chosen: Tensor) -> Tensor:
    return hidden[chosen > 0].repeat(16, 1).exp().sum() + hidden.sum()


class _WithRepeatedRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        return _repeated_rows(self.body(x), chosen)


def test_the_budget_holds_what_the_examples_values_need() -> None:
    model, inputs = _WithRepeatedRows(), (torch.randn(64, 16), torch.ones(64, dtype=torch.long))
    plan = memopt.plan(model, inputs, budget="min", strategy="rotor")
    check = plan.check(model, inputs)
    assert check.measured_peak_bytes <= check.predicted_peak_bytes
    assert plan.peak_bytes > 16 * 64 * 32 * 4


def test_an_opaque_function_must_be_given_what_it_trains() -> None:
    scale = nn.Parameter(torch.ones(16))
    hidden = memopt.opaque(lambda h: h[h[:, 0].abs() >= 0] * scale)
    model, x = _Model(lambda _, h: hidden(h)), torch.randn(4, 16)
    with pytest.raises(memopt.MemoptError, match="not among its arguments"):
        memopt.plan(model, (x,)).apply(model)(x).backward()


class _Giving(nn.Module):
    """Gives an opaque function its layer, or the layer's parameters."""

    def __init__(self, whole: bool) -> None:
        super().__init__()
        self.layer, self.whole = nn.Linear(4, 4), whole

    def forward(self, x: Tensor) -> Tensor:
        layer = self.layer
        return _called(layer, x) if self.whole else _linear(x, layer.weight, layer.bias)


_called = memopt.opaque(lambda layer, x: layer(x))
_linear = memopt.opaque(lambda x, weight, bias: nn.functional.linear(x, weight, bias))


def test_an_opaque_function_takes_no_module_and_the_remedy_works() -> None:
    with pytest.raises(memopt.CaptureError, match=r"gives a module to an opaque.*parameters"):
        memopt.plan(_Giving(whole=True), torch.ones(3, 4), progress=False)
    model = _Giving(whole=False)
    planned = memopt.plan(model, torch.ones(3, 4), progress=False).apply(model)
    assert torch.equal(planned(torch.ones(3, 4)), model(torch.ones(3, 4)))


def test_opaque_takes_functions() -> None:
    with pytest.raises(ValueError, match="takes its parameters as arguments"):
        memopt.opaque(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="got class"):
        memopt.opaque(int)
    assert memopt.opaque(_Draws) is _Draws


def test_notes_name_what_is_opaque() -> None:
    model, x = _Model(CALLS["host"]), torch.randn(4, 16)
    plan = memopt.plan(model, (x,))
    assert any("_OnTheHost" in note for note in plan.notes)


def test_wrapped_models_train_with_them() -> None:
    torch.manual_seed(0)
    model, x = _Model(_chunked), torch.randn(24, 16)
    reference = copy.deepcopy(model)
    expected = _steps(reference, reference, x)
    memopt.wrap(model, budget="min")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", ".*should not be instantiated")  # by Dynamo
        got = _steps(model, model, x)
    assert all(map(torch.equal, got, expected))
    memopt.unwrap(model)
    gc.collect()
