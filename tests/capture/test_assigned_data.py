"""Forwards that assign to `.data` of their parameters: planned where that is a copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError


class Pair(nn.Module):
    """Two layers, whose parameters `assign` changes, and what it returns."""

    def __init__(self, assign: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        self.flat = nn.Parameter(torch.randn(12))
        self.part = nn.Parameter(self.flat.data[:9].view(3, 3), requires_grad=False)
        self.register_buffer("mask", torch.eye(3))
        self.assign = assign

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        found = self.assign(self, x)
        return self.one(x) * self.two(x) + self.flat.sum(), found


def averaged(m: Pair, x: Tensor) -> None:
    with torch.no_grad():
        for one, two in zip(m.one.parameters(), m.two.parameters(), strict=True):
            two.data = two.data * 0.9 + one.data * 0.1


def masked(m: Pair, x: Tensor) -> None:
    m.one.weight.data *= m.mask


def normed(m: Pair, x: Tensor) -> None:
    m.one.weight.data = nn.functional.normalize(m.one.weight.data, dim=0)


def drawn(m: Pair, x: Tensor) -> None:
    m.two.weight.data = torch.randn(3, 3)


def of_a_buffer(m: Pair, x: Tensor) -> None:
    m.mask.data = m.mask.data * 0.5 + x.detach().mean()


def of_itself(m: Pair, x: Tensor) -> None:
    m.mask.data = m.mask.data
    m.mask.mul_(0.9)


PLANNED = (of_itself, averaged, masked, normed, drawn, of_a_buffer)


def keeps_the_old(m: Pair, x: Tensor) -> Tensor:
    old = m.two.weight.data
    m.two.weight.data = old * 0.5
    return old * 1


def keeps_the_new(m: Pair, x: Tensor) -> Tensor:
    new = m.two.weight.data * 0.5
    m.two.weight.data = new
    return new


def shares_with_another(m: Pair, x: Tensor) -> None:
    m.two.weight.data = m.one.weight.data


def shares_already(m: Pair, x: Tensor) -> None:
    m.part.data = m.part.data * 0.5


def read_before(m: Pair, x: Tensor) -> Tensor:
    y = m.two(x)
    m.two.weight.data = m.two.weight.data * 0.5
    return y


def transposed(m: Pair, x: Tensor) -> None:
    m.two.weight.data = (m.two.weight.data * 0.5).T


@pytest.mark.parametrize("assign", PLANNED)
def test_steps_are_eagers(assign: Callable[[Any, Tensor], Any]) -> None:
    model, planned = Pair(assign), Pair(assign)
    memopt.wrap(planned, "min", progress=False, improve=False)
    for step in range(3):
        for one in (model, planned):
            torch.manual_seed(step)
            one(torch.randn(4, 3))[0].square().mean().backward()
            with torch.no_grad():
                for parameter in one.parameters():
                    if parameter.grad is not None:
                        parameter.sub_(parameter.grad)
        found = zip(model.state_dict().values(), planned.state_dict().values(), strict=True)
        assert all(torch.equal(*pair) for pair in found), step
    assert memopt.running(planned).calls.planned == 3


@pytest.mark.parametrize(
    "assign",
    [
        keeps_the_old,
        keeps_the_new,
        shares_with_another,
        shares_already,
        read_before,
        transposed,
        lambda m, x: setattr(x, "data", x.data * 2),
    ],
)
def test_what_is_no_copy_is_refused(assign: Callable[[Any, Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"assigns \.data of a parameter, .*weight\.copy_"):
        memopt.plan(Pair(assign), torch.randn(4, 3), cache=False, progress=False)
