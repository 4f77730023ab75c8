"""Kernels that write over an argument: the same bits, and one storage less."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Node
from torch.nn import functional

import memopt
from memopt.programs.in_place import with_in_place, without_in_place
from memopt.programs.instructions import Compute
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.step.in_place import _INTO, _OVER_FIRST, in_place_call, overwritable
from tests.executor.harness import Case, Prepared, check, prepare

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": functional.relu,
    "relu6": functional.relu6,
    "leaky_relu": functional.leaky_relu,
    "hardswish": functional.hardswish,
    "hardsigmoid": functional.hardsigmoid,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "neg": torch.neg,
    "exp": torch.exp,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp_min(0.1),
    "masked_fill": lambda x: x.masked_fill(torch.ones(1, dtype=torch.bool), 0.5),
    "scalars": lambda x: ((x + 2) * 3 - 1) / 7,
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(1),
}


class Layers(nn.Module):
    """Two convolutions with batch norms and a skip; `activation` after each."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.scale = nn.Parameter(torch.randn(8, 1, 1))
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        y = self.activation(self.norm(self.first(x)))
        z = self.norm(self.second(y)) * self.scale + y
        return self.activation(z - self.scale).flatten(1)


def calls(prepared: Prepared) -> list[tuple[Node, Node]]:
    """(kernel call, argument that it may overwrite) of the captured graph."""
    return [(n, a) for n in prepared.lowering.nodes for a in overwritable(n)]


def bits(value: Tensor) -> Tensor:
    """The bytes of a tensor."""
    return value.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_twins_in_half_precision(dtype: torch.dtype) -> None:
    """There an operator's forms may round numbers differently (mul_.Scalar does)."""
    x, y = torch.randn(2, 300).to(dtype)
    others: dict[str, tuple[object, ...]] = {
        "Tensor": (y,),
        "Scalar": (1.111,),
        "masked_fill": (x > 0, 1.111),
        "clamp": (-0.111, 0.777),
        "clamp_min": (0.111,),
    }
    for kernel, over in _OVER_FIRST.items():
        _, name, form = str(kernel).split(".")
        more = others.get(name, others.get(form, ()))
        assert torch.equal(over(x.clone(), *more), kernel(x, *more)), kernel
    more_of = {"leaky_relu": (0.111, False), "hardtanh": (-0.111, 0.777), "threshold": (0.111,)}
    for kernel, (into, keyword) in _INTO.items():
        name = str(kernel).split(".")[1]
        if name.endswith("_data"):
            args: tuple[object, ...] = (x, y, 0, dtype)
        elif name.endswith("softmax"):
            args = (x, 0, False)
        else:
            args = (x, y, *more_of.get(name.removesuffix("_backward"), ()))
        taken = x.clone()
        into(taken, *args[1:], **{keyword: taken})
        assert torch.equal(taken, kernel(*args)), kernel


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_same_bits_over_an_argument(name: str, memory_format: torch.memory_format) -> None:
    torch.manual_seed(0)
    images = torch.randn(2, 3, 9, 7).to(memory_format=memory_format)
    found = calls(prepare(Layers(ACTIVATIONS[name]), images))
    assert found, "nothing can be computed in place"
    for node, taken in found:
        values = {
            a: torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).normal_()
            if v.is_floating_point()
            else torch.randint(0, 2, v.shape).to(v.dtype)
            for a in node.all_input_nodes
            for v in (a.meta["val"],)
        }
        args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        expected = node.target(*args, **kwargs)  # type: ignore[operator]  # a kernel
        target, args, kwargs = in_place_call(node, taken)
        args, kwargs = torch.fx.node.map_arg((args, kwargs), values.__getitem__)
        result = target(*args, **kwargs)
        assert result.data_ptr() == values[taken].data_ptr()
        assert result.stride() == expected.stride()
        assert torch.equal(bits(result), bits(expected)), node


@pytest.mark.parametrize("name", ["relu", "leaky_relu", "tanh", "hardswish"])
def test_steps_equal_the_unplanned_ones(name: str) -> None:
    check(Case(lambda: Layers(ACTIVATIONS[name]), lambda: (torch.randn(2, 3, 9, 7),)))


def test_predicted_peak_is_measured_and_lower() -> None:
    torch.manual_seed(0)
    model, images = Layers(functional.relu), torch.randn(4, 3, 64, 64)
    plan = memopt.plan(model, images, strategy="store-all", progress=False)
    graph, program = plan.graph, plan.program
    assert graph is not None
    assert program is not None
    taken = [x for x in program if isinstance(x, Compute) and x.in_place is not None]
    # Both ReLUs, the sum with the skip, and the differences before the last.
    assert len(taken) >= 4
    assert replay(graph, without_in_place(program)).peak_bytes >= plan.peak_bytes
    assert "relu_" in plan.code
    checked = plan.check(model, images)
    assert checked.measured_peak_bytes == pytest.approx(plan.peak_bytes, rel=0.005)


class Reads(nn.Module):
    """What must not be overwritten: an input, an output, what others read."""

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first = x.relu()
        kept = y * 2
        return first, kept.tanh() + kept.relu(), (x + y).sigmoid()


def test_results_and_inputs_and_what_others_read_stay() -> None:
    def inputs() -> tuple[Tensor, Tensor]:
        return torch.randn(4, 4, requires_grad=True), torch.randn(4, 4)

    check(Case(Reads, inputs))
    graph = prepare(Reads(), inputs()).graph
    for operator in graph.operators:
        for tensor in operator.in_place:
            assert tensor not in graph.resident | graph.kept
            assert len(graph.readers[tensor]) == 1
    program = with_in_place(graph, store_all(graph))
    assert any(isinstance(x, Compute) and x.in_place is not None for x in program)


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda x: (x * 2) + torch.ones(1, dtype=torch.float64), id="another dtype"),
        pytest.param(lambda x: (x * 2)[:, :1] + x.sum(), id="part of a storage"),
        pytest.param(lambda x: (x * 2).t() * torch.ones(4, 4), id="other strides"),
        pytest.param(lambda x: (x * 2).sum(1, keepdim=True) + x.sum(1), id="broadcast"),
        pytest.param(lambda x: (y := x.cos()) * y, id="both arguments"),
    ],
)
def test_layouts_that_do_not_allow_it(model: Callable[[Tensor], Tensor]) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return model(x).cos()

    prepared = prepare(Model(), torch.randn(4, 4, requires_grad=True))
    forward = [n for n, _ in calls(prepared) if n.meta.get("partitioner_tag") != "is_backward"]
    names = {str(n.target) for n in forward}
    assert not names & {"aten.add.Tensor"}
    check(Case(Model, lambda: (torch.randn(4, 4, requires_grad=True),)))


def test_calls_in_place_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A twin that rounds otherwise than its kernel is not offered."""

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x.cos() * 2).exp()

    def offered() -> set[str]:
        graph = prepare(Model(), torch.randn(5, 7, requires_grad=True)).graph
        return {operator.target for operator in graph.operators if operator.in_place}

    mul = torch.ops.aten.mul.Tensor
    assert str(mul) in offered()
    twin = _OVER_FIRST[mul]
    monkeypatch.setitem(_OVER_FIRST, mul, lambda x, y: twin(x, y).add_(1e-6))
    assert str(mul) not in offered()


class Gated(nn.Module):
    """A product in place, before which eager copies what it overwrites: a derivative takes over
    the copy, which the backward alone reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x).mul_(self.second(x))


@pytest.mark.parametrize("budget", [None, "min"])
def test_a_backward_that_runs_again_finds_what_was_saved(budget: str | None) -> None:
    torch.manual_seed(0)
    model, x = Gated(), torch.randn(4, 8)
    plan = memopt.plan(model, x, budget=budget, strategy="store-all", progress=False)
    program = plan.program
    boundary = program.boundary
    assert boundary is not None
    later = [one for one in program.instructions[boundary:] if isinstance(one, Compute)]
    made = {t for one in later for t in one.outputs}
    assert any(one.in_place is not None and one.in_place not in made for one in later)
    planned = plan.apply(model)
    found: dict[str, list[Tensor]] = {"eager": [], "planned": []}
    for label, module in (("eager", model), ("planned", planned)):
        loss = module(x).square().mean()
        for again in (True, True, False):
            loss.backward(retain_graph=again)
            found[label] += [p.grad.clone() for p in model.parameters() if p.grad is not None]
            model.zero_grad()
    assert len(found["eager"]) == 12
    assert all(map(torch.equal, found["eager"], found["planned"]))
