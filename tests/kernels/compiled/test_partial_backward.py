"""Backwards that begin at some of the outputs, of plans over compiled kernels."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import memopt


class WithLoss(nn.Module):
    """A model that returns its loss, what it is computed from, and another head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layers(x)
        return (torch.softmax(y * 2, -1) - x).square().mean(), y, self.head(y).tanh()


@pytest.mark.slow
def test_regions_that_only_add_what_is_missing_stay_planned() -> None:
    torch.manual_seed(0)
    model, x = WithLoss(), torch.randn(8, 16)
    plan = memopt.plan(model, x, kernels="compiled", strategy="rotor", progress=False)
    planned = plan.apply(model)

    def gradients(module: nn.Module, used: tuple[int, ...]) -> list[torch.Tensor | None]:
        model.zero_grad()
        outputs = module(x)
        torch.autograd.backward([outputs[i].sum() for i in used])
        return [p.grad for p in model.parameters()]

    def assert_as_unplanned(used: tuple[int, ...]) -> None:
        found, expected = gradients(planned, used), gradients(model, used)
        assert [one is None for one in found] == [one is None for one in expected]
        for one, other in zip(found, expected, strict=True):
            if one is not None:
                torch.testing.assert_close(one, other)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for used in ((0,), (0, 2), (0, 1)):
            assert_as_unplanned(used)
    # Without the loss a region would multiply what is missing, not only add it.
    with pytest.warns(UserWarning, match="the original model runs for it"):
        assert_as_unplanned((2,))
    assert (planned.calls.planned, planned.calls.original) == (3, 1)
