"""Models of thousands of parameters."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor, nn

from memopt.profiler.capture import capture
from memopt.profiler.inputs import to_call


class Scales(nn.Module):
    """x times every one of many scalars, a few in each operator."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(1)) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        """One concatenation reads all of them, so that the graph stays short."""
        return x * torch.cat(list(self.scales)).sum()


@pytest.mark.slow
def test_python_compiles_the_runtime_of_many_parameters() -> None:
    """ResNet-1001 failed with a RecursionError before the limit was raised around it."""
    limit = sys.getrecursionlimit()
    captured = capture(Scales(6000), to_call(torch.ones(2)))
    assert captured is not None
    assert sys.getrecursionlimit() == limit
