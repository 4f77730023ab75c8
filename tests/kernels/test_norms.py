"""Norms from their output, one kernel at a time: the bound in float64 reference, weights of 0."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memopt.errors import ExecutionError
from memopt.kernels import batch_norm, norms, with_implementations
from memopt.profiler.session import profile_model
from tests.kernels.test_in_plans import QUICK, _gradients, choosing, planned

ATEN = torch.ops.aten
F64 = torch.float64
MASK = [True, True, True]


def _within(found: torch.Tensor, reference: torch.Tensor, scale: torch.Tensor) -> None:
    """Off by at most 64ε(1 + 2·max|b/w|) of the sum of its terms' absolute values."""
    assert found.dtype == torch.float32 or found.dtype == F64
    assert bool(((found.to(F64) - reference).abs() <= scale).all())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("cancelling", [False, True])
@pytest.mark.parametrize("ratio", [0.0, 1.0, 90.0])
def test_batch_norm_from_its_output(dtype: torch.dtype, cancelling: bool, ratio: float) -> None:
    torch.manual_seed(1)
    x = (torch.randn(8, 4, 5, 5) * 3 + 50).to(dtype)
    weight = torch.tensor([0.5, -1.0, 2.0, 1e-3], dtype=dtype)
    bias = weight * ratio
    y, mean, inverse = ATEN.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    mean64, inverse64 = mean.to(F64), inverse.to(F64)
    shape = (1, -1, 1, 1)
    xhat = (x.to(F64) - mean64.view(shape)) * inverse64.view(shape)
    g = torch.randn_like(x)
    if cancelling:
        # What a layer norm right behind sends back: orthogonal to 1 and to x̂.
        over = (0, 2, 3)
        g64 = g.to(F64) - g.to(F64).mean(over, keepdim=True)
        g = (g64 - xhat * (g64 * xhat).mean(over, keepdim=True)).to(dtype)
    found = batch_norm.BATCH_OUTPUT(g, y, weight, bias, inverse, MASK)
    other = batch_norm.BATCH_INPUT(g, x, weight, mean, inverse, MASK)
    reference = ATEN.native_batch_norm_backward(
        g.to(F64), x.to(F64), weight.to(F64), None, None, mean64, inverse64, True, 1e-5, MASK
    )
    step = 64 * torch.finfo(dtype).eps * (1 + 2 * ratio)
    size = g.to(F64).abs()
    most = (1 + xhat.abs()).amax()
    slope = (weight.to(F64) * inverse64).abs().view(shape)
    for gradients in (found, other):
        _within(gradients[0], reference[0], step * slope * size.amax() * most**2)
        _within(gradients[1], reference[1], step * size.sum((0, 2, 3)) * most)
        _within(gradients[2], reference[2], step * size.sum((0, 2, 3)))
        step = 64 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("affine", [False, True])
def test_layer_norm_from_its_output(dtype: torch.dtype, affine: bool) -> None:
    torch.manual_seed(2)
    x = (torch.randn(9, 6) + 20).to(dtype)
    weight = torch.empty(6).uniform_(-2, -0.5).to(dtype) if affine else None
    bias = torch.randn(6).to(dtype) if affine else None
    y, mean, inverse = ATEN.native_layer_norm(x, [6], weight, bias, 1e-5)
    g = torch.randn_like(x)
    wide = [None if v is None else v.to(F64) for v in (weight, bias)]
    found = norms.LAYER_OUTPUT(g, y, [6], inverse, weight, bias, [True, affine, affine])
    reference = ATEN.native_layer_norm_backward(
        g.to(F64), x.to(F64), [6], mean.to(F64), inverse.to(F64), *wide, [True, affine, affine]
    )
    xhat = (x.to(F64) - mean.to(F64)) * inverse.to(F64)
    step = 64 * torch.finfo(dtype).eps * 10
    size, most = g.to(F64).abs(), (1 + xhat.abs()).amax()
    _within(found[0], reference[0], step * inverse.to(F64) * size.amax() * most**2 * 2)
    if affine:
        _within(found[1], reference[1], step * size.sum(0) * most)
        _within(found[2], reference[2], step * size.sum(0))


def test_batch_norm_right_before_layer_norm_holds_in_float64() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LayerNorm(8), nn.Tanh()).double()
    x = torch.rand(16, 6, dtype=F64)
    loss = nn.Sequential(model, _Mean())
    expected = _gradients(loss, model, (x,))
    profiled = with_implementations(profile_model(model, x, options=QUICK), options=QUICK)
    program, used = choosing(profiled.graph, ("output",))
    assert len(used) == 2
    module = nn.Sequential(planned(profiled, model, program, False), _Mean())
    for a, b in zip(_gradients(module, model, (x,)), expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-8, atol=1e-12)


class _Mean(nn.Module):
    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return y.square().mean()


@pytest.mark.parametrize("make", [lambda: nn.BatchNorm1d(8), lambda: nn.LayerNorm(8)])
def test_a_vanishing_weight_is_refused(make: type[nn.Module]) -> None:
    torch.manual_seed(0)
    norm = make()
    model, x = nn.Sequential(nn.Linear(8, 8), norm), torch.rand(16, 8)
    profile = profile_model(model, x, options=QUICK)
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    profiled = with_implementations(profile, options=QUICK)
    program, used = choosing(profiled.graph, ("output",))
    assert used
    with torch.no_grad():
        weight[3] = 0.0
    # Planned now, the alternative is left out.
    later = with_implementations(profile, options=QUICK)
    assert not choosing(later.graph, ("output",))[1]
    # Planned before, the step is refused and no gradient written.
    model.zero_grad()
    with pytest.raises(ExecutionError, match="weight of 0"):
        planned(profiled, model, program, False)(x).sum().backward()
    assert all(p.grad is None for p in model.parameters())
