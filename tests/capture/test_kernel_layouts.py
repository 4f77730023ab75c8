"""Captured graphs have the layouts, and the operators, that eager has."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.capture.as_eager.layouts import computing_device, layouts_of_kernels
from memopt.capture.capture import capture
from memopt.capture.fake import Fakes
from memopt.pricing.memory import metered
from memopt.step.inputs import to_call
from memopt.step.trial import equal_bytes
from tests.executor.harness import Case, check


class Between(nn.Module):
    """A function between two layers, on a tensor made by `view`."""

    def __init__(self, function: Callable[[Tensor], Any], view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 40)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.function, self.view = function, view

    def forward(self, x: Tensor) -> list[Tensor]:
        values = pytree.tree_leaves(self.function(self.view(self.layer(x).view(3, 2, 4, 5))))
        return [(value * self.scale).flatten() for value in values]


def rows() -> tuple[Tensor, ...]:
    return (torch.linspace(-2, 2, 18).reshape(3, 6).sin(),)


def reversed_dims(x: Tensor) -> Tensor:
    return x.permute(3, 2, 1, 0)


def swapped(x: Tensor) -> Tensor:
    return x.transpose(-1, -2)


def gaps(x: Tensor) -> Tensor:
    return x[..., ::2]


@pytest.mark.parametrize("view", [reversed_dims, swapped])
@pytest.mark.parametrize(
    "function",
    [functional.softplus, functional.logsigmoid, functional.elu, nn.MSELoss(), nn.HuberLoss()],
)
def test_strides_are_those_of_the_kernels(
    function: Callable[..., Tensor], view: Callable[[Tensor], Tensor]
) -> None:
    losses = isinstance(function, nn.MSELoss | nn.HuberLoss)
    apply = (lambda h: function(h, h.detach().sin())) if losses else function
    model = Between(apply, view)
    captured = capture(model, to_call(rows()))
    values: dict[Any, Any] = {}
    for node in captured.module.graph.nodes:
        if node.op == "placeholder":
            like = node.meta["val"]
            values[node] = torch.rand(like.untyped_storage().nbytes() // 4).as_strided(
                like.shape, like.stride()
            )
        elif node.op == "call_function":
            args, kwargs = torch.fx.node.map_arg(
                (node.args, node.kwargs), lambda argument: values[argument]
            )
            values[node] = node.target(*args, **kwargs)
            if isinstance(values[node], Tensor):
                assert values[node].stride() == node.meta["val"].stride(), node.format_node()


def many(h: Tensor) -> list[Tensor]:
    """Operators that were traced with other layouts, or taken apart."""
    return [
        functional.softplus(h),
        functional.softshrink(h),
        functional.hardshrink(h),
        h.prod(-1),
        h.cumprod(1),
        (h * 1.5).addcmul_(h, h.sin(), value=0.2),
        torch.addcdiv(h, h, h.exp(), value=0.2),
        functional.mse_loss(h, h.sin()),
        functional.kl_div(h, h.softmax(-1), reduction="sum"),
        torch.copysign(h, h.sin()),
    ]


@pytest.mark.parametrize("view", [reversed_dims, swapped, gaps])
def test_bits_of_eager(view: Callable[[Tensor], Tensor]) -> None:
    check(Case(lambda: Between(many, view), rows, steps=1))


def values(h: Tensor) -> list[Tensor]:
    """Values for which LAPACK need not make vectors, unless there is a backward."""
    square = h[0] @ h[0].mT
    return [
        torch.linalg.svdvals(h),
        torch.linalg.eigvalsh(square),
        torch.linalg.matrix_norm(h, "nuc"),
        square[0].norm("nuc"),
    ]


@pytest.mark.parametrize("constant", [True, False])
def test_values_without_vectors(constant: bool) -> None:
    def model() -> nn.Module:
        return Between(lambda h: (values(h.detach() if constant else h), h), swapped)

    check(Case(model, rows, steps=1))


class Tokens(nn.Module):
    """Batch norm over the features of a sequence, of a chunk, and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 16)
        self.norm, self.chunk = nn.BatchNorm1d(16), nn.BatchNorm1d(8, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.layer(x).transpose(1, 2)).transpose(1, 2).relu()
        left, right = y.flatten(0, 1).chunk(2, -1)
        return self.chunk(self.chunk(left).relu()) * right


def test_batch_norm_of_tensors_with_gaps() -> None:
    check(Case(Tokens, lambda: (torch.linspace(-2, 2, 60).reshape(5, 2, 6).sin(),)))


def test_gradients_of_zeros_are_not_written_over() -> None:
    def view(h: Tensor) -> Tensor:
        return (h * 2).movedim(1, -1).contiguous().movedim(-1, 1)

    check(Case(lambda: Between(torch.sgn, view), rows, steps=1))


def test_a_product_with_a_zero() -> None:
    """Another way through its backward, and more memory: both as eager, within the budget."""

    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(64, 500))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.scale).prod(-1)

    x = torch.linspace(0.9, 1.1, 32000).reshape(64, 500)
    model = Product()
    plan = memopt.plan(model, x, strategy="olla", progress=False)
    planned = plan.apply(model)
    for zeros in (0, 1, 2):
        given = x.clone()
        given[3, :zeros] = 0
        (expected,) = torch.autograd.grad(model(given).sum(), model.scale)
        planned(given).sum().backward()
        assert torch.equal(model.scale.grad, expected)
        model.scale.grad = None
        assert plan.check(model, given).measured_peak_bytes <= plan.peak_bytes


def test_a_product_in_a_checkpointed_part() -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 30)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda h: self.layer(h).prod(-1), x, use_reentrant=False)

    check(Case(Product, lambda: (torch.linspace(1, 2, 48).reshape(8, 6),), steps=1))


@pytest.mark.parametrize("factor", [1.0, 0.0])
def test_products_of_another_layout(factor: float) -> None:
    """Their gradient has one memory layout, whether a factor is 0 or not."""

    def view(h: Tensor) -> Tensor:
        return h.view(2, 4, 5, 6).permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)

    class Channels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 120)

        def forward(self, x: Tensor) -> Tensor:
            h = view(self.layer(x) + 2)
            return (h * factor).prod(1) + h.prod() + (h * factor).cumprod(2).sum(1)

    check(Case(Channels, lambda: (torch.linspace(-1, 1, 12).reshape(2, 6),)))


def test_what_is_not_to_be_computed_is_not() -> None:
    model, x = nn.Linear(3, 3), torch.randn(2, 3)
    assert computing_device(model, to_call(x)) == torch.device("cpu")
    assert computing_device(model.to("meta"), to_call(x)) is None
    fakes = Fakes()
    assert computing_device(nn.Linear(3, 3), to_call(fakes.tensor(x))) is None


class OnePixel(nn.Module):
    """Depthwise convolutions of images of one pixel, whose channels may as well be last."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(64, 64, 5, padding=2, groups=64, bias=False)
        self.pointwise = nn.Conv2d(64, 64, 1)
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        images = functional.gelu(self.linear(x).permute(0, 3, 1, 2))
        images = self.pointwise(self.depthwise(images))
        result: Tensor = self.linear(images.permute(0, 2, 3, 1))
        return result


def test_images_of_one_pixel_take_the_kernels_of_eager() -> None:
    model, x = OnePixel(), torch.randn(2, 1, 1, 64)
    plan = memopt.plan(model, (x,), strategy="store-all", progress=False)
    planned = plan.apply(model)
    planned(x).sum().backward()
    model.zero_grad(set_to_none=True)
    with metered(torch.device("cpu")) as use:
        planned(x).sum().backward()
    assert use.peak_bytes == pytest.approx(plan.peak_bytes - plan.resident_bytes, rel=0.01)


def test_one_element_has_the_same_bytes_with_any_stride() -> None:
    """Such as the pivots of a factorisation of one row: they are contiguous, with stride 2."""
    pivots = torch.tensor([7, 8, 9], dtype=torch.int32).as_strided((1,), (2,))
    assert equal_bytes(pivots, torch.tensor([7], dtype=torch.int32))
    assert not equal_bytes(pivots, torch.tensor([8], dtype=torch.int32))
    columns = torch.arange(6.0).reshape(2, 3)
    assert equal_bytes(columns.t().contiguous().t(), columns)


class WritesIntoASlice(nn.Module):
    """A step that copies views, in copies of the storages that they look into."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) + 1
        slice_ = y[..., 1:]
        slice_.mul_(2)
        return y + slice_.sum()


@pytest.mark.parametrize("kernels", ["aten", "compiled"])
def test_copies_of_views_are_as_large_in_every_trace(kernels: str) -> None:
    """torch's cache of fake results forgets how large they are: the second trace had others."""
    model = WritesIntoASlice()
    plan = memopt.plan(
        model, torch.ones(4, 8), strategy="store-all", kernels=kernels, cache=False, progress=False
    )
    assert "aten.copy.default" in {one.target for one in plan.graph.operators}
    again = copy.deepcopy(model)
    plan.apply(again)(torch.ones(4, 8)).sum().backward()
    model(torch.ones(4, 8)).sum().backward()
    assert again.layer.weight.grad is not None
    torch.testing.assert_close(again.layer.weight.grad, model.layer.weight.grad)


_COPIES: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda view: torch.ops.aten.copy.default(view, torch.ones(4, 3)),
    "slice": lambda view: torch.slice_scatter(view, torch.ones(4, 1), 1, 0, 1),
    "select": lambda view: torch.select_scatter(view, torch.ones(4), 1, 0),
    "diagonal": lambda view: torch.diagonal_scatter(view, torch.ones(3)),
    "strided": lambda view: torch.as_strided_scatter(view, torch.ones(2, 2), (2, 2), (8, 1), 10),
}


@pytest.mark.parametrize("device", [torch.device("cpu"), None])
@pytest.mark.parametrize("name", list(_COPIES))
def test_fake_copies_of_views_have_the_storages_of_real_ones(
    name: str, device: torch.device | None
) -> None:
    def size_bytes() -> int:
        copied = _COPIES[name](torch.ones(6, 8)[1:5, 2:5])
        assert copied.storage_offset() == 10
        return copied.untyped_storage().nbytes()

    with FakeTensorMode(), layouts_of_kernels(device):
        fake = [size_bytes() for _ in range(2)]
    assert fake == [size_bytes()] * 2


class ChangesAView(nn.Module):
    """An update of a view of given strides."""

    def __init__(self, size: tuple[int, int], stride: tuple[int, int]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.size, self.stride = size, stride

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * 1
        y.as_strided(self.size, self.stride).add_(1)
        return y


@pytest.mark.parametrize(
    ("size", "stride"), [((2, 2), (1, 1)), ((20, 3), (1, 1)), ((3, 4), (3, 2))]
)
def test_changing_elements_that_are_the_same_memory_is_refused(
    size: tuple[int, int], stride: tuple[int, int]
) -> None:
    """Eager added one or two to such an element, a planned step always one."""
    with pytest.raises(memopt.CaptureError, match="elements are the same memory"):
        capture(ChangesAView(size, stride), to_call((torch.ones(4, 8),)))


@pytest.mark.parametrize(("size", "stride"), [((2, 2), (8, 1)), ((3, 2), (2, 3)), ((1, 3), (0, 1))])
def test_changing_elements_that_interleave_is_not(
    size: tuple[int, int], stride: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    model, given = ChangesAView(size, stride), torch.randn(4, 8)
    plan = memopt.plan(model, given, strategy="store-all", cache=False, progress=False)
    assert torch.equal(plan.apply(model)(given), model(given))


class AsksForStrides(nn.Module):
    """A view by the strides that a tensor has: batch norm's result is row-major, whatever it is
    given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x.transpose(2, 3) * 2)
        return y.as_strided(y.shape, y.stride())


def test_strides_that_a_model_asks_for_are_those_of_its_kernels() -> None:
    """Torch described batch norm's result with the strides of what it was given."""
    torch.manual_seed(0)
    model = AsksForStrides()
    twin, x = copy.deepcopy(model), torch.randn(2, 4, 5, 6)
    plan = memopt.plan(model, x, strategy="store-all", cache=False, progress=False)
    assert torch.equal(plan.apply(model)(x), twin(x))


class Swapped(nn.Module):
    """Batch norm of a transposed tensor, and a backward that looks at its gradient as rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm, self.after = nn.BatchNorm1d(6), nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        t = checkpoint(self.first, x, use_reentrant=False)
        t = self.second(t) * (t * 1.1)
        t = functional.threshold(t.masked_fill(t > 1, 0.5), 0.1, 0.3)
        result: Tensor = self.after(self.norm(t.transpose(1, 2)).transpose(1, 2))
        return result


def test_statistics_of_half_precision_are_as_wide_as_the_kernels() -> None:
    """Fake kernels say that batch norm keeps half-precision statistics of half-precision input."""
    with torch.autocast("cpu", torch.bfloat16):
        captured = capture(Swapped(), to_call(torch.randn(8, 5, 6)))
    found = [
        pytree.tree_leaves(node.meta["val"])
        for node in captured.module.graph.nodes
        if "batch_norm_backward" in str(node.target)
    ]
    assert [values[0].stride() for values in found] == [(30, 6, 1), (30, 5, 1)]


@pytest.mark.parametrize("budget", ["min", None])
def test_half_precision_of_swapped_dimensions_is_as_in_eager(budget: str | None) -> None:
    torch.manual_seed(0)
    model, x = Swapped(), torch.randn(8, 5, 6)
    eager = copy.deepcopy(model)
    with torch.autocast("cpu", torch.bfloat16):
        plan = memopt.plan(model, x, budget=budget, strategy="revolve", cache=False, progress=False)
        planned = plan.apply(model)
        for one in (eager, planned):
            one(x).float().square().sum().backward()
    for name, parameter in eager.named_parameters():
        assert equal_bytes(model.get_parameter(name).grad, parameter.grad), name


def test_maxima_without_a_gradient_lie_as_the_kernel_leaves_them() -> None:
    """Batch norm adds in the order in memory: its statistics tell the layouts apart."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            pools = (functional.max_pool1d(x, 2), nn.MaxPool1d(2, return_indices=True)(x)[0])
            h = self.layer(x.transpose(1, 2)).transpose(1, 2)
            return sum(map(self.norm, (*pools, torch.max_pool1d(h, 2))))

    torch.manual_seed(0)
    model, x = Pooling(), torch.randn(4, 6, 5).transpose(1, 2)
    twin = copy.deepcopy(model)
    plan = memopt.plan(model, x, strategy="store-all", progress=False)
    assert torch.equal(twin(x), plan.apply(model)(x))
    assert all(map(torch.equal, twin.buffers(), model.buffers()))
