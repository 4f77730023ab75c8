"""ELU and softplus from their output, and norms by known statistics, against float64."""

from __future__ import annotations

import pytest
import torch

from memopt.kernels import batch_norm, elementwise, norms

ATEN = torch.ops.aten
F64 = torch.float64
DTYPES = [torch.float32, F64, torch.bfloat16]


def _values(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = torch.cat([torch.randn(500) * 3, torch.randn(500) * 30, torch.zeros(1)]).to(dtype)
    return torch.randn(len(x)).to(dtype), x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "numbers", [(1.0, 1, 1), (0.7, 1, 1), (1.67, 1.05, 1), (1.3, 1.0, 1 / 1.3)]
)
def test_elu_from_its_output(dtype: torch.dtype, numbers: tuple[float, float, float]) -> None:
    g, x = _values(dtype)
    found = elementwise.ELU(g, ATEN.elu(x, *numbers), *numbers)
    expected = ATEN.elu_backward(g.to(F64), *numbers, False, x.to(F64))
    alpha, scale, inside = numbers
    # y + alpha·scale cancels where the slope is small.
    most = max(scale, alpha * scale * inside)
    step = 64 * torch.finfo(dtype).eps * most * g.to(F64).abs()
    assert bool(((found.to(F64) - expected).abs() <= step).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("beta", [1.0, 2.0, 0.3])
def test_softplus_from_its_output(dtype: torch.dtype, beta: float) -> None:
    g, x = _values(dtype)
    found = elementwise.SOFTPLUS(g, ATEN.softplus(x, beta, 20.0), beta, 20.0)
    expected = ATEN.softplus_backward(g.to(F64), x.to(F64), beta, 20.0)
    # Above its threshold ATen's slope is 1: e^-20 off.
    step = (64 * torch.finfo(dtype).eps + 2.1e-9) * expected.abs() + 1e-38
    assert bool(((found.to(F64) - expected).abs() <= step).all())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("affine", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_group_norm(dtype: torch.dtype, affine: bool, groups: int) -> None:
    torch.manual_seed(groups)
    x = (torch.randn(3, 6, 4, 5) * 2 + 7).to(dtype)
    weight = torch.empty(6).uniform_(-2, -0.5).to(dtype) if affine else None
    bias = torch.randn(6).to(dtype) if affine else None
    sizes = (3, 6, 20, groups)
    y, mean, inverse = ATEN.native_group_norm(x, weight, bias, *sizes, 1e-5)
    g = torch.randn_like(x)
    wide = [None if v is None else v.to(F64) for v in (weight, bias)]
    mask = [True, affine, affine]
    found = norms.GROUP_OUTPUT(g, y, inverse, weight, bias, *sizes, mask)
    m64, i64 = mean.to(F64), inverse.to(F64)
    expected = ATEN.native_group_norm_backward(
        g.to(F64), x.to(F64), m64, i64, wide[0], *sizes, mask
    )
    reference = ATEN.native_group_norm(x.to(F64), *wide, *sizes, 1e-5)[0]
    each = i64.repeat_interleave(6 // groups, 1).view(3, 6, 1, 1)
    xhat = (x.to(F64) - m64.repeat_interleave(6 // groups, 1).view(3, 6, 1, 1)) * each
    step = 64 * torch.finfo(dtype).eps * 10
    size, most = g.to(F64).abs(), (1 + xhat.abs()).amax()
    slope = each * (1 if wide[0] is None else wide[0].abs().amax())
    assert bool(
        ((found[0].to(F64) - expected[0]).abs() <= step * slope * size.amax() * most**2).all()
    )
    if affine:
        for i, scale in ((1, size.sum((0, 2, 3)) * most), (2, size.sum((0, 2, 3)))):
            assert bool(((found[i].to(F64) - expected[i]).abs() <= step * scale).all())
    (again,) = norms.GROUP_AGAIN(x, weight, bias, mean, inverse)
    terms = (x.to(F64).abs() * each + (m64.abs() * i64).amax()) * (1 if not affine else 2) + 5
    assert bool(((again.to(F64) - reference).abs() <= 64 * torch.finfo(dtype).eps * terms).all())


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("affine", [False, True])
def test_batch_norm_by_known_statistics(dtype: torch.dtype, affine: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(5, 4, 3, 3) * 2 + 7).to(dtype)
    weight = torch.empty(4).uniform_(-2, -0.5).to(dtype) if affine else None
    bias = torch.randn(4).to(dtype) if affine else None
    y, mean, inverse = ATEN.native_batch_norm(x, weight, bias, None, None, True, 0.1, 1e-5)
    (again,) = batch_norm.BATCH_AGAIN(x, weight, bias, mean, inverse)
    wide = [None if v is None else v.to(F64) for v in (weight, bias)]
    reference = ATEN.native_batch_norm(x.to(F64), *wide, None, None, True, 0.1, 1e-5)[0]
    scale = (inverse.to(F64) * (1 if wide[0] is None else wide[0].abs())).view(1, -1, 1, 1)
    terms = scale * (x.to(F64).abs() + mean.to(F64).abs().view(1, -1, 1, 1)) + 5
    step = 64 * torch.finfo(dtype).eps
    assert bool(((again.to(F64) - reference).abs() <= step * terms).all())
    assert y.stride() == again.stride()
