"""Plans of monet, checkmate and rotor-menus on a real model: the same bits, within the budget."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from tests.families.harness import check, floor_plan, subject
from tests.zoo import Family, Size
from tests.zoo.family import Inputs

STRATEGIES = ("monet", "checkmate", "checkmate-rounding", "rotor-menus")
SHARES = (0.1, 0.5)
LIMIT_S = 4.0


class Residual(nn.Module):
    """x + dropout(GELU(linear(x)))."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.dropout(nn.functional.gelu(self.linear(x)), 0.1)


def residuals(size: Size) -> nn.Module:
    """Four blocks."""
    return nn.Sequential(*[Residual(32) for _ in range(4)])


def rows(size: Size, batch: int, generator: torch.Generator) -> Inputs:
    """Enough rows that activations, not parameters, are the memory."""
    return (torch.randn(64 * batch, 32, generator=generator),)


FAMILY = Family("residuals", residuals, rows, lambda output: output.square().mean())


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_steps_are_eager_bit_for_bit_within_the_budget(strategy: str, share: float) -> None:
    one = subject(FAMILY)
    floor_bytes = floor_plan(one, "rotor").budget
    assert floor_bytes is not None
    peak_bytes = one.profiled.baseline.peak_bytes
    budget = floor_bytes + int(share * (peak_bytes - floor_bytes))
    assert budget < peak_bytes
    plan = memopt.plan(
        one.profiled, budget=budget, strategy=strategy, time_limit_s=LIMIT_S, progress=False
    )
    check(one, plan)
