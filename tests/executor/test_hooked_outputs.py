"""Gradients of outputs from which other outputs are computed: hooks get them whole, `retain_grad()`
keeps them whole, as in eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt.executor.hooked_outputs import INNER


class Features(nn.Module):
    """Returns a prediction and the features that it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def features(self, x: Tensor) -> Tensor:
        return F.dropout(self.first(x).tanh(), 0.25)

    def forward(self, x: Tensor, zeros: Tensor | None = None) -> Any:
        h = self.features(x)
        h = h if zeros is None else h + zeros
        return self.last(h), h


class Flattened(Features):
    def forward(self, x: Tensor, zeros: Tensor | None = None) -> Any:
        h = self.features(x)
        return h.flatten(), h


class Repeated(Features):
    """Returns its features at two places."""

    def forward(self, x: Tensor, zeros: Tensor | None = None) -> Any:
        h = self.features(x)
        return self.last(h), h, h


class Kept(Features):
    """Leaves its features in an attribute."""

    kept: Tensor

    def forward(self, x: Tensor, zeros: Tensor | None = None) -> Any:
        self.kept = self.features(x)
        return self.last(self.kept), None


def both_ways(kind: type[Features] = Features) -> tuple[Features, Any]:
    """A model as it is, and a copy of it planned."""
    torch.manual_seed(0)
    model = kind()
    return model, memopt.wrap(copy.deepcopy(model), None, progress=False, improve=False)


def retained(h: Tensor) -> None:
    h.retain_grad()


def hooked(h: Tensor) -> None:
    h.register_hook(lambda gradient: gradient * 2)


def both(h: Tensor) -> None:
    hooked(h)
    retained(h)


def step(model: nn.Module, number: int, ask: Callable[[Tensor], None] | None) -> list[Any]:
    """What a step leaves, whose loss does not use the features."""
    torch.manual_seed(number)
    predicted, h, *_ = model(torch.randn(4, 8))
    h = model.kept if h is None else h
    if ask is not None:
        ask(h)
    predicted.square().sum().backward()
    found = [predicted.detach(), h.grad if h.retains_grad else None, torch.get_rng_state()]
    for parameter in model.parameters():
        found.append(parameter.grad)
        parameter.grad = None
    return found


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        assert one is None or torch.equal(one, other)


@pytest.mark.parametrize("kind", [Features, Flattened, Repeated])
@pytest.mark.parametrize("ask", [retained, hooked, both])
def test_a_features_gradient_is_whole(kind: type[Features], ask: Callable[[Tensor], None]) -> None:
    model, planned = both_ways(kind)
    step(planned, 9, None)
    step(model, 9, None)
    with pytest.warns(UserWarning, match=INNER[:60]):
        found = [step(planned, number, ask) for number in range(3)]
    for number, one in enumerate(found):
        assert_equal(one, step(model, number, ask))
    assert_equal(step(planned, 4, None), step(model, 4, None))
    calls = memopt.running(planned).calls
    assert (calls.planned, calls.original) == (2, 3)


def test_a_gradient_of_what_the_forward_leaves_is_refused() -> None:
    _, planned = both_ways(Kept)
    step(planned, 0, None)
    for ask in (retained, hooked):
        with pytest.raises(memopt.ExecutionError, match="leaves it in an attribute"):
            step(planned, 1, ask)


def test_a_hook_that_has_got_a_part_is_refused_with_a_remedy() -> None:
    model, planned = both_ways()
    x = torch.randn(4, 8)

    def trained(one: nn.Module, zeros: Tensor | None) -> list[Tensor]:
        torch.manual_seed(1)
        predicted, h = one(x, zeros)
        hooked(h if zeros is None else zeros)
        (predicted.square().sum() + h.sum()).backward()
        return [parameter.grad for parameter in one.parameters() if parameter.grad is not None]

    with pytest.raises(memopt.ExecutionError, match=r"output 1 was called .*h \+ zeros"):
        trained(planned, None)
    model.zero_grad()
    planned.zero_grad()
    zeros = [torch.zeros(4, 8, requires_grad=True) for _ in range(2)]
    assert_equal(list(trained(planned, zeros[0])), list(trained(model, zeros[1])))
    assert zeros[0].grad is not None
    assert_equal([zeros[0].grad], [zeros[1].grad])


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_of_several_is_refused_with_a_remedy(mode: Any) -> None:
    model, planned = both_ways()
    x = torch.randn(4, 8)

    def heard(one: nn.Module, zeros: Tensor | None) -> list[Any]:
        torch.manual_seed(1)
        found: list[Any] = []
        predicted, h = one(x, zeros)
        hooked_ones = h if zeros is None else zeros, predicted
        torch.autograd.graph.register_multi_grad_hook(hooked_ones, found.append, mode=mode)
        predicted.square().sum().backward()
        return list(found[0]) if mode == "all" else found

    with pytest.raises(memopt.ExecutionError, match=r"of several tensors .*h \+ zeros"):
        heard(planned, None)
    zeros = [torch.zeros(4, 8, requires_grad=True) for _ in range(2)]
    assert_equal(heard(planned, zeros[0]), heard(model, zeros[1]))


def test_hooks_of_trainers_are_left_where_they_are() -> None:
    planned = memopt.wrap(Features(), None, progress=False, improve=False)

    def prepare(gradient: Tensor) -> None:
        heard.append(gradient)

    prepare.__module__ = "lightning.fabric.wrappers"
    heard: list[Tensor] = []
    for _ in range(2):
        predicted, h = planned(torch.randn(4, 8))
        for one in (predicted, h):
            one.register_hook(prepare)
        (predicted.sum() + h.sum()).backward()
    assert len(heard) == 4
    assert memopt.running(planned).calls.planned == 2


class Decoder(nn.Module):
    """Uses features several times, so that the parts of their gradient are added up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, predicted: Tensor, h: Tensor) -> Tensor:
        return predicted * self.layer(h) * self.layer(h.tanh())


@pytest.mark.parametrize("autocast", [False, True])
def test_memopts_own_hooks_are_no_users(autocast: bool) -> None:
    """Another planned model that is called with the features looks how their gradient arrives."""
    model, planned = both_ways()
    torch.manual_seed(3)
    decoder = Decoder()
    behind = memopt.wrap(copy.deepcopy(decoder), None, progress=False, improve=False)

    def trained(first: nn.Module, last: nn.Module) -> list[Any]:
        torch.manual_seed(1)
        for _ in range(3):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = last(*first(torch.randn(4, 8))).float().square().sum()
            loss.backward()
        return [one.grad for part in (first, last) for one in part.parameters()]

    assert_equal(trained(planned, behind), trained(model, decoder))
    assert [memopt.running(one).calls.planned for one in (planned, behind)] == [3, 3]
