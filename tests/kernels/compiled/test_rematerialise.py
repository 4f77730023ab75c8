"""What the backward makes again, against all choices of what to keep; nothing is compiled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from memopt.capture.capture import capture
from memopt.kernels.compiled.divide import Region, divide
from memopt.kernels.compiled.fusible import is_fusible, is_pointwise
from memopt.kernels.compiled.rematerialise import rematerialised
from memopt.kernels.compiled.subgraph import subgraphs
from memopt.models.graph import Phase
from memopt.step.build import Lowering, build
from memopt.step.inputs import Call

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


def layer_norm(x: Tensor) -> Tensor:
    return functional.layer_norm(x, (WIDTH,))


def gelu_of_norm(x: Tensor) -> Tensor:
    return gelu(layer_norm(x)) * 2.0


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


def made_of(lowering: Lowering, free: list[int]) -> dict[int, set[int]]:
    """What each value of the forward can be made of that can be made again: pointwise ones, and
    outputs of norms, of their statistics."""
    graph = lowering.graph
    found = {}
    for op in free:
        one = graph.operators[op]
        if one.phase is not Phase.FORWARD:
            continue
        if is_pointwise(lowering.nodes[op]):
            found[one.writes[0]] = set(one.reads)
        elif "native_layer_norm" in one.target:
            found[one.writes[0]] = {*one.reads, *one.writes[1:]}
    return found


class Choices:
    """All choices of what to keep for the backward."""

    def __init__(self, lowering: Lowering, regions: list[Region], free: list[int]) -> None:
        self.graph = graph = lowering.graph
        self.made = made_of(lowering, free)
        operators = range(len(graph.operators))
        backward = {op for op in operators if graph.operators[op].phase is Phase.BACKWARD}
        inside = {op for region in regions for op in region.operators} & backward
        self.values = {t for op in set(operators) - backward for t in graph.operators[op].writes}
        self.read = {t for op in inside for t in graph.operators[op].reads} & self.values
        outside = {t for op in backward - inside for t in graph.operators[op].reads} & self.values
        self.products = {t for t in outside if t in self.made} - set(graph.outputs)
        self.anyway = (outside | set(graph.outputs)) - self.products

    def leaves(self, tensor: int, kept: set[int]) -> set[int] | None:
        """What a tensor is made of; None: it is not there."""
        if tensor not in self.values:
            return set()
        if tensor in kept | self.anyway:
            return {tensor}
        if tensor not in self.made:
            return None
        parts = [self.leaves(one, kept) for one in self.made[tensor]]
        return None if None in parts else set().union(*(part for part in parts if part))

    def suffice(self, kept: set[int]) -> bool:
        """Whether all that is read is there: what products read only if it was kept, or is made of
        what the one region of the backward reads."""
        read = [self.leaves(t, kept) for t in self.read]
        products = [self.leaves(t, kept) for t in self.products - kept]
        if None in read or None in products:
            return False
        held = set().union(*(part for part in read if part))
        return all(part and part <= held for part in products)

    def least(self) -> int:
        """The fewest bytes."""
        free = sorted(self.values - self.anyway)
        choices = (
            set(kept)
            for count in range(len(free) + 1)
            for kept in itertools.combinations(free, count)
        )
        return min(self.size(kept) for kept in choices if self.suffice(kept))

    def size(self, kept: set[int]) -> int:
        return sum(self.graph.tensors[t].size_bytes for t in kept - self.anyway)


@pytest.mark.parametrize(
    ("function", "some", "written"),
    [
        (gelu, True, 1),
        (gated, True, 1),
        (dropped, True, 1),
        (normalised, True, 1),
        (layer_norm, True, 1),
        (gelu_of_norm, True, 1),
        (torch.relu, False, 0),
    ],
)
def test_no_choice_keeps_fewer_bytes(
    function: Callable[[Tensor], Tensor], some: bool, written: int
) -> None:
    lowering, regions, free = divided(function)
    found = rematerialised(lowering, regions, free)
    assert bool(found.tensors) == some
    assert found.tensors.isdisjoint(found.kept)
    assert len(found.written) == written
    choices = Choices(lowering, regions, free)
    kept = ((choices.read | choices.products | found.kept) & choices.values) - found.tensors
    assert choices.suffice(kept)
    assert choices.size(kept) == choices.least()


def test_kernels_of_the_forward_do_not_write_it() -> None:
    lowering, regions, free = divided(gelu)
    again = rematerialised(lowering, regions, free)
    for region, one in subgraphs(lowering, regions, again):
        phase = lowering.graph.operators[region.operators[0]].phase
        written = {t for node in one.outputs for t in lowering.storages[node]}
        if phase is Phase.FORWARD:
            assert len(one.outputs) == 1
            assert not one.again
            assert written == set(again.written)
        else:
            read = {t for node in one.inputs for t in lowering.storages[node]}
            assert read.isdisjoint(again.tensors)
            assert again.kept & read
            assert {t for node in one.again for t in lowering.storages[node]} == set(again.written)


class Turned(nn.Module):
    """Rows of several heads times the cosines of their positions."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.linear, self.angles = nn.Linear(WIDTH, heads * WIDTH), nn.Buffer(torch.rand(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).view(-1, self.heads, WIDTH)
        z: Tensor = torch.tanh(y * torch.cos(self.angles)[None, None])
        return z


@pytest.mark.parametrize(("heads", "rows", "again"), [(1, 2, True), (4, 4, False)])
def test_what_is_laid_along_larger_values_is_not_made_again(
    heads: int, rows: int, again: bool
) -> None:
    """It would be made once for each place: cosines for each head and row."""
    model = Turned(heads)
    lowering = build(model, capture(model, Call((torch.randn(rows, WIDTH),), {})))
    free = [op for op, node in enumerate(lowering.nodes) if is_fusible(node)]
    found = rematerialised(lowering, divide(lowering), free)
    (cosines,) = (node for node in lowering.nodes if node.target is torch.ops.aten.cos.default)
    assert (lowering.storages[cosines][0] in found.tensors) == again


@pytest.mark.parametrize("times", [1, 8])
def test_what_a_product_reads_is_made_again_however_much_it_writes(times: int) -> None:
    """Nothing is laid along it there."""
    model = Between(gelu_of_norm)
    model.last = nn.Linear(WIDTH, times * WIDTH)
    lowering = build(model, capture(model, Call((torch.randn(4, WIDTH),), {})))
    free = [op for op, node in enumerate(lowering.nodes) if is_fusible(node)]
    found = rematerialised(lowering, divide(lowering), free)
    addmm = "aten.addmm.default"
    _, last = (one for one in lowering.graph.operators if one.target == addmm)
    (read,) = (t for t in last.reads if t in lowering.graph.producer)
    assert read in found.tensors
