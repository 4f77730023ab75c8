"""Masks as functions of a seed: random enough, and made by kernels that stay in their memory."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

import memopt
from memopt.kernels.compiled.dropout import kept_elements

COUNT = 1 << 16
FAR = 5.0
"""Standard deviations."""


def hashed(p: float = 0.5) -> GraphModule:
    graph = Graph()
    seed = graph.placeholder("seed")
    graph.output(kept_elements(graph, torch.empty(COUNT), p, seed))
    return GraphModule({}, graph)


def seeds(count: int) -> list[Tensor]:
    drawn = torch.randint(
        -(2**31), 2**31, (count, 2), generator=torch.manual_seed(0), dtype=torch.int32
    )
    return list(drawn)


def far(products: Tensor) -> float:
    """Of products of two numbers of ±1/2: their sum, in standard deviations."""
    return abs(float(products.sum())) / (0.25 * math.sqrt(products.numel()))


@pytest.mark.parametrize("p", [0.05, 0.1, 0.5, 0.9])
def test_the_share_of_elements_is_dropped(p: float) -> None:
    mask = hashed(p)
    for seed in seeds(20):
        share = float(mask(seed).float().mean())
        assert abs(share - (1 - p)) <= FAR * math.sqrt(p * (1 - p) / COUNT)


def test_elements_and_seeds_are_independent() -> None:
    mask = hashed()
    for one, other in zip(seeds(40)[::2], seeds(40)[1::2], strict=True):
        numbers = mask(one).float() - 0.5
        for lag in (1, 2, 3, 8, 64, 255, 256, 1024, 4096):
            assert far(numbers[:-lag] * numbers[lag:]) <= FAR
            near = torch.stack([one[0] ^ lag, other[1]])
            assert far(numbers * (mask(near).float() - 0.5)) <= FAR
        for half in (torch.stack([one[0], other[1]]), torch.stack([other[0], one[1]])):
            assert far(numbers * (mask(half).float() - 0.5)) <= FAR


def test_no_product_is_of_the_index_alone() -> None:
    """A C++ compiler would see where it overflows."""

    def reads_seed(node: Node) -> bool:
        return node.name == "seed" or any(map(reads_seed, node.all_input_nodes))

    nodes = hashed().graph.nodes
    products = [one for one in nodes if one.target is torch.ops.aten.mul.Tensor]
    assert len(products) == 4
    assert all(map(reads_seed, products))


@pytest.mark.slow
def test_kernels_with_dropouts_end() -> None:
    """Where a product was of the index alone, GCC 12 left out a loop's end: it read memory until
    there was none."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 1, 8, dropout=0.1, batch_first=True)
    norm = nn.LayerNorm(8)
    both = nn.Sequential(model, norm)
    given = torch.randn(4, 3, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plan = memopt.plan(
            both, given, strategy="store-all", kernels="compiled", cache=False, progress=False
        )
        output = plan.apply(both)(given)
    output.sum().backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in both.parameters())
