"""Every algorithm of convolutions, forward and each gradient, against float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.fx.node import map_arg

from memopt.kernels import convolution
from tests.kernels.test_kernels import F64, Scaled, _reference, _run, _tuple, _within


def case(rng: random.Random, seed: int, dtype: torch.dtype) -> tuple[nn.Module, torch.Tensor]:
    """A convolution and images of random sizes."""
    window = (rng.randint(1, 5), rng.randint(1, 5))
    stride, dilation = (rng.randint(1, 2), rng.randint(1, 2)), rng.choice([1, 1, 2])
    padding = (rng.randint(0, 2), rng.randint(0, 2))
    inside, outside = rng.randint(1, 5), rng.randint(1, 5)
    layer = nn.Conv2d(
        inside, outside, window, stride, padding, dilation, bias=seed < 2, dtype=dtype
    )
    images = torch.randn(
        9 if seed == 1 else rng.randint(1, 9), inside, rng.randint(9, 14), rng.randint(9, 14)
    )
    return layer, images.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
def test_every_algorithm_against_float64(dtype: torch.dtype) -> None:
    rng = random.Random(3)
    seen: set[str] = set()
    for seed in range(4):
        layer, images = case(rng, seed, dtype)
        lowering, values = _run(Scaled(layer, dtype), images, seed)
        for (op, name), node in lowering.alternatives.items():
            operator = lowering.nodes[op]
            forward = str(operator.target) == "aten.convolution.default"
            with torch.no_grad():
                found = node.target(*map_arg(node.args, values.__getitem__))  # type: ignore[operator]  # a kernel
            reference = _reference(lowering, op, values, False)
            scale = _reference(lowering, op, values, True)
            known = dict(zip(lowering.storages[operator], _tuple(values[operator]), strict=True))
            for tensor, value in zip(lowering.storages[node], _tuple(found), strict=True):
                if tensor is None:
                    continue
                assert value.dtype == known[tensor].dtype
                assert value.stride() == known[tensor].stride()
                _within(value, reference[tensor], scale[tensor])
            seen.add(f"{'forward' if forward else 'backward'} {name}")
    expected = {f"forward {name}" for name in ("native", "split 2", "split 8")}
    expected |= {
        f"backward {side} gradient{name}" for side in ("input", "weight") for name in ("", " split")
    }
    expected.add("backward native")
    assert seen == expected


def test_one_gradient_alone_is_the_same_bits() -> None:
    rng = random.Random(0)
    for seed in range(30):
        torch.manual_seed(seed)
        dims, groups, transposed = rng.choice([1, 2, 2, 3]), rng.choice([1, 1, 2, 4]), seed % 4 == 0
        dtype = rng.choice([torch.float32, F64])
        inside, outside = groups * rng.randint(1, 4), groups * rng.randint(1, 4)
        steps = [[rng.randint(a, b) for _ in range(dims)] for a, b in ((1, 2), (0, 2), (1, 2))]
        window = [rng.randint(1, 3) for _ in range(dims)]
        x = torch.randn(rng.randint(1, 4), inside, *[rng.randint(7, 9) for _ in range(dims)])
        channels = (inside, outside // groups) if transposed else (outside, inside // groups)
        x, weight = x.to(dtype), torch.randn(*channels, *window, dtype=dtype)
        more = (*steps, transposed, [0] * dims, groups)
        g = torch.randn_like(torch.ops.aten.convolution(x, weight, None, *more))
        given = (weight, [outside], *more)
        both = torch.ops.aten.convolution_backward(g, x, *given, [True, True, True])
        alone = (
            *convolution.INPUT(g, tuple(x.shape), *given),
            *convolution.WEIGHT(True, g, x, *given),
        )
        for a, b in zip(alone, both, strict=True):
            assert torch.equal(a, b)
            assert a.stride() == b.stride()
