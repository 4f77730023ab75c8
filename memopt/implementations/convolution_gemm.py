"""Convolutions as matrix products (im2col), image by image: scratch memory is the columns of one
image."""

from __future__ import annotations

from typing import Any

import torch

from memopt.implementations.convolution_products import Products, attach_products
from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites

ATEN = torch.ops.aten


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.itemsize < 4 else dtype


def _forward(
    x: torch.Tensor, weight: torch.Tensor, bias: Any, shape: Any, steps: Any
) -> torch.Tensor:
    stride, padding, dilation = steps
    result = x.new_empty(shape)
    rows = weight.flatten(1)
    for image, out in zip(x, result, strict=True):
        columns = ATEN.im2col(image[None], weight.shape[2:], dilation, padding, stride)[0]
        torch.mm(rows, columns, out=out.view(len(rows), -1))
    return result if bias is None else result.add_(bias.view(-1, 1, 1))


def _input_gradient(
    g: torch.Tensor, weight: torch.Tensor, shape: Any, steps: Any
) -> tuple[torch.Tensor]:
    stride, padding, dilation = steps
    result = g.new_empty(shape)
    rows = weight.flatten(1).t()
    for one, out in zip(g, result, strict=True):
        columns = rows @ one.flatten(1)
        out.copy_(
            ATEN.col2im(columns[None], shape[2:], weight.shape[2:], dilation, padding, stride)[0]
        )
    return (result,)


def _weight_gradient(
    bias: bool, g: torch.Tensor, x: torch.Tensor, shape: Any, steps: Any
) -> tuple[torch.Tensor, ...]:
    stride, padding, dilation = steps
    wide = _accumulator(g.dtype)
    total = g.new_zeros((shape[0], shape[1] * shape[2] * shape[3]), dtype=wide)
    for one, image in zip(g, x, strict=True):
        columns = ATEN.im2col(image[None], shape[2:], dilation, padding, stride)[0]
        total += one.flatten(1) @ columns.t()
    found = total.view(shape).to(g.dtype)
    # A convolution's bias gradient is a plain sum.
    return (found, g.sum((0, 2, 3))) if bias else (found,)


def _scratch_bytes(x: Any, weight: Any, y: Any, _: Any) -> tuple[int, int]:
    """One image's columns: a row per weight of a filter, a column per output position."""
    columns = int(weight[0].numel() * y[0, 0].numel() * y.element_size())
    return columns, 2 * columns * x.shape[0]


GEMM = Products(
    "gemm",
    Kernel("convolution.gemm", _forward),
    Kernel("convolution_backward.input.gemm", _input_gradient),
    Kernel("convolution_backward.weight.gemm", _weight_gradient),
    fits=lambda *_: True,
    scratch_bytes=_scratch_bytes,
    sums_images=True,
)


def attach(sites: Sites) -> None:
    """Plain two-dimensional convolutions."""
    attach_products(sites, GEMM)
