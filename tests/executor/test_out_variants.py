"""Forms write what their kernels return, bit for bit, where they are told to, in no more memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.nn import functional

from memopt.capture.capture import capture
from memopt.executor import out_variants
from memopt.executor.composed_variants import EVERYWHERE, ON_CPU
from memopt.executor.out_variants import OutVariant, allocator_owned, out_variant_of
from memopt.pricing.memory import metered_sections
from memopt.step.build import build
from memopt.step.dropout import EAGER_DROPOUT
from memopt.step.inputs import to_call
from memopt.step.signature import StandIns, signature, values_of
from tests import zoo
from tests.executor.harness import Case, check, prepare

CPU = torch.device("cpu")
aten = torch.ops.aten
NAN, INF = float("nan"), float("inf")
SPECIAL = torch.tensor([[NAN, INF, -INF, -0.0], [0.0, 1.5, -2.5, 3e38]])
MASKED = torch.stack([torch.full((4,), -INF), torch.tensor([-INF, 1.0, 2.0, -INF])])
IMAGES = torch.randn(3, 4, 6, 5, generator=torch.Generator().manual_seed(0))
STATISTICS = (torch.randn(4), torch.randn(4), torch.randn(4), torch.rand(4))

CALLS: list[tuple[Any, tuple[Any, ...]]] = [
    (aten.clone.default, (SPECIAL,)),
    (aten._to_copy.default, (SPECIAL,)),
    (aten.relu.default, (SPECIAL,)),
    (aten.mul.Scalar, (SPECIAL, 0.3)),
    (aten.mul.Scalar, (torch.arange(5), 3)),
    (aten.div.Scalar, (SPECIAL, 3)),
    (aten.div.Scalar, (torch.arange(5), 3)),
    (aten.add.Scalar, (SPECIAL, 0.1, 2)),
    (aten.sub.Scalar, (SPECIAL, 0.1)),
    (aten.full_like.default, (SPECIAL, 7)),
    (aten.full.default, ([2, 3], 7.5)),
    (aten.zeros_like.default, (SPECIAL,)),
    (aten.new_zeros.default, (SPECIAL, [3])),
    (aten.zeros.default, ([2, 2],)),
    (aten.ones_like.default, (SPECIAL,)),
    (aten.slice_backward.default, (SPECIAL, [2, 9], 1, 1, 9, 2)),
    (aten.slice_backward.default, (SPECIAL, [2, 7], 1, -4, 9223372036854775807, 1)),
    (aten.select_backward.default, (SPECIAL, [2, 3, 4], 1, 2)),
    (aten.slice_scatter.default, (torch.randn(2, 9), SPECIAL, 1, 0, 8, 2)),
    (aten.select_scatter.default, (torch.randn(3, 2, 4), SPECIAL, 0, 1)),
    (aten.embedding.default, (SPECIAL, torch.tensor([[1, 0, 1], [0, 0, 1]]))),
    (aten.embedding.default, (SPECIAL, torch.tensor([1, 0, 1]), 0)),
    (aten._safe_softmax.default, (MASKED, -1)),
    (aten._safe_softmax.default, (SPECIAL, 0)),
    (aten.native_dropout.default, (SPECIAL, 0.4, True)),
    (aten.native_dropout.default, (SPECIAL, 1.0, True)),
    (aten.native_dropout.default, (SPECIAL, 0.0, None)),
    (aten.native_dropout.default, (STATISTICS[0].bfloat16(), 0.1, True)),
    (EAGER_DROPOUT, (SPECIAL, 0.15, True)),
    (EAGER_DROPOUT, (SPECIAL, 1.0, True)),
    (aten.native_dropout_backward.default, (SPECIAL, SPECIAL > 0, 1.7)),
    (aten._native_batch_norm_legit_functional.default, (IMAGES, *STATISTICS, True, 0.1, 1e-5)),
    (
        aten._native_batch_norm_legit_functional.default,
        (IMAGES.to(memory_format=torch.channels_last), *STATISTICS, True, 0.3, 1e-3),
    ),
    (aten._adaptive_avg_pool2d.default, (IMAGES, [3, 2])),
]


def node_of(target: Any, args: tuple[Any, ...]) -> Node:
    """The call as a node of a captured graph."""
    graph = Graph()

    def described(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(graph.nodes)}")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, tuple(map(described, args)))
    node.meta["val"] = target(*args)
    return node


def as_list(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (list, tuple)) else [result]


def places(form: OutVariant, node: Node) -> dict[str, Tensor]:
    """Tensors as the node's results are, full of rubbish."""
    given = {}
    for name, like in zip(form.names, values_of(node), strict=True):
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
        bits = torch.empty(0, dtype=torch.uint8)
        bits.set_(made.untyped_storage(), 0, (made.untyped_storage().nbytes(),))  # type: ignore[call-overload]  # torch accepts an UntypedStorage here
        bits.fill_(255 if made.dtype is not torch.bool else 1)
        given[name] = made
    return given


def bits(value: Tensor) -> Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def assert_same(form: OutVariant, node: Node, args: Any, kwargs: Any) -> None:
    torch.manual_seed(3)
    wanted = as_list(node.target(*args, **kwargs))  # type: ignore[operator]
    random_state = torch.random.get_rng_state()
    given = places(form, node)
    addresses = [tensor.data_ptr() for tensor in given.values()]
    torch.manual_seed(3)
    form.target(*args, **kwargs, **given)
    for found, expected, address in zip(given.values(), wanted, addresses, strict=True):
        assert found.data_ptr() == address
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.stride() == expected.stride()
        assert torch.equal(bits(found), bits(expected)), form.label
    assert torch.equal(torch.random.get_rng_state(), random_state)


@pytest.mark.parametrize(
    "call", CALLS, ids=[f"{i}-{target}" for i, (target, _) in enumerate(CALLS)]
)
def test_lowered_forms(call: tuple[Any, tuple[Any, ...]]) -> None:
    target, args = call
    node = node_of(target, args)
    form = out_variant_of(node, CPU)
    assert form is not None
    assert form.composed
    assert_same(form, node, args, {})


def test_every_lowered_form_is_compared() -> None:
    assert {target for target, _ in CALLS} == {*EVERYWHERE, *ON_CPU}


def test_what_has_no_form() -> None:
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(4, 3, 3, 3)
    args = (x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
    assert out_variant_of(node_of(aten.convolution.default, args), CPU) is None
    # torch's generated out= overloads compute first and copy then.
    assert (
        out_variant_of(node_of(aten.native_layer_norm.default, (x, [5], None, None, 1e-5)), CPU)
        is None
    )
    # A result that does not fill its storage has no address of its own.
    assert out_variant_of(node_of(aten.expand.default, (torch.randn(1, 3), [4, 3])), CPU) is None
    assert out_variant_of(node_of(aten.native_dropout.default, (x, 0.1, False)), CPU) is None


def test_forms_that_write_something_else_are_not_used() -> None:
    a, b = torch.randn(4, 5), torch.randn(4, 5)
    # These make what they are given as large as what they sum up.
    for loss in (aten.mse_loss.default, aten.smooth_l1_loss.default, aten.huber_loss.default):
        assert out_variant_of(node_of(loss, (a, b, 0)), CPU) is not None
        assert out_variant_of(node_of(loss, (a, b, 1)), CPU) is None
    # torch's out= form of batch norm leaves some of its outputs unwritten here.
    for x in (IMAGES.transpose(2, 3), IMAGES[..., ::2]):
        norm = aten._native_batch_norm_legit_functional.default
        assert out_variant_of(node_of(norm, (x, *STATISTICS, True, 0.1, 1e-5)), CPU) is None


def test_forms_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A form that rounds otherwise, or writes in part, is found out."""

    def rounds(x: Tensor, other: float, *, out: Tensor) -> Tensor:
        return out.copy_(x.double().mul(other).add(1e-7))

    def in_part(x: Tensor, other: float, *, out: Tensor) -> Tensor:
        torch.mul(x[:-1], other, out=out[:-1])
        return out

    node = node_of(aten.mul.Scalar, (torch.randn(7, 11), 0.37))
    assert out_variant_of(node, CPU) is not None
    for wrong in (rounds, in_part):
        monkeypatch.setitem(EVERYWHERE, aten.mul.Scalar, (wrong, ("out",)))
        out_variants._variant.cache_clear()
        assert out_variant_of(node, CPU) is None
    monkeypatch.undo()
    out_variants._variant.cache_clear()


class Auxiliary(nn.Module):
    """Loss terms within a model, and a parameter whose gradient is the output's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.position = nn.Linear(8, 8), nn.Parameter(torch.zeros(4, 8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x)
        losses = (functional.mse_loss, functional.huber_loss, functional.smooth_l1_loss)
        terms = [loss(h, x) for loss in losses]
        terms.append(functional.kl_div(h.log_softmax(-1), x.softmax(-1), reduction="batchmean"))
        return h.tanh().mean() + 0.1 * sum(terms), torch.copysign(h, x) + self.position


def test_inner_losses_and_gradients_of_outputs() -> None:
    def inputs() -> tuple[Tensor, ...]:
        return (torch.linspace(-2, 2, 32).reshape(4, 8).sin(),)

    check(Case(Auxiliary, inputs))
    graph = prepare(Auxiliary(), inputs()).graph
    assert set(graph.gradients) & set(graph.tangents)
    assert graph.producer.keys() >= set(graph.allocator_owned)


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.FAMILIES, ids=str)
def test_forms_of_all_calls(family: zoo.Family) -> None:
    model = family.build("tiny")
    lowering = build(model, capture(model, to_call(family.inputs("tiny"))))
    stand_ins = StandIns(CPU)
    seen: set[str] = set()
    for node in lowering.nodes:
        form, one = out_variant_of(node, CPU), signature(node)
        if form is None or one.text in seen:
            continue
        seen.add(one.text)
        args, kwargs = stand_ins.arguments(one)
        filled = {**kwargs, **places(form, node)}

        def own(node: Node = node, args: Any = args, kwargs: Any = kwargs) -> Any:
            return lambda: node.target(*args, **kwargs)  # type: ignore[operator]

        def into(form: OutVariant = form, args: Any = args, kwargs: Any = filled) -> Any:
            return lambda: form.target(*args, **kwargs)

        with torch.no_grad():
            assert_same(form, node, args, kwargs)
            alone, placed = metered_sections(CPU, [own, into])
        results = sum(value.untyped_storage().nbytes() for value in values_of(node))
        assert placed.peak_bytes <= alone.peak_bytes - alone.end_bytes + 0.02 * results, one.text
    assert len(seen) > 5


def test_results_and_formless_kernels_are_outside() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
    lowering = build(model, capture(model, to_call(torch.randn(2, 3, 5, 5))))
    outside = set(allocator_owned(lowering))
    graph = lowering.graph
    by_target = {operator.target: operator.writes for operator in graph.operators}
    assert set(by_target["aten.convolution.default"]) <= outside
    assert set(by_target["aten.convolution_backward.default"]) <= outside
    assert not outside & set(by_target["aten.relu.default"])
    assert {*graph.outputs, *graph.gradients} - graph.resident <= outside


def test_fourier_transforms_are_left_to_the_allocator() -> None:
    """torch's `out=` kernels make the result elsewhere: at an address it would be there twice."""

    class Spectrum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.rfft(self.linear(x)).abs()

    prepared = prepare(Spectrum(), torch.randn(6, 8))
    written = {t for one in prepared.graph.operators if "_fft" in one.target for t in one.writes}
    assert written
    assert written <= set(prepared.graph.allocator_owned)
