"""Attention's backward written out, against float64."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx.node import map_arg
from torch.nn import functional

from tests.kernels.test_kernels import F64, Scaled, _run, _tuple


class Attention(nn.Module):
    """Queries, keys and values in one tensor (images, heads, rows, 3 · features)."""

    def __init__(self, causal: bool, mask: torch.Tensor | None, scale: float | None) -> None:
        super().__init__()
        self.causal, self.scale = causal, scale
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = x.chunk(3, -1)
        mask = self.mask
        assert mask is None or isinstance(mask, torch.Tensor)
        return functional.scaled_dot_product_attention(
            q, k, v, mask, is_causal=self.causal, scale=self.scale
        )


def references(
    g: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    mask: torch.Tensor | None,
    scale: float | None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(dQ, dK, dV) in float64, and the sums of their terms' absolute values, with a term's error by
    the scores: ε · (1 + the largest sum of a score's terms)."""
    factor = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    scores = factor * q @ k.mT
    most = 1 + (factor * q.abs() @ k.abs().mT).amax()
    if causal:
        scores = scores + torch.full_like(scores[0, 0], -math.inf).triu(1)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf)
    p = scores.softmax(-1)
    dp, wide = g @ v.mT, g.abs() @ v.abs().mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * factor
    least = p * (wide + (p * wide).sum(-1, keepdim=True)) * factor
    found = [ds @ k, ds.mT @ q, p.mT @ g]
    scales = [least @ k.abs(), least.mT @ q.abs(), p.mT @ g.abs()]
    return found, [s * most for s in scales]


@pytest.mark.parametrize("dtype", [torch.float32, F64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "causal", "masked"])
def test_rows_at_a_time(dtype: torch.dtype, kind: str) -> None:
    rng = random.Random(kind)
    for seed in range(3):
        shape = (rng.randint(1, 3), rng.randint(1, 3), rng.randint(1, 33), 3 * rng.randint(1, 9))
        mask = None
        if kind == "masked":
            mask = torch.rand(shape[2], shape[2], generator=torch.manual_seed(seed)) < 0.7
            mask.fill_diagonal_(True)
        scale = None if seed else 0.3
        model = Scaled(Attention(kind == "causal", mask, scale), dtype)
        torch.manual_seed(seed)
        lowering, values = _run(model, torch.randn(shape).to(dtype), seed)
        seen = set()
        for (op, name), node in lowering.alternatives.items():
            operator = lowering.nodes[op]
            assert str(operator.target).endswith("backward.default")
            with torch.no_grad():
                found = node.target(*map_arg(node.args, values.__getitem__))  # type: ignore[operator]  # a kernel
            given: list[Any] = [values[a] for a in operator.args[:4]]  # type: ignore[index]  # nodes
            expected, scales = references(
                *[x.to(F64) for x in given], kind == "causal", mask, scale
            )
            step = 64 * torch.finfo(dtype).eps
            for value, own, right, size in zip(
                found, _tuple(values[operator]), expected, scales, strict=True
            ):
                assert value.stride() == own.stride()
                assert value.dtype == own.dtype
                assert bool(((value.to(F64) - right).abs() <= step * size).all())
            seen.add(name)
        assert seen == {"math", "inputs"}


def test_the_backward_from_inputs_needs_no_output() -> None:
    lowering, _ = _run(
        Scaled(Attention(True, None, None), F64), torch.randn(1, 2, 8, 12).double(), 0
    )
    graph = lowering.graph
    backward = next(o for o in graph.operators if o.target.endswith("backward.default"))
    forward = next(o for o in graph.operators if o.target.endswith("for_cpu.default"))
    assert set(forward.writes) & set(backward.reads)
    choice = next(c for c in backward.implementations if c.name == "inputs")
    assert choice.reads is not None
    assert not set(forward.writes) & set(choice.reads)
