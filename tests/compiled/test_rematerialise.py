"""What the backward makes again, against all choices of what to keep; nothing is compiled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt.models.graph import Phase
from memopt.profiler.build import Lowering, build
from memopt.profiler.capture import capture
from memopt.profiler.compiled.divide import Region, divide
from memopt.profiler.compiled.fusible import is_fusible, is_pointwise
from memopt.profiler.compiled.rematerialise import rematerialised
from memopt.profiler.compiled.subgraph import subgraphs
from memopt.profiler.inputs import Call

WIDTH = 8


def gelu(x: Tensor) -> Tensor:
    """GPT-2's, whose factors eager keeps."""
    inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))
    return 0.5 * x * (1.0 + torch.tanh(inner))


def gated(x: Tensor) -> Tensor:
    return functional.silu(x) * torch.sigmoid(x + 1.0)


def dropped(x: Tensor) -> Tensor:
    return functional.dropout(torch.tanh(x), 0.5) * torch.exp(x)


def normalised(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Between(nn.Module):
    """A function between two products."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.function(self.first(x)))
        return y


def divided(function: Callable[[Tensor], Tensor]) -> tuple[Lowering, list[Region], list[int]]:
    model, x = Between(function), torch.randn(4, WIDTH)
    lowering = build(model, capture(model, Call((x,), {})))
    free = [op for op, node in enumerate(lowering.nodes) if is_fusible(node)]
    return lowering, divide(lowering), free


def least_kept(lowering: Lowering, regions: list[Region], free: list[int]) -> int:
    """The fewest bytes of forward values that must be kept for the backward's kernels, by trying
    all choices."""
    graph = lowering.graph
    backward = {
        op
        for region in regions
        for op in region.operators
        if graph.operators[op].phase is Phase.BACKWARD
    }
    forward = [op for op, one in enumerate(graph.operators) if one.phase is Phase.FORWARD]
    made = {graph.operators[op].writes[0]: op for op in forward if op in free}
    made = {t: op for t, op in made.items() if is_pointwise(lowering.nodes[op])}
    values = [t for op in forward for t in graph.operators[op].writes]
    read = {t for op in backward for t in graph.operators[op].reads} & set(values)
    anyway = {
        t
        for t in values
        if t in graph.outputs
        or any(
            graph.operators[op].phase is Phase.BACKWARD and op not in backward
            for op in graph.readers[t]
        )
    }

    def there(tensor: int, kept: set[int]) -> bool:
        if tensor not in graph.producer or tensor in kept:
            return True
        return tensor in made and all(
            there(one, kept) for one in graph.operators[made[tensor]].reads
        )

    choices = [t for t in values if t not in anyway]
    sizes = {t: graph.tensors[t].size_bytes for t in choices}
    return min(
        sum(sizes[t] for t in kept)
        for count in range(len(choices) + 1)
        for kept in itertools.combinations(choices, count)
        if all(there(t, anyway | set(kept)) for t in read)
    )


@pytest.mark.parametrize(
    ("function", "some"), [(gelu, True), (gated, True), (dropped, True), (normalised, False)]
)
def test_no_choice_keeps_fewer_bytes(function: Callable[[Tensor], Tensor], some: bool) -> None:
    lowering, regions, free = divided(function)
    graph = lowering.graph
    found = rematerialised(lowering, regions, free)
    assert bool(found.tensors) == some
    assert found.tensors.isdisjoint(found.kept)
    boundary = [op for op, one in enumerate(graph.operators) if one.phase is Phase.BACKWARD]
    inside = {op for region in regions for op in region.operators}
    kept = {
        t
        for op in boundary
        for t in graph.operators[op].reads
        if t in graph.producer and graph.producer[t] not in boundary
    }
    anyway = {
        t for t in kept if any(op in boundary and op not in inside for op in graph.readers[t])
    } | set(graph.outputs)
    kept = (kept | found.kept) - found.tensors - anyway
    kept = {t for t in kept if t in graph.producer}
    size = sum(graph.tensors[t].size_bytes for t in kept)
    assert size == least_kept(lowering, regions, free)


def test_kernels_of_the_forward_do_not_write_it() -> None:
    lowering, regions, free = divided(gelu)
    again = rematerialised(lowering, regions, free)
    for region, one in subgraphs(lowering, regions, again):
        phase = lowering.graph.operators[region.operators[0]].phase
        written = {t for node in one.outputs for t in lowering.storages[node]}
        assert written.isdisjoint(again.tensors)
        if phase is Phase.FORWARD:
            assert len(one.outputs) == 1
        else:
            read = {t for node in one.inputs for t in lowering.storages[node]}
            assert read.isdisjoint(again.tensors)
            assert again.kept & read
