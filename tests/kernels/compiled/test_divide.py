"""Which operators of a step become one region; nothing is compiled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from memopt.capture.capture import capture
from memopt.kernels.compiled.divide import divide
from memopt.models.graph import Phase
from memopt.step.build import Lowering, build
from memopt.step.inputs import Call

WIDTH = 8


class Branches(nn.Module):
    """Two functions of a product, or of two products, each before a product of its own."""

    def __init__(self, functions: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.left, self.right = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.functions = functions

    def forward(self, x: Tensor) -> Tensor:
        one, other = self.functions(self.first(x), self.second(x))
        y: Tensor = self.left(one) @ self.right(other).t()
        return y


def together(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return left.sin() * right, left.cos()


def apart(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    return left.sin(), right.cos()


def scaled(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Both read a tensor of one element, which nothing need be fused for."""
    scale = left[:1, :1] @ right[:1, :1]
    return left * scale, right * scale


def forward_regions(lowering: Lowering) -> list[set[str]]:
    graph = lowering.graph
    every = [[graph.operators[op] for op in region.operators] for region in divide(lowering)]
    return [{one.target for one in ops} for ops in every if ops[0].phase is Phase.FORWARD]


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        (together, [{"aten.sin.default", "aten.mul.Tensor", "aten.cos.default"}]),
        (apart, []),
        (scaled, []),
    ],
)
def test_what_reads_the_same_is_one_region(
    functions: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], expected: list[set[str]]
) -> None:
    model = Branches(functions)
    lowering = build(model, capture(model, Call((torch.randn(4, WIDTH),), {})))
    assert forward_regions(lowering) == expected
