"""Convolutions as matrix products (im2col), image by image: scratch memory is the columns of one
image. Forward, input gradient and weight gradient are alternatives of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

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


FORWARD = Kernel("convolution.gemm", _forward)
INPUT = Kernel("convolution_backward.input.gemm", _input_gradient)
WEIGHT = Kernel("convolution_backward.weight.gemm", _weight_gradient)


def plain(x: Any, weight: Any, transposed: Any, groups: Any) -> bool:
    """Two-dimensional, contiguous, of one group and not transposed."""
    values = (value_of(x), value_of(weight))
    return bool(
        groups == 1
        and not transposed
        and all(v.ndim == 4 and v.is_contiguous() and v.is_floating_point() for v in values)
    )


@dataclass(frozen=True)
class Gradients:
    """A backward call of a plain convolution that gives both gradients, contiguous."""

    g: Any
    x: Any
    weight: Any
    steps: tuple[Any, Any, Any]
    """(stride, padding, dilation)."""
    bias: bool
    results: tuple[Node | None, Node | None, Node | None]


def both_gradients(sites: Sites, backward: Node) -> Gradients | None:
    """What a convolution's backward call is given; None if it is not of this kind."""
    g, x, weight, _, stride, padding, dilation, transposed, _, groups, mask = backward.args
    needs: list[bool] = list(mask)  # type: ignore[arg-type]  # a list of booleans
    if not (needs[0] and needs[1]) or not plain(x, weight, transposed, groups):
        return None
    if not value_of(g).is_contiguous():
        return None
    first, second, third = (sites.result(backward, i) for i in range(3))
    steps = (stride, padding, dilation)
    return Gradients(g, x, weight, steps, needs[2], (first, second, third))


def columns_bytes(weight: Any, image: Any) -> int:
    """Of one image's columns: a row per weight of a filter, a column per output position."""
    return int(weight[0].numel() * image[0, 0].numel() * image.element_size())


def attach(sites: Sites) -> None:
    """Plain two-dimensional convolutions."""
    for forward in sites.calls("aten.convolution.default"):
        x, weight, bias, stride, padding, dilation, transposed, _, groups = forward.args
        if plain(x, weight, transposed, groups) and value_of(forward).is_contiguous():
            columns = columns_bytes(value_of(weight), value_of(forward))
            steps = (stride, padding, dilation)
            shape = tuple(value_of(forward).shape)
            sites.add(
                forward,
                "gemm",
                FORWARD,
                (x, weight, bias, shape, steps),
                workspace_bytes=columns,
                exact=False,
                like=((forward, 1.0),),
                moved_bytes=2 * columns * value_of(x).shape[0],
            )
    for backward in sites.calls("aten.convolution_backward.default"):
        _attach_backward(sites, backward)


def _attach_backward(sites: Sites, backward: Node) -> None:
    call = both_gradients(sites, backward)
    if call is None:
        return
    g, x, weight, results = call.g, call.x, call.weight, call.results
    columns = columns_bytes(value_of(weight), value_of(g))
    half = ((backward, 0.5),)
    moved = 2 * columns * value_of(x).shape[0]
    sites.add(
        backward,
        "weight gradient gemm",
        WEIGHT,
        (call.bias, g, x, tuple(value_of(weight).shape), call.steps),
        (results[1], results[2]) if call.bias else (results[1],),
        workspace_bytes=columns + 2 * value_of(weight).untyped_storage().nbytes(),
        exact=False,
        like=half,
        moved_bytes=moved,
    )
    sites.add(
        backward,
        "input gradient gemm",
        INPUT,
        (g, weight, tuple(value_of(x).shape), call.steps),
        (results[0],),
        workspace_bytes=columns,
        exact=False,
        like=half,
        moved_bytes=moved,
    )
