"""Gradients that are there when a planned step begins, against what the plan charges for them."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import memopt
from memopt.executor.module import PlannedModule
from memopt.pricing.memory import metered


def planned(accumulate: bool) -> tuple[nn.Module, PlannedModule]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    plan = memopt.plan(
        model, torch.randn(4, 8), budget="min", accumulate=accumulate, progress=False
    )
    module = plan.apply(model)
    assert isinstance(module, PlannedModule)
    return model, module


def in_one_buffer(model: nn.Module, more: int = 0) -> None:
    """Gradients as parts of one buffer, as flat optimizers keep them."""
    buffer = torch.zeros(sum(p.numel() for p in model.parameters()) + more)
    begin = 0
    for p in model.parameters():
        p.grad = buffer[begin : begin + p.numel()].view_as(p)
        begin += p.numel()


@pytest.mark.parametrize("more", [0, 1000])
def test_those_in_one_buffer_count_once(more: int) -> None:
    model, module = planned(accumulate=True)
    in_one_buffer(model, more)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(torch.randn(4, 8)).sum().backward()


def test_those_that_are_not_charged_are_said() -> None:
    model, module = planned(accumulate=False)
    in_one_buffer(model)
    with pytest.warns(UserWarning, match="gradients of 576 B were there.*accumulate=True"):
        module(torch.randn(4, 8)).sum().backward()


class OwnLoss(nn.Module):
    """A model that returns its loss, alone or beside other things."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()),) * 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.layers(x)
        loss = (y - x).square().mean()
        return (loss,) if self.alone else (loss, y)


@pytest.mark.parametrize("alone", [True, False])
def test_the_models_own_loss_is_charged(alone: bool) -> None:
    torch.manual_seed(0)
    model, x = OwnLoss(alone), torch.randn(16, 32)
    plan = memopt.plan(model, x, budget="min", progress=False)
    module = plan.apply(model)
    loss = None
    for _ in range(2):
        model.zero_grad()
        there_bytes = sum(p.nbytes for p in model.parameters()) + x.nbytes
        there_bytes += 0 if loss is None else loss.nbytes
        with metered(torch.device("cpu")) as use:
            loss = module(x)[0]
            loss.backward()
        assert there_bytes + use.peak_bytes <= plan.budget


@pytest.mark.parametrize("held", [True, False])
def test_a_gradient_that_the_loop_holds_through_its_backward_is_said(held: bool) -> None:
    """Eager holds it, too; a plan that does not charge it exceeded its budget without a word."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 512))
    x = torch.randn(64, 8)
    plan = memopt.plan(model, x, budget="min", progress=False)
    module = plan.apply(model)
    said = "may exceed its budget of .* leave 131072 bytes of the budget free"
    around = pytest.warns(UserWarning, match=said) if held else warnings.catch_warnings()
    with around, metered(torch.device("cpu")) as used:
        if not held:
            warnings.simplefilter("error")
        output = module(x)
        output.backward(torch.ones_like(output)) if held else output.sum().backward()
    numbers_bytes = plan.graph.extra_resident_bytes
    measured_bytes = plan.resident_bytes - numbers_bytes + used.peak_bytes
    assert (measured_bytes > plan.peak_bytes) is held
