"""A forward that reads a gradient is planned where there is none, and refused where there is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError


class ReadsGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.first.weight.grad is not None:
            h = h * 2
        result: Tensor = self.last(h)
        return result


def test_a_gradient_that_is_there_when_the_forward_reads_it() -> None:
    """It was a PlanFileError, which spoke of another model."""
    model = ReadsGradient()
    memopt.wrap(model, "min", strategy="rotor", progress=False, improve=False)
    x = torch.randn(4, 8)
    model(x).sum().backward()
    with pytest.raises(CaptureError, match=r"reads a gradient \(model\.first\.weight\.grad.*auto"):
        model(x)
    model.zero_grad()
    model(x).sum().backward()
    assert memopt.running(model).calls.planned == 2


def test_its_parts_are_planned() -> None:
    torch.manual_seed(0)
    models = [ReadsGradient(), ReadsGradient()]
    models[1].load_state_dict(models[0].state_dict())
    memopt.wrap(models[1], "min", strategy="rotor", progress=False, improve=False, parts="auto")
    x = torch.randn(4, 8)
    found = []
    for model in models:
        for _ in range(3):
            model(x).square().sum().backward()
        found.append([one.grad for one in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
