"""A value that a call uses more than once, and the same backward elsewhere, too: said once."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memopt


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.tanh(x @ self.weight) @ self.weight)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight)


class Hooked(Tied):
    """Its weight's gradient goes through a hook of the user's that hands on another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.weight.register_hook(lambda gradient: gradient * 0.5)


def gradient(make: type[nn.Module], together: bool, plan: bool) -> torch.Tensor:
    """The gradient of a loss of two calls, or of one call with both inputs."""
    torch.manual_seed(0)
    model = make()
    if plan:
        memopt.wrap(model, progress=False)
    a, b = torch.randn(4, 16), torch.randn(4, 16)
    found, other = model(torch.cat([a, b])).chunk(2) if together else (model(a), model(b))
    nn.functional.cosine_similarity(found, other).mean().backward()
    made = model.weight.grad
    assert isinstance(made, torch.Tensor)
    return made


@pytest.mark.parametrize("make", [Tied, Hooked])
def test_last_bits_that_may_differ_are_said(make: type[nn.Module]) -> None:
    with pytest.warns(UserWarning, match="weight is used more than once.*torch.cat"):
        found = gradient(make, together=False, plan=True)
    torch.testing.assert_close(found, gradient(make, together=False, plan=False))


@pytest.mark.parametrize(("make", "together"), [(Tied, True), (Hooked, True), (Plain, False)])
def test_one_call_and_one_use_are_exact_and_silent(make: type[nn.Module], together: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = gradient(make, together, plan=True)
    assert torch.equal(found, gradient(make, together, plan=False))


def other_uses(use: Callable[[Any, torch.Tensor], torch.Tensor], plan: bool) -> torch.Tensor:
    """The gradient of a loss that also uses the weight outside of the model."""
    torch.manual_seed(0)
    model = Tied()
    if plan:
        memopt.wrap(model, progress=False)
    use(model, torch.randn(4, 16)).backward()
    assert isinstance(model.weight.grad, torch.Tensor)
    return model.weight.grad


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: model(x).mean() + 0.1 * model.weight.square().sum(),
        lambda model, x: (model(x) @ model.weight.T).tanh().mean(),  # a head tied to the model
    ],
)
def test_uses_behind_the_model_are_said(use: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    with pytest.warns(UserWarning, match="weight is used more than once.*outside of the model"):
        found = other_uses(use, plan=True)
    torch.testing.assert_close(found, other_uses(use, plan=False))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.query(x) @ self.key(x).T, -1)
        return weights @ self.value(x)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 8), Attention()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return x + self.attention(x)


def test_an_input_of_a_planned_part_is_named_and_the_module_around_is_exact() -> None:
    def gradient(part: str | None) -> torch.Tensor:
        torch.manual_seed(0)
        model = Residual()
        if part is not None:
            memopt.wrap(model.get_submodule(part), progress=False)
        model(torch.randn(5, 8)).mean().backward()
        assert isinstance(model.first.weight.grad, torch.Tensor)
        return model.first.weight.grad

    with pytest.warns(UserWarning, match="argument 0 is used more.*around the module that holds"):
        found = gradient("attention")
    torch.testing.assert_close(found, gradient(None))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*more than once")
        assert torch.equal(gradient(""), gradient(None))


def test_uses_before_the_model_are_exact_and_silent() -> None:
    def use(model: Any, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = model((x @ model.weight.T).tanh()).mean()
        return made

    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*more than once")
        found = other_uses(use, plan=True)
    assert torch.equal(found, other_uses(use, plan=False))


def test_hooks_of_the_user_that_change_a_gradient_are_not_taken_for_uses() -> None:
    model = Tied()
    memopt.wrap(model, progress=False)
    model.weight.register_hook(lambda gradient: gradient * 2)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*more than once")
        model(torch.randn(4, 16)).sum().backward()


def test_a_backward_that_fails_leaves_no_hook() -> None:
    def fail(_gradient: torch.Tensor) -> None:
        raise RuntimeError("as asked")

    model = Tied()
    memopt.wrap(model, progress=False)
    x = torch.randn(4, 16) @ model.weight
    x.register_hook(fail)
    with pytest.raises(RuntimeError, match="as asked"):
        model(x).sum().backward()
    assert not model.weight._backward_hooks


def test_backwards_of_their_own_are_silent() -> None:
    model = Tied()
    memopt.wrap(model, progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for _ in range(2):
            model(torch.randn(4, 16)).sum().backward()


class _Checkpointed(nn.Module):
    """A layer used in two reentrant checkpoints, or outside of one."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.layer, self.twice = nn.Linear(64, 64), twice

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = checkpoint(self._block, x, use_reentrant=True)
        if not self.twice:
            return h * self.layer.bias.sum()
        return checkpoint(self._block, h, use_reentrant=True)  # type: ignore[no-any-return]

    def _block(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).tanh()  # type: ignore[no-any-return]


@pytest.mark.parametrize("twice", [False, True])
def test_parts_that_reentrant_checkpoints_add_to_a_gradient_are_said(twice: bool) -> None:
    torch.manual_seed(0)
    model, x = _Checkpointed(twice), torch.randn(16, 64, requires_grad=True)
    plain = copy.deepcopy(model)
    memopt.wrap(model, "min", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for one in (plain, model):
            one(x).sum().backward()
    assert all(map(torch.equal, *([p.grad for p in m.parameters()] for m in (plain, model))))
    with pytest.warns(UserWarning, match="last bits can differ.*use_reentrant=False"):
        model(x).sum().backward()
