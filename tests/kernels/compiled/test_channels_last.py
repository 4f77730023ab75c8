"""Images in channels-last order: what convolutions read, and what a step returns all the same."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Interpreter
from torch.nn import functional
from torch.utils import _pytree as pytree

import memopt
from memopt.capture.capture import capture
from memopt.capture.training_call import training_call
from memopt.kernels.compiled import choice
from memopt.kernels.compiled.channels_last import computes_alike, in_channels_last
from memopt.step.build import build
from memopt.step.captured import Captured
from memopt.step.inputs import Call
from memopt.step.memory_layout import same_strides
from memopt.step.signature import call_signature
from tests.zoo import FAMILIES, Family

IMAGE = (2, 3, 8, 8)


class Images(nn.Module):
    """Convolutions with a skip between them; at the end a view that is bound to an order."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norm, self.up = nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.point = nn.Conv2d(4, 4, 1)
        self.last = nn.Linear(8 * 64, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        y = self.up(functional.max_pool2d(self.point(self.second(x)), 2))
        z: Tensor = self.last(torch.cat([x, y], dim=1).flatten(1))
        return z


class Strided(nn.Module):
    """Relies on where the elements of an image are in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).as_strided((2, 4), (256, 64))


class TwoViews(nn.Module):
    """Returns an image and another view of it: copies would not share their memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        image = self.conv(x)
        return image, image.detach()


OTHERS = [Strided(), TwoViews(), nn.Sequential(nn.Flatten(), nn.Linear(192, 2))]


def captured(model: nn.Module, *shape: int) -> Captured:
    return capture(model, Call((torch.randn(*shape),), {}))


def returned(model: nn.Module, step: Captured) -> list[Tensor]:
    """Results of the captured graph on the model's parameters and inputs, and on ones."""
    given: list[Any] = [primal.value(model, step.call.leaves) for primal in step.primals]
    given += [torch.ones(tuple(node.meta["val"].shape)) for node in step.tangents]
    with torch.no_grad():
        results = Interpreter(step.module).run(*given, enable_io_processing=False)
    return [value for value in pytree.tree_leaves(results) if isinstance(value, Tensor)]


def all_strides(graph: torch.fx.Graph) -> list[tuple[int, ...]]:
    """How the tensors of a graph are laid out."""
    values = (node.meta.get("val") for node in graph.nodes)
    return [tuple(value.stride()) for value in values if isinstance(value, Tensor)]


def test_a_gradient_that_is_one_value_for_many_places_is_no_obstacle() -> None:
    """Of a global average: its elements share memory, into which nothing can be copied."""
    torch.manual_seed(0)
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Tanh())
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), pooled)
    step = captured(model, *IMAGE)
    before = returned(model, step)
    put = in_channels_last(step)
    assert put is not None
    for value, expected in zip(returned(model, put.captured), before, strict=True):
        torch.testing.assert_close(value, expected)


OF_IMAGES = [
    pytest.param(family, marks=[] if family.name == "resnet50" else [pytest.mark.slow])
    for family in FAMILIES
    if family.name not in ("bert", "gpt2", "llama", "mlp", "r3d_18")
]


@pytest.mark.parametrize("family", OF_IMAGES, ids=str)
def test_families_of_images_can_be_in_either_order(family: Family) -> None:
    model = family.build("tiny")
    step = capture(model, training_call(model, family.inputs("tiny")))
    assert in_channels_last(step) is not None


def test_a_view_that_is_bound_to_an_order_is_no_operator() -> None:
    """It lies in the row-major copy that it reads."""
    model = Images()
    step = captured(model, *IMAGE)
    before = [str(node.target) for node in build(model, step).nodes]
    put = in_channels_last(step)
    assert put is not None
    after = [str(node.target) for node in build(model, put.captured).nodes]
    assert "aten.view.default" in {str(node.target) for node in step.module.graph.nodes}
    assert sorted(set(after) - {"aten.clone.default"}) == sorted(set(before))


@pytest.mark.parametrize("faster", [True, False])
def test_the_faster_order_is_taken(faster: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever was measured; compiled kernels run in both."""
    seconds = iter((1.0, 2.0) if faster else (2.0, 1.0))  # in channels-last order, row-major
    monkeypatch.setattr(choice, "_total_s", lambda *_, **__: next(seconds))
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), torch.randn(*IMAGE)
    plan = memopt.plan(model, x, strategy="store-all", kernels="compiled", progress=False)
    assert plan.record is not None
    assert plan.record.channels_last is faster
    torch.testing.assert_close(plan.apply(model)(x), model(x), rtol=1e-4, atol=1e-4)


def test_convolutions_read_channels_last_and_results_are_as_before() -> None:
    torch.manual_seed(0)
    model = Images()
    step = captured(model, *IMAGE)
    before = returned(model, step)
    graph = step.module.graph
    text, strides = str(graph), all_strides(graph)
    put = in_channels_last(step)
    assert put is not None
    changed = put.captured
    graph.lint()
    for node in graph.nodes:
        for place in {"aten.convolution": (0,), "aten.convolution_backward": (0, 1)}.get(
            str(node.target).removesuffix(".default"), ()
        ):
            value = node.args[place].meta["val"]
            assert value.is_contiguous(memory_format=torch.channels_last), node
    after = returned(model, changed)
    assert len(before) == len(after)
    for old, new in zip(before, after, strict=True):
        assert same_strides(old, new.stride())
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)
    output = graph.output_node()
    nodes = (one for one in (*changed.forward_outputs, *changed.gradients) if one is not None)
    assert set(nodes) <= set(output.all_input_nodes)
    # What lies between two convolutions stays in the order: an image is copied once at most.
    copies = [n for n in graph.nodes if n.kwargs.get("memory_format") is torch.channels_last]
    assert len({n.args[0] for n in copies}) == len(copies) <= 3
    assert all_strides(graph) != strides
    put.undo()
    graph.lint()
    assert str(graph) == text
    assert all_strides(graph) == strides


class Checked(nn.Module):
    """Checks, by operators that give nothing, that classes are in range."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        image = self.conv(x)
        return image * functional.one_hot(image.argmax(1), 4).permute(0, 3, 1, 2)


def test_operators_that_give_nothing_are_left() -> None:
    step = captured(Checked(), *IMAGE)
    assert torch.__version__ < (2, 13) or any(
        "_assert_async" in str(node.target) for node in step.module.graph.nodes
    )
    put = in_channels_last(step)
    assert put is not None
    put.undo()


@pytest.mark.parametrize("groups", [1, 3])
def test_kernels_that_mind_the_order_read_row_major_copies(groups: int) -> None:
    """The backward of a weight norm goes through memory as if its filter's gradient were row-major;
    a convolution of images with channels last gives another order."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 6, 3, groups=groups)),
        nn.utils.parametrizations.spectral_norm(nn.Conv2d(6, 4, 3)),
        nn.Sigmoid(),
        nn.PixelShuffle(2),
        nn.Upsample(scale_factor=2, mode="bilinear"),
    )
    model.eval()  # spectral norm draws nothing
    step = captured(model, *IMAGE)
    before = returned(model, step)
    put = in_channels_last(step)
    assert put is not None
    for old, new in zip(before, returned(model, put.captured), strict=True):
        torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)


def test_orders_are_compared_on_numbers() -> None:
    filters, norms = torch.empty(3, 4, 2, 2), torch.empty(3, 1, 1, 1)
    last = filters.to(memory_format=torch.channels_last)
    aten, cpu = torch.ops.aten, torch.device("cpu")

    def alike(target: Any, *rest: Any) -> bool:
        calls = (call_signature(target, (one, *rest), {}) for one in (filters, last))
        return computes_alike(*calls, cpu)

    backward = aten._weight_norm_interface_backward.default
    assert not alike(backward, filters, norms, norms, 0)
    assert alike(aten.max_pool2d_with_indices.default, [2, 2])
    assert alike(aten.cumsum.default, 2)
    assert alike(aten.argmax.default, 1)


@pytest.mark.parametrize("model", OTHERS)
def test_other_steps_are_left_as_they_are(model: nn.Module) -> None:
    step = captured(model, *IMAGE)
    before = str(step.module.graph)
    assert in_channels_last(step) is None
    assert str(step.module.graph) == before


@pytest.mark.slow
def test_compiled_steps_are_eagers_and_every_plan_has_their_bits(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Images(), torch.randn(*IMAGE)
    twin = copy.deepcopy(model)

    def gradients(run: nn.Module, of: nn.Module) -> list[Tensor]:
        state = copy.deepcopy(of.state_dict())
        run(x).square().sum().backward()
        found = [p.grad.clone() for p in of.parameters() if p.grad is not None]
        of.zero_grad(set_to_none=True)
        of.load_state_dict(state)
        return found

    first = memopt.plan(model, x, strategy="store-all", kernels="compiled", progress=False)
    expected, kept = gradients(model, model), gradients(first.apply(model), model)
    for old, new in zip(expected, kept, strict=True):
        assert same_strides(old, new.stride())
        torch.testing.assert_close(new, old, rtol=1e-3, atol=1e-4)
    memopt.plan(first.profiled, budget="min", progress=False).save(tmp_path / "plan.json")
    loaded = memopt.load(tmp_path / "plan.json").apply(twin, x)
    assert all(map(torch.equal, gradients(loaded, twin), kept))
