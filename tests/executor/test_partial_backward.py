"""Backwards that begin at some of a planned model's outputs: eager's gradients, None included."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import memopt
from memopt.errors import ExecutionError

Model = Callable[[], nn.Module]


class Heads(nn.Module):
    """A trunk with two heads, one of which takes part of what the other one reads."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.trunk(x).tanh()
        first = self.a(hidden)
        return first, self.b(hidden.sigmoid()), first.square().sum()


class Parts(nn.Module):
    """Outputs that are parts of one value: autograd joins their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head = nn.Linear(4, 6), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other = self.trunk(x).chunk(2, -1)
        first, second = self.trunk(x).unbind(0)[:2]
        return self.head(one), other, first, second.exp()


class Recurrent(nn.Module):
    """An operator with several results, whose backward reads all their gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        output, (hidden, cell) = self.lstm(x[:, None])
        return output, hidden, cell


class Conjugated(nn.Module):
    """Complex parts, of which some are read conjugated."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        value = x.to(torch.complex64) @ self.weight
        return value.real, (value.conj() * value).imag, value.abs()


class ChannelsLast(nn.Module):
    """Parts of a value in channels last: of what they miss, autograd makes zeros row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        images = x.sin().repeat(1, 27).view(5, 3, 6, 6).to(memory_format=torch.channels_last)
        one, other = nn.functional.silu(self.norm(self.conv(images))).chunk(2, 1)
        return one, other.exp()


class _Two(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y * 3

    @staticmethod
    def backward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        return x * 2, y * 3


class Custom(nn.Module):
    """A custom function of two results: autograd gives zeros for the gradient that is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.x, self.y = nn.Linear(4, 2), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other = _Two.apply(self.x(x), self.y(x))  # type: ignore[no-untyped-call]
        return one.tanh(), other.tanh()


def gradients(model: nn.Module, used: Iterable[int], held: nn.Module | None = None) -> list[Any]:
    """The gradients of a step whose loss reads some outputs, and the outputs."""
    owner = held or model
    owner.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(5, 4, requires_grad=True)
    outputs = model(x)
    chosen = [outputs[i] for i in used]
    torch.autograd.backward(chosen, [torch.ones_like(value) for value in chosen])
    return [*outputs, x.grad, *(p.grad for p in owner.parameters())]


def assert_same_bits(found: list[Any], expected: list[Any]) -> None:
    """None where there is none, and the same bits elsewhere, the signs of zeros included."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if other is not None:
            real = [torch.view_as_real(v.detach()) if v.is_complex() else v for v in (one, other)]
            assert torch.equal(*(value.isnan() for value in real))
            assert torch.equal(*(value.nan_to_num() for value in real))
            assert torch.equal(*(value.nan_to_num().signbit() for value in real))


def subsets(count: int) -> list[tuple[int, ...]]:
    """All sets of outputs but the empty one."""
    sizes = range(1, count + 1)
    return [s for size in sizes for s in itertools.combinations(range(count), size)]


def planned_and_plain(make: Model, **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """A model, and another one of the same values under a plan."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    model = make()
    applied = {k: options.pop(k) for k in ("interpreted", "checked") if k in options}
    plan = memopt.plan(model, torch.randn(5, 4, requires_grad=True), **options)
    return plain, model, plan.apply(model, **applied)


@pytest.mark.parametrize(
    ("make", "originals"),
    [(Heads, 0), (Parts, 0), (Recurrent, 0), (Conjugated, None), (Custom, 3), (ChannelsLast, 3)],
)
def test_every_set_of_outputs_has_eagers_gradients(make: Model, originals: int | None) -> None:
    plain, model, planned = planned_and_plain(make, strategy="store-all")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        for used in [*subsets(len(plain(torch.randn(5, 4)))), (0,)]:
            found = gradients(planned, used, model)
            assert_same_bits(found, gradients(plain, used))
    assert originals in (None, planned.calls.original)


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "rotor", "budget": "min"},
        {"strategy": "olla", "checked": True},
        {"strategy": "offload-graph", "budget": "min"},
        {"strategy": "store-all", "interpreted": True},
    ],
    ids=lambda options: options["strategy"],
)
def test_under_every_kind_of_plan(options: dict[str, Any]) -> None:
    plain, model, planned = planned_and_plain(Heads, **options)
    for used in subsets(3):
        assert_same_bits(gradients(planned, used, model), gradients(plain, used))
    assert planned.calls.planned == len(subsets(3))


def test_alternating_heads_train_as_in_eager() -> None:
    def trained(wrapped: bool) -> nn.Module:
        torch.manual_seed(0)
        model = Heads()
        if wrapped:
            memopt.wrap(model, progress=False)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
        for step in range(4):
            optimizer.zero_grad()
            model(torch.randn(8, 4))[step % 2].square().mean().backward()
            optimizer.step()
        return model

    pairs = zip(trained(False).parameters(), trained(True).parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_one_backward_after_the_other() -> None:
    plain, model, planned = planned_and_plain(Heads, strategy="rotor", budget="min")
    for one in (plain, planned):
        first, second, _ = one(torch.ones(5, 4, requires_grad=True))
        first.sum().backward(retain_graph=True)
        assert (model if one is planned else plain).b.weight.grad is None
        second.sum().backward()
    for one, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_an_unused_head_poisons_nothing() -> None:
    class Infinite(Heads):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            hidden = self.trunk(x)
            return self.a(hidden), self.b(hidden) * torch.inf

    plain, model, planned = planned_and_plain(Infinite, strategy="store-all")
    found = gradients(planned, (0,), model)
    assert_same_bits(found, gradients(plain, (0,)))
    assert found[-1] is None
    assert model.trunk.weight.grad.isfinite().all()  # type: ignore[union-attr]


def test_what_is_not_known_runs_as_the_original_and_says_so() -> None:
    plain, model, planned = planned_and_plain(Custom, strategy="store-all")
    with pytest.warns(UserWarning, match="begins at some of its outputs only.*loss_fn="):
        found = gradients(planned, (0,), model)
    assert_same_bits(found, gradients(plain, (0,)))
    assert model.y.weight.grad is not None  # Zeros, as in eager.
    assert (planned.calls.planned, planned.calls.original) == (0, 1)
    output = planned(torch.randn(5, 4, requires_grad=True))[0].sum()
    output.backward(retain_graph=True)
    output.backward()  # of the same call
    assert (planned.calls.planned, planned.calls.original) == (0, 2)


def test_what_runs_as_the_original_hands_gradients_on_to_what_computed_its_input() -> None:
    plain, _, planned = planned_and_plain(Custom, strategy="store-all")
    found = []
    for one in (plain, planned):
        torch.manual_seed(1)
        before = torch.nn.Linear(4, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            one(before(torch.randn(5, 4)))[0].sum().backward()
        found.append([before.weight.grad, before.bias.grad])
    assert found[0][0] is not None
    assert_same_bits(found[1], found[0])
    assert planned.calls.original == 1


def test_the_remedy_of_that_warning_works() -> None:
    torch.manual_seed(0)
    model = Custom()
    plan = memopt.plan(model, torch.randn(5, 4), loss_fn=lambda o: o[0].sum(), strategy="store-all")
    planned = plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(torch.randn(5, 4))[0].sum().backward()
    assert planned.calls.planned == 1


class LeavesBehind(Custom):
    """Keeps one of its results, which the loss need not use."""

    detaches = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        one, other = super().forward(x)
        self.last = other.detach() if self.detaches else other
        return (one,)


def test_what_is_left_behind_and_not_used_does_not_keep_a_call_from_running_again() -> None:
    """Each step was an error, also with the loss named, though no gradient came from there."""
    plain, model, planned = planned_and_plain(LeavesBehind, strategy="store-all")
    with pytest.warns(UserWarning, match=r"begins at some.*loss_fn=.*detach what the forward"):
        found = gradients(planned, (0,), model)
    assert_same_bits([*found, model.last], [*gradients(plain, (0,)), plain.last])
    planned(torch.randn(5, 4, requires_grad=True))
    with pytest.raises(ExecutionError, match=r"a gradient comes from model\.last, where it leaves"):
        model.last.sum().backward()


def test_what_is_detached_there_keeps_the_plan() -> None:
    torch.manual_seed(0)
    model = LeavesBehind()
    model.detaches = True
    plan = memopt.plan(model, torch.randn(5, 4), loss_fn=lambda o: o[0].sum(), strategy="store-all")
    planned = plan.apply(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(torch.randn(5, 4))[0].sum().backward()
    assert planned.calls.planned == 1


def test_inside_torch_compile() -> None:
    torch.manual_seed(0)
    model = Heads()
    compiled = torch.compile(model, backend="memopt", options={"progress": False})
    compiled(torch.randn(8, 4))[0].sum().backward()
    assert model.b.weight.grad is None
    assert model.a.weight.grad is not None


@pytest.mark.parametrize("of_its_own", [False, True])
def test_what_an_argument_was_computed_from_gets_its_gradients_once(of_its_own: bool) -> None:
    """Layers before a planned module, and its own parameters where they were read before it."""
    plain, model, planned = planned_and_plain(Custom, strategy="store-all")

    def found(run: nn.Module, owner: Any) -> list[Any]:
        torch.manual_seed(1)
        before, seen = nn.Linear(4, 4), []
        x = before(torch.randn(5, 4))
        x = x + owner.x.weight.sum() if of_its_own else x
        x.register_hook(lambda gradient: seen.append(gradient.sum()))
        run(x)[0].sum().backward()
        return [*(p.grad for p in (*before.parameters(), *owner.parameters())), *seen]

    with pytest.warns(UserWarning, match="begins at some of its outputs only"):
        planned_gradients = found(planned, model)
    assert_same_bits(planned_gradients, found(plain, plain))
    assert planned_gradients[0] is not None


def test_a_second_derivative_through_an_argument_made_of_the_parameters_is_refused() -> None:
    _, model, planned = planned_and_plain(Heads, strategy="store-all")
    x = torch.randn(5, 4) * model.trunk.weight.sum()
    with pytest.raises(ExecutionError, match="computed from other parameters"):
        torch.autograd.grad(planned(x)[0].sum(), x, create_graph=True)


def test_hooks_of_outputs_that_the_loss_does_not_use_are_not_called() -> None:
    def told(wrap: Callable[[nn.Module], Any]) -> list[tuple[int, torch.Tensor]]:
        torch.manual_seed(0)
        model, found = Heads(), list[tuple[int, torch.Tensor]]()
        wrap(model)
        for used in ((0, 1), (0, 1), (0,), (1,), (0, 1)):
            output = model(torch.randn(3, 4))[:2]
            for place, one in enumerate(output):
                one.register_hook(lambda gradient, place=place: found.append((place, gradient)))
            loss: Any = sum(output[place].square().sum() for place in used)
            loss.backward()
        return found

    expected = told(lambda model: model)
    got = told(lambda model: memopt.wrap(model, "min", cache=False, progress=False))
    assert [place for place, _ in got] == [place for place, _ in expected]
    for (_, one), (_, other) in zip(got, expected, strict=True):
        assert torch.equal(one, other)
