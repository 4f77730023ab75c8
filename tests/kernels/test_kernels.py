"""Every implementation alone against the operator it stands in for, on random inputs."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Interpreter, Node
from torch.fx.node import map_arg
from torch.nn import functional

from memopt.capture.capture import capture
from memopt.kernels import attach
from memopt.kernels.bits import pack, packed_bytes, unpack
from memopt.step.build import Lowering, build
from memopt.step.captured import Captured
from memopt.step.in_place import in_place_call, overwritable
from memopt.step.inputs import to_call

F64 = torch.float64


class _All(Interpreter):
    """Keeps every value of the joint graph."""

    def __init__(self, captured: Captured) -> None:
        super().__init__(captured.module, garbage_collect_values=False)
        self.values: dict[Node, Any] = {}

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        self.values[n] = value
        return value


def _run(model: nn.Module, x: torch.Tensor, seed: int) -> tuple[Lowering, dict[Node, Any]]:
    """The lowering with alternatives, and the value of every node and alternative."""
    captured = capture(model, to_call(x))
    lowering = attach(build(model, captured))
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    given = [x if p.kind == "input" else state[p.name].detach() for p in captured.primals]
    torch.manual_seed(seed)
    fakes = [t.meta["val"] for t in captured.tangents]
    tangents = [torch.randn(v.shape, dtype=torch.float32).to(v.dtype) for v in fakes]
    runner = _All(captured)
    with torch.no_grad():
        torch.manual_seed(seed)
        runner.run(given, tangents)
    return lowering, runner.values


def _check(model: nn.Module, x: torch.Tensor, seed: int) -> set[str]:
    """Compare every alternative of a model's step; the names of those that were."""
    lowering, values = _run(model, x, seed)
    seen = set()
    for (op, name), node in lowering.alternatives.items():
        operator = lowering.graph.operators[op]
        choice = next(c for c in operator.implementations if c.name == name)
        expected = values[lowering.nodes[op]]
        before = {n: values[n]._version for n in node.all_input_nodes}
        own = lowering.nodes[op]
        with torch.no_grad():
            torch.manual_seed(seed)
            own.target(*map_arg(own.args, values.__getitem__), **own.kwargs)  # type: ignore[operator]  # a kernel
            drawn = torch.get_rng_state()
            torch.manual_seed(seed)
            found = node.target(*map_arg(node.args, values.__getitem__))  # type: ignore[operator]  # a kernel
        assert torch.equal(torch.get_rng_state(), drawn)
        if choice.in_place:
            _same_in_place(node, values, _tuple(found))
        assert isinstance(found, (tuple, list)) == isinstance(node.meta["val"], (tuple, list))
        assert all(values[n]._version == v for n, v in before.items()), "changed its argument"
        by_tensor = dict(zip(lowering.storages[lowering.nodes[op]], _tuple(expected), strict=True))
        convolution = "convolution" in operator.target  # norms: test_norms.py
        reference = _reference(lowering, op, values, False) if convolution else {}
        scale = _reference(lowering, op, values, True) if convolution else {}
        for tensor, value in zip(lowering.storages[node], _tuple(found), strict=True):
            if tensor is None:
                continue
            if tensor not in by_tensor:
                extra = lowering.bases[tensor]
                values[extra] = value
                declared = lowering.graph.tensors[tensor].size_bytes
                assert value.untyped_storage().nbytes() == declared
                continue
            _compare(value, by_tensor[tensor], choice.exact)
            if convolution:
                _within(value, reference[tensor], scale[tensor])
        seen.add(f"{operator.target.split('.')[1]} {name}")
    return seen


def _same_in_place(node: Node, values: dict[Node, Any], expected: tuple[Any, ...]) -> None:
    """Written over the argument that it may overwrite: the same bits."""
    (taken,) = overwritable(node)
    target, args, kwargs = in_place_call(node, taken)
    own = values[taken].clone(memory_format=torch.preserve_format)
    given = {n: own if n is taken else values[n] for n in node.all_input_nodes}
    with torch.no_grad():
        found = target(*map_arg(args, given.__getitem__), **kwargs)
    assert _tuple(found)[0].data_ptr() == own.data_ptr()
    for a, b in zip(_tuple(found), expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (a.stride() == b.stride() and torch.equal(_bits(a), _bits(b)))


def _bits(value: torch.Tensor) -> torch.Tensor:
    return value.contiguous().reshape(-1).view(torch.uint8)


def _tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value,)


def _compare(found: torch.Tensor, expected: torch.Tensor, exact: bool) -> None:
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert found.stride() == expected.stride()
    if exact:
        assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


def _reference(
    lowering: Lowering, op: int, values: dict[Node, Any], absolute: bool
) -> dict[int | None, Any]:
    """The operator in float64, given the same values or their absolute values: tensor → result."""
    operator = lowering.nodes[op]

    def wide(node: Node) -> Any:
        value = values[node].to(F64)
        return value.abs() if absolute else value

    with torch.no_grad():
        result = operator.target(*map_arg(operator.args, wide))  # type: ignore[operator]  # a kernel
    return dict(zip(lowering.storages[operator], _tuple(result), strict=True))


def _within(found: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor) -> None:
    """Off by at most 64ε of the sum of each element's terms' absolute values."""
    step = 64 * torch.finfo(found.dtype).eps
    assert bool(((found.to(F64) - reference).abs() <= step * scale + 1e-30).all())


DTYPES = [torch.float32, F64, torch.bfloat16]
CLIPPED = [nn.ReLU(), nn.ReLU6(inplace=True), nn.Hardtanh(-0.3, 0.4), nn.LeakyReLU(0.2), nn.Tanh()]
SMOOTH = [nn.Hardsigmoid(), nn.ELU(0.7), nn.Softplus(2.0)]


class Scaled(nn.Module):
    """A parameter before and after, so that nothing is trivial."""

    def __init__(self, inner: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.tensor(1.3, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(x * self.scale) * self.scale
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "inner", [*CLIPPED, *SMOOTH, nn.Sigmoid(), nn.Softmax(-1), nn.Dropout(0.3)]
)
def test_elementwise(inner: nn.Module, dtype: torch.dtype) -> None:
    rng = random.Random(str(inner))
    names: set[str] = set()
    for seed in (0, 1, 3):
        shape = [rng.randint(1, 7) for _ in range(rng.randint(1, 4))]
        x = torch.randn(shape).to(dtype)
        if seed == 1:
            x.view(-1)[0] = 0.0
            x.view(-1)[-1] = float("nan")
        if seed == 3:
            x = torch.randn([*shape, 2]).to(dtype)[..., 0]
        names |= _check(Scaled(inner, dtype), x, seed)
    assert names


class Twice(nn.Module):
    """One input through an operator with two settings."""

    def __init__(self, function: Any, *settings: tuple[float, ...]) -> None:
        super().__init__()
        self.function, self.settings = function, settings

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((self.function(x, *given) * (i + 1) for i, given in enumerate(self.settings)), x)


@pytest.mark.parametrize(
    ("function", "settings"),
    [
        (functional.elu, ((0.5,), (2.0,))),
        (functional.softplus, ((1.0,), (4.0,))),
        (functional.hardtanh, ((-0.2, 0.2), (0.0, 6.0))),
        (functional.hardtanh, ((0.0, 6.0), (0.0, 6.0))),
        (functional.hardsigmoid, ((), ())),
        (functional.leaky_relu, ((0.1,), (0.3,))),
    ],
)
def test_one_input_through_an_operator_twice(function: Any, settings: Any) -> None:
    """Each backward gets what its own forward made, and no alternative is there twice."""
    model, x = Scaled(Twice(function, *settings), torch.float32), torch.randn(9, 7)
    assert _check(model, x, 0)
    lowering, values = _run(model, x, 0)
    for (op, name), node in lowering.alternatives.items():
        if name == "output":
            own = lowering.nodes[op]
            expected, found = (
                n.target(*map_arg(n.args, values.__getitem__))  # type: ignore[operator]  # a kernel
                for n in (own, node)
            )
            assert torch.allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    "window", [(2, 2, 0, 1), (3, 2, 1, 1), (3, 1, 1, 2), ((2, 3), (1, 2), 0, 1)]
)
def test_max_pool(window: tuple[Any, ...], dtype: torch.dtype) -> None:
    size, stride, padding, dilation = window
    for seed, ceil in enumerate((False, True)):
        pool = nn.MaxPool2d(size, stride, padding, dilation, ceil_mode=ceil)
        names = _check(Scaled(pool, dtype), torch.randn(3, 2, 11, 9 + seed, dtype=dtype), seed)
        assert len(names) == 3


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_norms_and_convolutions(dtype: torch.dtype) -> None:
    rng = random.Random(1)
    names: set[str] = set()
    for seed in range(3):
        channels, groups = rng.choice([(4, 1), (4, 2), (4, 4)])
        norm = nn.BatchNorm2d(8)
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.uniform_(norm.bias, -1.0, 1.0)
        layer = nn.LayerNorm(6, bias=seed != 1)
        nn.init.uniform_(layer.weight, -2.0, -0.5)
        convolution = nn.Conv2d(
            2 * channels, 8, 3, padding=1, groups=groups, bias=seed != 2, dtype=dtype
        )
        x = torch.randn(9, 2 * channels, 5, 6, dtype=dtype)
        names |= _check(Scaled(nn.Sequential(convolution, norm.to(dtype)), dtype), x, seed)
        names |= _check(Scaled(layer.to(dtype), dtype), x, seed)
    assert len(names) == 12, names


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 64, 1001])
def test_bits(count: int) -> None:
    mask = torch.rand(count) < 0.5
    packed = pack(mask)
    assert packed.numel() == packed_bytes(count)
    assert torch.equal(unpack(packed, mask.shape), mask)
