"""What eager reads in the backward is looked at again before a planned one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.errors import ExecutionError

FACTOR = 1.0
SETTINGS = {"factor": 1.0}


class Scale(torch.autograd.Function):
    """The identity, whose backward multiplies by what its owner says by then."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, owner: Net) -> torch.Tensor:
        ctx.owner = owner
        ctx.kept = owner.kept
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        owner = ctx.owner
        factors = owner.scale * owner.held() * owner.config["late"] * FACTOR
        return gradient * factors * SETTINGS["factor"] * owner.weights * ctx.kept, None


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale, self.kept = nn.Linear(4, 4), 1.0, 1.0
        self.inner, self.early = {"held": 1.0}, 1.0
        self.config = {"late": 1.0, "early": 1.0}
        self.weights = torch.ones(4)

    def held(self) -> float:
        return self.inner["held"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value = self.linear(x) * self.early * self.config["early"]
        scaled: torch.Tensor = Scale.apply(value, self)  # type: ignore[no-untyped-call]
        return scaled


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = self.linear(x)
        value.register_hook(lambda gradient: gradient * self.scale)  # type: ignore[no-untyped-call]
        return value.tanh()


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(4, 4), 1.0

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.scale).tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        value: torch.Tensor = checkpoint(self.part, x, use_reentrant=False)
        return value


def changed(make: Callable[[], nn.Module], change: Callable[[Any], None], plan: bool) -> Any:
    """The gradient of a step between whose forward and backward something changes."""
    torch.manual_seed(0)
    model = make()
    if plan:
        memopt.wrap(model, progress=False)
    output = model(torch.randn(2, 4))
    with pytest.MonkeyPatch.context() as patch:
        model.patch = patch
        change(model)
        output.sum().backward()
    return model.linear.weight.grad  # type: ignore[union-attr]


LATE: dict[str, Callable[[Any], Any]] = {
    "model.scale: planned 1.0, got 8.0": lambda m: setattr(m, "scale", 8.0),
    "model.inner['held']: planned 1.0, got 8.0": lambda m: m.inner.update(held=8.0),
    "model.config['late']: planned 1.0, got 8.0": lambda m: m.config.update(late=8.0),
    "FACTOR: planned 1.0, got 8.0": lambda m: m.patch.setitem(globals(), "FACTOR", 8.0),
    "SETTINGS['factor']: planned 1.0, got 8.0": lambda m: m.patch.setitem(SETTINGS, "factor", 8.0),
    "model.weights is another tensor": lambda m: setattr(m, "weights", torch.full((4,), 8.0)),
}


@pytest.mark.parametrize("message", LATE)
def test_a_value_that_changes_before_the_backward_is_named(message: str) -> None:
    with pytest.raises(ExecutionError) as caught:
        changed(Net, LATE[message], True)
    assert message in str(caught.value)
    assert "memopt.unwrap(model)" in str(caught.value)


@pytest.mark.parametrize("make", [Hooked, Recomputed])
def test_so_is_one_that_a_hook_or_a_checkpoint_reads(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(ExecutionError, match=r"model.scale: planned 1.0, got 8.0"):
        changed(make, lambda m: setattr(m, "scale", 8.0), True)


EARLY: dict[str, Callable[[Any], Any]] = {
    "kept in the context": lambda m: setattr(m, "kept", 8.0),
    "read in the forward": lambda m: setattr(m, "early", 8.0),
    "another key": lambda m: m.config.update(early=8.0),
    "mode": lambda m: m.eval(),
    "frozen": lambda m: m.requires_grad_(False),
    "hook": lambda m: m.linear.register_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", EARLY)
def test_what_eager_has_read_in_the_forward_may_change(name: str) -> None:
    found, expected = (changed(Net, EARLY[name], plan) for plan in (True, False))
    assert found is expected is None or torch.equal(found, expected)


def test_the_remedies_work() -> None:
    torch.manual_seed(0)
    model = Net()
    memopt.wrap(model, progress=False)
    x = torch.randn(2, 4)
    model(x)
    model.scale = 8.0  # before the forward
    model(x).sum().backward()
    found, model.linear.weight.grad = model.linear.weight.grad, None
    memopt.unwrap(model)
    model.scale = 1.0
    output = model(x)
    model.scale = 8.0
    output.sum().backward()
    assert torch.equal(found, model.linear.weight.grad)  # type: ignore[arg-type]
