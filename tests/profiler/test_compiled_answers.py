"""Models that ask whether they are compiled, planned as what they compute when they are not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError


class Scan(nn.Module):
    """Sums one after the other in eager and all at once when compiled: other bits."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * self.weight
        if torch.compiler.is_compiling():
            return scaled.sum()
        total = scaled[0, 0]
        for value in scaled.flatten()[1:40]:
            total = total + value
        return total * 3


def asks() -> bool:
    """A helper between the model and torch, as libraries have one."""
    return torch.compiler.is_compiling()


class Looks(Scan):
    """Looks at values when it is not compiled, which cannot be traced, and then at another place
    takes the way of eager."""

    def forward(self, x: Tensor) -> Tensor:
        if not asks() and bool((x > 1e9).any()):
            return x.sum() * 0
        return super().forward(x)


class Skips(nn.Module):
    """Without compiling, a mask of ones that is taken away again by a look at its values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is None and not asks():
            mask = torch.full_like(x, 1 / 3)
        if mask is not None and not asks() and bool((mask == 1 / 3).all()):
            mask = None
        result: Tensor = self.linear(x)
        return (result if mask is None else (result * mask).sum(0) * 3).sin()


class Fails(Scan):
    """Raises an error when it is compiled, within a `finally` as transformers has it, and branches
    by chance when it is not."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            if asks():
                raise TypeError("no mask")
            return x.sum() if bool(torch.rand(()) > 2) else super().forward(x)
        finally:
            x.size()


def test_a_model_that_fails_when_compiled_is_refused_for_what_it_does_in_eager() -> None:
    with pytest.raises(CaptureError, match=r"\(return x\.sum\(\) if bool.*data-dependent"):
        memopt.plan(Fails(), (torch.rand(4, 64),), budget="1GiB", progress=False)


def gradients(model: nn.Module, x: Tensor) -> tuple[Any, ...]:
    """The result and the gradients of a step."""
    torch.manual_seed(1)
    result = model(x)
    result.sum().backward()
    return (result.detach(), *(p.grad for p in model.parameters()))


@pytest.mark.parametrize("kind", [Scan, Looks, Skips])
def test_planned_steps_are_those_of_eager(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    x = torch.rand(4, 8 if kind is Skips else 64)
    twin = copy.deepcopy(model)
    planned = memopt.plan(model, (x,), budget="1GiB", progress=False).apply(model)
    for one, other in zip(gradients(planned, x), gradients(twin, x), strict=True):
        assert torch.equal(one, other)


def test_a_model_that_cannot_be_traced_in_either_way_is_refused() -> None:
    class Never(Scan):
        def forward(self, x: Tensor) -> Tensor:
            if asks() or bool(torch.rand(()) < 2):
                return x.sum() * self.weight if bool(torch.rand(()) < 2) else x * self.weight
            return super().forward(x)

    with pytest.raises(CaptureError, match="cannot be captured"):
        memopt.plan(Never(), (torch.rand(4, 64),), budget="1GiB", progress=False)


def test_the_model_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm1d(64), Scan())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(3)
    wanted = torch.rand(())
    torch.manual_seed(3)
    memopt.plan(model, (torch.rand(4, 64),), budget="1GiB", progress=False)
    torch.manual_seed(3)
    assert torch.equal(torch.rand(()), wanted)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(p.grad is None for p in model.parameters())
