"""Forwards that put other tensors in the places of a module's parameters, and put those back."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

import memopt
from memopt.errors import CaptureError


def _net(norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), norm(4), nn.ReLU(), nn.Linear(4, 1))


class Scaled(nn.Module):
    """All weights of a network are scaled by one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        weights = {name: p * self.scale for name, p in self.net.named_parameters()}
        result: Tensor = functional_call(self.net, weights, (x,))
        return result


class Adapted(Scaled):
    """One inner step of gradient descent (MAML)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = _net(nn.LayerNorm)

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())

        def inner(weights: dict[str, Tensor]) -> Tensor:
            return functional_call(self.net, weights, (x,)).square().mean()  # type: ignore[no-any-return]

        steps = grad(inner)(weights)
        moved = {name: p - 0.1 * self.scale * steps[name] for name, p in weights.items()}
        result: Tensor = functional_call(self.net, moved, (x,))
        return result


class Hidden(nn.Module):
    """The network whose weights are given is no sub-module."""

    def __init__(self) -> None:
        super().__init__()
        self.base = [_net()]
        self.weights = nn.ParameterList(p.detach().clone() for p in self.base[0].parameters())

    def forward(self, x: Tensor) -> Tensor:
        (net,) = self.base
        names = [name for name, _ in net.named_parameters()]
        result: Tensor = functional_call(net, dict(zip(names, self.weights, strict=True)), (x,))
        return result


class Swaps(Scaled):
    """Another module stands in the place of one for a moment."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.net[3]
        self.net[3] = self.net[2]
        y = self.net(x)
        self.net[3] = kept
        result: Tensor = self.net(x) + y.sum() * self.scale
        return result


class Exchanges(Scaled):
    """Two layers change places at every call."""

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.net[0]._parameters, self.net[1]._parameters
        first["bias"], last["bias"] = last["bias"], first["bias"]
        result: Tensor = self.net(x) * self.scale
        return result


@pytest.mark.parametrize("make", [Scaled, Adapted, Hidden, Swaps])
def test_a_planned_step_is_eagers(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make()
    twin = copy.deepcopy(model)
    planned = memopt.wrap(model, budget="min", progress=False, cache=False)
    for _ in range(2):
        x = torch.randn(5, 4)
        outputs = planned(x), twin(x)
        assert torch.equal(*outputs)
        for output in outputs:
            output.square().mean().backward()
        for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert ours.grad is theirs.grad is None or torch.equal(ours.grad, theirs.grad)
            with torch.no_grad():
                ours -= 0.1
                theirs -= 0.1
    for ours, theirs in zip(model.state_dict().values(), twin.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert planned.calls.planned == 2


def test_parameters_that_stay_exchanged_are_refused_by_their_names() -> None:
    model = Exchanges()
    before = model.net[0].bias
    with pytest.raises(CaptureError, match=r"model\.net\.\d\.bias, model\.net\.\d\.bias"):
        memopt.plan(model, torch.randn(5, 4), budget="min", progress=False)
    assert model.net[0].bias is before
