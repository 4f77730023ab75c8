"""Planning and measuring change nothing that the user owns, whatever a forward or a loss does."""

from __future__ import annotations

import copy
import random
import types
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from memopt.step.inputs import Call
from memopt.user_code.restored_state import state_restored


class Changing(nn.Module):
    """Updates a parameter, buffers and an input in its forward, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(6, 8, max_norm=0.5)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 3)
        self.held = torch.ones(8)
        self.rows.weight.grad = torch.ones(6, 8)

    def forward(self, index: Tensor, x: Tensor) -> Tensor:
        x.mul_(1.5)
        self.held.add_(1)
        y: Tensor = self.out(functional.dropout(self.norm(self.rows(index) + x), 0.3))
        return y


class Centred(nn.Module):
    """A loss that keeps a running centre, a count, a list, and has a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.scale.grad = torch.ones(3)
        self.register_buffer("centre", torch.zeros(3))
        self.seen: list[float] = []
        self.calls = 0

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        self.centre = 0.9 * self.centre + 0.1 * output.detach().mean(0)
        self.calls += 1
        self.seen.append(random.random() + float(np.random.random()))
        target.add_(1)
        return ((output - self.centre) * self.scale - target).square().mean()


def _state(*owned: Any) -> list[Any]:
    """Everything that must stay: values and identities, gradients, random states, attributes."""
    found: list[Any] = [torch.get_rng_state(), random.getstate(), str(np.random.get_state())]
    found.append(torch.get_default_dtype())
    for one in owned:
        if isinstance(one, Tensor):
            found += [id(one), one.detach().clone(), one.requires_grad, copy.deepcopy(one.grad)]
            found.append(one.data_ptr())
        elif isinstance(one, nn.Module):
            for module in one.modules():
                found.append({k: v for k, v in vars(module).items() if not k.startswith("_")})
                found[-1] = repr(found[-1])
                found.append(module.training)
            tensors = [*one.parameters(), *one.buffers()]
            found += [value for tensor in tensors for value in _state(tensor)[4:]]
    return found


def _same(before: list[Any], after: list[Any]) -> bool:
    return len(before) == len(after) and all(
        torch.equal(a, b) if isinstance(a, Tensor) else a == b
        for a, b in zip(before, after, strict=True)
    )


def _call() -> tuple[Tensor, Tensor]:
    return torch.randint(0, 6, (16,)), torch.randn(16, 8)


def _profile(model: nn.Module, call: Any, loss: Any, target: Tensor) -> None:
    memopt.plan(model, call, strategy="store-all", loss_fn=loss, targets=target, progress=False)


def _check(model: nn.Module, call: Any, loss: Any, target: Tensor) -> None:
    plan = memopt.plan(model, call, strategy="rotor", budget="min", progress=False)
    plan.check(model, call, loss_fn=loss, targets=target)


def _compare(model: nn.Module, call: Any, loss: Any, target: Tensor) -> None:
    memopt.compare(model, call, strategies=["rotor"], budgets=[0.9], progress=False)


@pytest.mark.parametrize("run", [_profile, _check, _compare])
def test_nothing_changes(run: Callable[..., None]) -> None:
    torch.manual_seed(0)
    model, loss = Changing(), Centred()
    call, target = _call(), torch.zeros(16, 3)
    owned = (model, loss, *call, target, model.held)
    before = _state(*owned)
    run(model, call, loss, target)
    assert _same(before, _state(*owned))


class Answering(types.ModuleType):
    """A module that has every attribute, as torch.classes does."""

    def __getattr__(self, name: str) -> object:
        return object()


class Slotted:
    __slots__ = ("value",)


class Hiding(Slotted):
    """Computes what its base keeps in a slot, as mpmath's constants do."""

    @property
    def value(self) -> object:  # type: ignore[override]
        return object()


class Frozen(dict[str, int]):
    """A dict that keeps its hash in a slot and refuses to be changed, as beartype's do."""

    __slots__ = ("_hash",)

    def __hash__(self) -> int:  # type: ignore[override]
        self._hash = len(self)
        return self._hash

    def __setitem__(self, key: str, value: int) -> None:
        raise TypeError("frozen")


class Refusing:
    """Refuses every name that it does not have, as pydantic's stand-ins for validators do."""

    __slots__ = ("value",)

    def __getattr__(self, name: str) -> object:
        raise LookupError(name)


ANSWERING, HIDING, FROZEN = Answering("answering"), Hiding(), Frozen(one=1)
REFUSING, GONE = Refusing(), weakref.proxy(Hiding())


def test_globals_of_a_loss_that_answer_any_name_or_hide_a_slot() -> None:
    def loss(output: Tensor) -> Tensor:
        if output.dim() == 9:
            print(ANSWERING.any, HIDING.value)
        return output.square().mean()

    with state_restored(nn.Linear(2, 2), Call((torch.ones(2),), {}), loss):
        assert loss(torch.ones(2)) == 1


def test_globals_of_a_loss_that_refuse_every_name() -> None:
    def loss(output: Tensor) -> Tensor:
        if output.dim() == 9:
            print(REFUSING.any, GONE.any)
        REFUSING.value = 3
        return output.square().mean()

    with state_restored(nn.Linear(2, 2), Call((torch.ones(2),), {}), loss):
        assert loss(torch.ones(2)) == 1
    with pytest.raises(LookupError):
        _ = REFUSING.value


def test_a_dict_with_slots() -> None:
    def loss(output: Tensor) -> Tensor:
        return output.square().mean() * hash(FROZEN) + getattr(FROZEN, "_hash", 0)

    with state_restored(nn.Linear(2, 2), Call((torch.ones(2),), {}), loss):
        assert loss(torch.ones(2)) == 2
    assert not hasattr(FROZEN, "_hash")
    assert FROZEN == {"one": 1}


def test_a_whole_step() -> None:
    torch.manual_seed(0)
    model = Changing()
    call, target = _call(), torch.randint(0, 3, (16,))
    optimizer = torch.optim.AdamW(model.parameters())
    before = _state(model, *call, target, model.held)
    memopt.plan(
        model, call, strategy="olla", loss_fn=functional.cross_entropy, targets=target,
        optimizer=optimizer, progress=False,
    )  # fmt: skip
    assert _same(before, _state(model, *call, target, model.held))
    assert not optimizer.state


class Interrupted(Centred):
    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        super().forward(output, target)
        torch.set_default_dtype(torch.float64)
        raise KeyboardInterrupt


def test_interrupted() -> None:
    model, loss = Changing(), Interrupted()
    call, target = _call(), torch.zeros(16, 3)
    before = _state(model, loss, *call, target, model.held)
    with pytest.raises(KeyboardInterrupt):
        _profile(model, call, loss, target)
    assert _same(before, _state(model, loss, *call, target, model.held))


def test_hooks_that_collect() -> None:
    """A forward hook that appends to a list has appended nothing while planning ran it."""
    seen: list[Tensor] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    x = torch.randn(3, 4)
    planned = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    assert seen == []
    output = planned(x)
    assert len(seen) == 1
    assert torch.equal(seen[0], output)


_COLLECTED: ContextVar[list[Tensor] | None] = ContextVar("collected", default=None)


class Collecting(nn.Linear):
    """Appends to a list that a caller keeps in a context variable, as transformers' hooks do."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        collected = _COLLECTED.get()
        if collected is not None:
            collected.append(y)
        return y


def test_what_a_context_variable_holds() -> None:
    """A part's trial runs left hidden states in the list, and its model took the wrong one."""
    model, collected = Collecting(8, 3), list[Tensor]()
    token = _COLLECTED.set(collected)
    with state_restored(model, Call((torch.ones(2, 8),), {})):
        model(torch.ones(2, 8))
    _COLLECTED.reset(token)
    assert collected == []


class Refused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.count, self.last = 0, None
        self.rates = (0.1 * number for number in range(100))
        self.register_buffer("old", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.a(x)
        self.count += 1
        self.last = y  # type: ignore[assignment]
        self.old = y.detach().mean(0)
        return y * next(self.rates)


def test_a_refused_model() -> None:
    model = Refused()
    old = model.old
    with pytest.raises(memopt.CaptureError, match="the next value of a generator"):
        memopt.plan(model, torch.randn(3, 4), strategy="store-all", progress=False)
    assert (model.count, model.last) == (0, None)
    assert model.old is old


def test_lazy_modules_are_refused_as_they_are() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.Tanh(), nn.Linear(4, 2))
    with pytest.raises(memopt.CaptureError, match="LazyLinear '0'"):
        memopt.plan(model, torch.randn(3, 5), strategy="store-all", progress=False)
    assert isinstance(model[0], nn.LazyLinear)
    assert isinstance(model[0].weight, nn.UninitializedParameter)


def test_an_interruption_while_values_are_put_back_leaves_none_out() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    before = copy.deepcopy(model.state_dict())
    random_state = torch.get_rng_state()

    def interrupt() -> None:
        with state_restored(model, Call((), {})) as kept:
            for tensor in (*model.parameters(), *model.buffers()):
                kept.keep(tensor)
                tensor.detach().zero_()
            torch.rand(3)
            real, calls = kept.restore, []

            def interrupted() -> None:
                calls.append(1)
                if len(calls) == 1:
                    raise KeyboardInterrupt
                real()

            kept.restore = interrupted  # type: ignore[method-assign]

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
