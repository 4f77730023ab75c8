"""Max pooling with an 8-bit index inside the window, and a pooling backward that does without the
input (which ATen's reads for its shape only)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import Node

from memopt.kernels.compiled.pooling import pair
from memopt.kernels.kernel import Kernel
from memopt.kernels.site import Sites, contiguous, storage_bytes, value_of

ATEN = torch.ops.aten


def _corners(y: Tensor, window: Any, stride: Any, padding: Any, *_: Any) -> tuple[Tensor, Tensor]:
    """Return first row and first column of each output's window, for a pooling's arguments."""
    rows, columns = (
        torch.arange(size, device=y.device) * step - pad
        for size, step, pad in zip(y.shape[-2:], pair(stride or window), pair(padding), strict=True)
    )
    return rows.unsqueeze(1), columns


def _forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    places: list[Tensor] = []
    values: list[Tensor] = []
    (_, width), dilation = pair(arguments[0]), pair(arguments[3])
    # Image by image, so that the 64-bit indices never exist whole.
    for i in range(x.shape[0]):
        y, index = ATEN.max_pool2d_with_indices(x[i : i + 1], *arguments)
        row_0, column_0 = _corners(y, *arguments)
        row = index.div(x.shape[-1], rounding_mode="floor")
        column = index.sub_(row * x.shape[-1]).sub_(column_0)
        row.sub_(row_0).floor_divide_(dilation[0]).mul_(width)
        row.add_(column.floor_divide_(dilation[1]))
        places.append(row.to(torch.uint8))
        values.append(y)
    return torch.cat(values), torch.cat(places)


def _backward(g: Tensor, place: Tensor, shape: Any, *arguments: Any) -> Tensor:
    result = g.new_empty(shape)
    (_, width), dilation = pair(arguments[0]), pair(arguments[3])
    row_0, column_0 = _corners(g, *arguments)
    for i in range(g.shape[0]):
        one = place[i : i + 1].to(torch.int64)
        row = one.div(width, rounding_mode="floor")
        one.sub_(row * width).mul_(dilation[1]).add_(column_0)
        # Clamped for the profiler's stand-in indices, which may point into the padding.
        one.clamp_(0, shape[-1] - 1)
        row.mul_(dilation[0]).add_(row_0).clamp_(0, shape[-2] - 1)
        index = row.mul_(shape[-1]).add_(one)
        result[i : i + 1] = _shape_only(g[i : i + 1], index, (1, *shape[1:]), *arguments)
    return result


def _shape_only(g: Tensor, index: Tensor, shape: Any, *arguments: Any) -> Any:
    like = g.new_empty(()).expand(shape)
    return ATEN.max_pool2d_with_indices_backward(g, like, *arguments, index)


FORWARD = Kernel("max_pool.index8", _forward)
BACKWARD = Kernel("max_pool_backward.index8", _backward)
SHAPE_ONLY = Kernel("max_pool_backward.shape_only", _shape_only)


def attach(sites: Sites) -> None:
    """Attach alternatives to `max_pool2d_with_indices` of contiguous batches of images, and to its
    backward."""
    for forward, backward in sites.pairs("aten.max_pool2d_with_indices_backward.default", -1):
        g, x, *arguments, index = backward.args
        if not contiguous(g, x) or value_of(x).ndim != 4:
            continue
        shape = tuple(value_of(x).shape)
        sites.add(backward, "shape only", SHAPE_ONLY, (g, index, shape, *arguments))
        result = sites.result(forward, 0)
        height, width = pair(arguments[0])
        if result is not None and height * width <= 256:
            _attach_places(sites, forward, result, backward)


def _attach_places(sites: Sites, forward: Node, result: Node, backward: Node) -> None:
    """Attach the forward that gives each maximum's place in its window in 8 bits, and the backward
    that reads these places."""
    g, x, *arguments, _ = backward.args
    value, image = value_of(result), value_of(x)[0]
    place = sites.extra(f"{forward.name}__index8", value.new_empty(value.shape, dtype=torch.uint8))
    indices_bytes = 4 * 8 * value[0].numel()
    # Four 64-bit indices of one image, and the parts before they are joined.
    scratch = indices_bytes + storage_bytes(result) + value.numel()
    given = (forward.args[0], *arguments)
    sites.add(forward, "index8", FORWARD, given, (result, place), workspace_bytes=scratch)
    scratch = indices_bytes + image.numel() * image.element_size()
    given = (g, place, tuple(value_of(x).shape), *arguments)
    sites.add(backward, "index8", BACKWARD, given, workspace_bytes=scratch)
