"""What a trace knows of tensors and classes is no reason to refuse a forward that asks for it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError


class Asks(nn.Module):
    """Asks for the class of its weight, as PEFT does for DoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kind = type(self.linear.weight)
        if kind.__module__.startswith("torchao.") or "4bit" in kind.__qualname__:
            return x
        result: Tensor = self.linear(x).relu()
        return result * (2 if kind.__name__.endswith("Parameter") else 3)


class Sets(Asks):
    """Says of a tensor that needs no gradient that it needs none, as PEFT's AdaLoRA does."""

    needs = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        one = torch.eye(*weight.shape, out=torch.empty_like(weight.detach()))
        one.requires_grad = self.needs
        result: Tensor = self.linear(x).square() + torch.norm(weight @ weight.T - one)
        return result


class Axes(list[int]):
    """A list of a class of its own, as Keras makes of a layer's attributes."""


class Averages(Asks):
    """Gives an operator such a list."""

    def __init__(self) -> None:
        super().__init__()
        self.axes = Axes([0, 1])

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y - torch.mean(y, dim=self.axes, keepdim=True).square()


@pytest.mark.parametrize("make", [Asks, Averages, Sets])
def test_what_is_known_is_traced(make: type[Asks]) -> None:
    torch.manual_seed(0)
    model, x = make(), torch.randn(4, 8)
    eager = copy.deepcopy(model)
    refused = {Averages: r"torch\.mean"}
    if make in refused and torch.__version__ < (2, 13):  # it cannot be given the answer
        with pytest.raises(CaptureError, match=refused[make]):
            memopt.plan(model, x, budget="min", strategy="rotor", progress=False)
        return
    plan = memopt.plan(model, x, budget="min", strategy="rotor", progress=False)
    plan.apply(model)(x).sum().backward()
    eager(x).sum().backward()
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        assert torch.equal(one.grad, other.grad)


class Leaves(Sets):
    """Makes a leaf."""

    needs = True


class Keeps(Leaves):
    """Keeps a leaf, whose gradient can be looked at."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = super().forward(x)
        self.kept = self.linear.weight.detach().clone()
        self.kept.requires_grad = self.needs
        return result + self.kept.sum()


def test_a_leaf_made_in_the_forward_is_refused_or_traced() -> None:
    if torch.__version__ >= (2, 15):
        test_what_is_known_is_traced(Leaves)
    for make in (Keeps,) if torch.__version__ >= (2, 15) else (Keeps, Leaves):
        with pytest.raises(CaptureError, match=r"requires_grad"):
            memopt.plan(make(), torch.randn(4, 8), budget="min", strategy="rotor", progress=False)


class Tags(Asks):
    """Sets an attribute on a tensor that it returns, or on one that it uses."""

    returned = False

    def forward(self, x: Tensor) -> Tensor:
        inner = self.linear(x)
        result: Tensor = inner.relu()
        (result if self.returned else inner).scale = 2
        return result


def test_an_attribute_of_a_returned_tensor_is_refused() -> None:
    """It was lost."""
    model = Tags()
    memopt.wrap(model, "min", strategy="rotor", progress=False, improve=False)
    model(torch.randn(4, 8)).sum().backward()
    assert memopt.running(model).calls.planned == 1
    model.returned = True
    with pytest.raises(CaptureError, match=r"sets \.scale on a tensor that it returns.*beside"):
        model(torch.randn(4, 8))
