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


class Sums(nn.Module):
    """One weight for several products, or several weights for one input."""

    def __init__(self, times: int, weights: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(weights))
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        x = x.sin()
        parts = [one(x + i) for i in range(self.times) for one in self.each]
        y: Tensor = torch.stack([part.cos().sum() for part in parts]).sum()
        return y


@pytest.mark.parametrize(("times", "weights", "most"), [(8, 1, 2), (1, 3, 3), (1, 8, 3)])
def test_a_region_holds_few_terms_of_a_sum(times: int, weights: int, most: int) -> None:
    model = Sums(times, weights)
    x = torch.randn(4, WIDTH, requires_grad=weights > 1)
    lowering = build(model, capture(model, Call((x,), {})))
    graph, held = lowering.graph, []
    for region in divide(lowering):
        products = {
            graph.producer[t]
            for op in region.operators
            if graph.operators[op].target == "aten.add.Tensor"
            for t in graph.operators[op].reads
            if "mm" in graph.operators[graph.producer[t]].target
        }
        held.append(len(products))
    assert max(held) <= most
    assert most == 2 or max(held) == most
