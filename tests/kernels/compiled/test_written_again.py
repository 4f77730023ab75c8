"""Poolings and norms as pointwise operators of kernels, and what these write again."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule, Node
from torch.nn import functional

import memopt
from memopt.capture.capture import capture
from memopt.kernels.compiled.fuse import _divided
from memopt.kernels.compiled.norms import output_of, parts_of
from memopt.kernels.compiled.pooling import is_pooling, is_unpooling, pooled, poolings, unpooled
from memopt.models.graph import Phase
from memopt.step.build import Lowering, build
from memopt.step.inputs import Call


def lowered(model: nn.Module, x: Tensor) -> Lowering:
    return build(model, capture(model, Call((x,), {})))


def run(inputs: dict[str, Tensor], make: Callable[[FxGraph, list[Node]], object]) -> object:
    """What nodes give that are made in a graph of their own."""
    graph = FxGraph()
    given = [graph.placeholder(name) for name in inputs]
    graph.output(make(graph, given))
    return GraphModule({}, graph)(*inputs.values())


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("size", [(2, 2), (1, 3), (4, 4)])
def test_places_in_windows_are_the_maxima_that_aten_names(
    size: tuple[int, int], dtype: torch.dtype, order: torch.memory_format
) -> None:
    """Ties and numbers that are none, too: the gradient goes where ATen's goes."""
    x = torch.randint(0, 3, (2, 3, 4 * size[0], 2 * size[1])).to(dtype)
    x[torch.rand(x.shape) < 0.1] = math.nan
    x[torch.rand(x.shape) < 0.1] = -math.inf
    x = x.contiguous(memory_format=order)
    model = nn.MaxPool2d(size)
    step = lowered(model, x.clone().requires_grad_())
    (forward,) = filter(is_pooling, step.nodes)
    (backward,) = filter(is_unpooling, step.nodes)
    y, index = torch.ops.aten.max_pool2d_with_indices(x, size)
    g = torch.randn(y.shape).to(dtype)
    expected = torch.ops.aten.max_pool2d_with_indices_backward(g, x, size, size, 0, 1, False, index)
    best, places = run({"x": x}, lambda graph, given: pooled(graph, forward, given[0]))  # type: ignore[misc]
    assert torch.equal(best.nan_to_num(7.0), y.nan_to_num(7.0))
    assert places.dtype == torch.uint8
    found = run({"g": g, "places": places}, lambda graph, given: unpooled(graph, backward, *given))
    assert torch.equal(found, expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("pool", "tiles"),
    [
        (nn.MaxPool2d(2), True),
        (nn.MaxPool2d(3, 2), False),  # overlapping
        (nn.MaxPool2d(2, padding=1), False),
        (nn.MaxPool2d(2, dilation=2), False),
        (nn.MaxPool2d(3), False),  # a column is left over
        (nn.MaxPool2d(8), False),  # too many places
    ],
)
def test_pairs_that_tile_the_image_are_in_regions(pool: nn.Module, tiles: bool) -> None:
    step = lowered(pool, torch.randn(2, 3, 8, 8, requires_grad=True))
    pair = {node for node in step.nodes if is_pooling(node) or is_unpooling(node)}
    assert len(pair) == 2
    assert poolings(step.nodes, set()) == (pair if tiles else set())
    # Where one of them stays ATen's, so does the other.
    assert not poolings(step.nodes, {pair.pop()})


def test_indices_that_something_else_reads_stay_indices() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            y, index = functional.max_pool2d(x, 2, return_indices=True)
            return y, index.double()

    step = lowered(Both(), torch.randn(2, 3, 8, 8, requires_grad=True))
    assert any(map(is_pooling, step.nodes))
    assert not poolings(step.nodes, set())


ATEN = torch.ops.aten
NORMS = {
    "layer": (ATEN.native_layer_norm.default, (5, 6), ((6,), (6,)), lambda w, b: ([6], w, b, 1e-5)),
    "layers": (
        ATEN.native_layer_norm.default,
        (5, 4, 6),
        ((4, 6), None),
        lambda w, b: ([4, 6], w, b, 1e-5),
    ),
    "plain": (ATEN.native_layer_norm.default, (5, 6), (None, None), lambda w, b: ([6], w, b, 1e-5)),
    "rms": (ATEN._fused_rms_norm.default, (5, 6), ((6,), None), lambda w, _: ([6], w, 1e-5)),
    "batch": (
        ATEN._native_batch_norm_legit_functional.default,
        (8, 4, 3, 3),
        ((4,), (4,)),
        lambda w, b: (w, b, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5),
    ),
    "rows": (
        ATEN._native_batch_norm_legit_functional.default,
        (8, 4),
        (None, None),
        lambda w, b: (w, b, torch.zeros(4), torch.ones(4), True, 0.1, 1e-5),
    ),
}
"""By name: the operator, the input's shape, weight's and bias's, and what follows the input."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_its_input_and_statistics(name: str, dtype: torch.dtype) -> None:
    """The formula, against the norm's own output."""
    target, shape, scales, following = NORMS[name]
    x, weight, bias = (
        None if one is None else torch.rand(one).add(0.5).to(dtype) for one in (shape, *scales)
    )
    given = [one if one is None else _state(one, dtype) for one in (x, *following(weight, bias))]
    results = target(*given)
    graph, values = FxGraph(), {}

    def node_of(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"given{len(values)}")
        node.meta["val"] = value
        values[node] = value
        return node

    call = graph.call_function(target, tuple(map(node_of, given)))
    call.meta["val"] = results
    assert parts_of(call) is None  # nothing names the statistics
    for position, value in enumerate(results):
        node = graph.call_function(operator.getitem, (call, position))
        values[node] = value
    parts = parts_of(call)
    assert parts is not None
    inputs = {node.name: values[node] for node in parts if node is not None}
    names = list(inputs)
    made = run(
        inputs,
        lambda graph, given: output_of(graph, call, lambda node: given[names.index(node.name)]),
    )
    assert isinstance(made, Tensor)
    assert made.dtype == results[0].dtype == dtype
    close = {torch.bfloat16: 0.03, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(made, results[0], rtol=close, atol=close)


def _state(value: object, dtype: torch.dtype) -> object:
    """Running statistics in the type of the rest."""
    return value.to(dtype) if isinstance(value, Tensor) else value


def test_a_batch_norm_that_reads_running_statistics_is_not_made_again() -> None:
    step = lowered(nn.BatchNorm2d(4).eval(), torch.randn(2, 4, 3, 3, requires_grad=True))
    assert not any(parts_of(node) for node in step.nodes)


class Block(nn.Module):
    """A gated product between norms, and pooled images: all that a kernel writes again."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.norm, self.gate, self.up = nn.LayerNorm(16), nn.Linear(16, 24), nn.Linear(16, 24)
        self.down = nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        image = self.image(x)
        x = functional.max_pool2d(image, 2).flatten(2)
        y = self.norm(x)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return x.mean() + image.square().mean()


def test_a_step_reads_what_was_written_again() -> None:
    """Nothing is compiled: which tensors the step keeps for its backward."""
    model, x = Block(), torch.randn(2, 3, 8, 8)
    step = lowered(model, x)
    regions = _divided(step, set())
    written = {node for _, one in regions for node in one.again}
    targets = {str(node.target) for node in written}
    assert "aten.mul.Tensor" in targets  # the gated product
    assert any(
        node.args[0].target is torch.ops.aten.native_layer_norm.default
        for node in written
        if node.target.__name__ == "getitem"
    )  # type: ignore[union-attr]
    for region, one in regions:
        phase = step.graph.operators[region.operators[0]].phase
        assert not one.again or phase is Phase.BACKWARD
        for node, value in zip(one.outputs, one.values, strict=True):
            is_place = value.dtype == torch.uint8
            assert is_place == (node.args[-1] == 1 and is_pooling(node.args[0]))


@pytest.mark.slow
def test_gradients_are_those_of_eager_and_plans_have_the_bits_of_store_all() -> None:
    torch.manual_seed(0)
    model, x = Block(), torch.randn(2, 3, 8, 8)
    plan = memopt.plan(model, x, strategy="store-all", kernels="compiled", progress=False)
    assert [note for note in plan.notes if "could not be compiled" in note] == []
    assert all("pool" not in one.target for one in plan.graph.operators)

    def gradients(run: nn.Module) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        run(x).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected, found = gradients(model), gradients(plan.apply(model))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    least = memopt.plan(plan.profiled, budget="min", strategy="rotor", progress=False)
    again = gradients(least.apply(model))
    assert all(map(torch.equal, again, found))
