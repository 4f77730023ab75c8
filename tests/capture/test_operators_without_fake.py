"""Operators of users that have no fake kernel: run once on stand-ins, planned, and exact."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError

_LIBRARY = torch.library.Library("memopt_tests", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("halves(Tensor x, int parts=2) -> (Tensor, Tensor)")
_LIBRARY.impl("halves", lambda x, parts=2: (x / parts, x.sum(-1)), "CPU")


@torch.library.custom_op("memopt_tests::scaled", mutates_args=())
def scaled(x: Tensor, by: float) -> Tensor:
    """Computes on the host, in another layout."""
    return torch.from_numpy(x.detach().numpy().T * by).clone().t()


@torch.library.custom_op("memopt_tests::scaled_backward", mutates_args=())
def scaled_backward(gradient: Tensor, by: float) -> Tensor:
    return torch.from_numpy(gradient.numpy() * by)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.by = inputs[1]


scaled.register_autograd(
    lambda ctx, gradient: (scaled_backward(gradient.contiguous(), ctx.by), None),
    setup_context=_keep,
)


class _Between(nn.Module):
    def __init__(self, call: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.call = nn.Linear(8, 8), nn.Linear(8, 8), call

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.call(torch.tanh(self.first(x))))
        return found


def _halved(h: Tensor) -> Tensor:
    first, second = torch.ops.memopt_tests.halves(h.detach(), 4)
    return h + first + second.unsqueeze(-1)


CALLS = {"scaled": lambda h: scaled(h, 3.0), "halves": _halved}


@pytest.mark.parametrize("kind", CALLS)
def test_they_are_planned_as_they_are(kind: str) -> None:
    model, x = _Between(CALLS[kind]), torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    plain = copy.deepcopy(model)
    before = torch.get_rng_state()
    plan = memopt.plan(model, x, strategy="rotor", budget="min", progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert f"memopt_tests::{kind}" in "".join(plan.notes)
    for one, run in ((plain, plain), (model, plan.apply(model))):
        torch.manual_seed(2)
        for _ in range(2):
            run(x).square().sum().backward()
        one.drawn = torch.rand(3)
    assert torch.equal(plain.drawn, model.drawn)
    for mine, other in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, other.grad)


@torch.library.custom_op("memopt_tests::picky", mutates_args=())
def picky(x: Tensor) -> Tensor:
    if float(x.std()) < 1e-3:
        raise RuntimeError("all alike")
    return x.clone()


def test_one_that_needs_values_is_refused_by_name() -> None:
    text = r"memopt_tests::picky has no fake kernel, and cannot be run on zeros.*all alike"
    with pytest.raises(CaptureError, match=text):
        memopt.plan(_Between(picky), torch.ones(6, 8), strategy="store-all", progress=False)
