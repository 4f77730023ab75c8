"""Max pooling with an 8-bit index inside the window; pooling backwards without the input, which
ATen's read for its shape only, or without an index, from the input alone."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from memopt.implementations.kernel import Kernel
from memopt.implementations.site import Sites, value_of

ATEN = torch.ops.aten


def _pair(value: Any, default: Any = None) -> tuple[int, int]:
    given = value if value else default
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    return (int(found[0]), int(found[-1]))


def _corner(size: int, stride: int, padding: int, device: torch.device) -> Any:
    """First row (or column) of each output's window."""
    return torch.arange(size, device=device) * stride - padding


def _forward(
    x: torch.Tensor, window: Any, stride: Any, padding: Any, dilation: Any, ceil: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.empty(0)
    places: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    step_h, step_w = _pair(stride, window)
    pad_h, pad_w = _pair(padding)
    dil_h, dil_w = _pair(dilation)
    columns = _pair(window)[1]
    # Image by image, so that the 64-bit indices never exist whole.
    for i in range(x.shape[0]):
        y, index = ATEN.max_pool2d_with_indices(
            x[i : i + 1], window, stride, padding, dilation, ceil
        )
        row = index.div(x.shape[-1], rounding_mode="floor")
        column = index.sub_(row * x.shape[-1])
        row -= _corner(y.shape[-2], step_h, pad_h, x.device).unsqueeze(1)
        column -= _corner(y.shape[-1], step_w, pad_w, x.device)
        row.floor_divide_(dil_h).mul_(columns).add_(column.floor_divide_(dil_w))
        places.append(row.to(torch.uint8))
        values.append(y)
    return torch.cat(values), torch.cat(places)


def _backward(
    g: torch.Tensor,
    place: torch.Tensor,
    shape: Any,
    window: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    ceil: bool,
) -> Any:
    result = g.new_empty(shape)
    step_h, step_w = _pair(stride, window)
    pad_h, pad_w = _pair(padding)
    dil_h, dil_w = _pair(dilation)
    columns = _pair(window)[1]
    row_0 = _corner(g.shape[-2], step_h, pad_h, g.device).unsqueeze(1)
    column_0 = _corner(g.shape[-1], step_w, pad_w, g.device)
    arguments = (window, stride, padding, dilation, ceil)
    for i in range(g.shape[0]):
        one = place[i : i + 1].to(torch.int64)
        row = one.div(columns, rounding_mode="floor")
        # Clamped for the profiler's stand-in indices, which may point into the padding.
        one.sub_(row * columns).mul_(dil_w).add_(column_0).clamp_(0, shape[-1] - 1)
        row.mul_(dil_h).add_(row_0).clamp_(0, shape[-2] - 1).mul_(shape[-1]).add_(one)
        like = g.new_empty(()).expand(1, *shape[1:])
        result[i : i + 1] = ATEN.max_pool2d_with_indices_backward(
            g[i : i + 1], like, *arguments, row
        )
    return result


def _backward_without_input(
    g: torch.Tensor, index: torch.Tensor, shape: Any, *arguments: Any
) -> Any:
    like = g.new_empty(()).expand(shape)
    return ATEN.max_pool2d_with_indices_backward(g, like, *arguments, index)


def _backward_again(g: torch.Tensor, x: torch.Tensor, *arguments: Any) -> Any:
    result = torch.empty_like(x)
    # Image by image, so that neither the maxima nor their indices exist whole.
    for i in range(len(x)):
        _, index = ATEN.max_pool2d_with_indices(x[i : i + 1], *arguments)
        result[i : i + 1] = ATEN.max_pool2d_with_indices_backward(
            g[i : i + 1], x[i : i + 1], *arguments, index
        )
    return result


FORWARD = Kernel("max_pool.index8", _forward)
BACKWARD = Kernel("max_pool_backward.index8", _backward)
AGAIN = Kernel("max_pool_backward.recomputed", _backward_again)
SHAPE_ONLY = Kernel("max_pool_backward.shape_only", _backward_without_input)


def _contiguous(*nodes: Any) -> bool:
    return all(isinstance(n, Node) and value_of(n).is_contiguous() for n in nodes)


def attach(sites: Sites) -> None:
    """`max_pool2d_with_indices` over batches of contiguous images."""
    for backward in sites.calls("aten.max_pool2d_with_indices_backward.default"):
        g, x, *arguments, index = backward.args
        forward = sites.producer(index)
        if forward is None or not _contiguous(g, x) or value_of(x).ndim != 4:
            continue
        shape = tuple(value_of(x).shape)
        sites.add(backward, "shape only", SHAPE_ONLY, (g, index, shape, *arguments))
        image_bytes = value_of(x)[0].numel() * value_of(x).element_size()
        value = value_of(forward)[0]
        # One image's maxima, their indices and the gradient of its input.
        one = value[0].numel() * (value.element_size() + 8) + image_bytes
        like = ((forward, 1.0), (backward, 1.0))
        sites.add(backward, "recomputed", AGAIN, (g, x, *arguments), workspace_bytes=one, like=like)
        result = sites.result(forward, 0)
        window_h, window_w = _pair(arguments[0])
        if result is None or window_h * window_w > 256:
            continue
        place = sites.extra(
            f"{forward.name}__index8", value.new_empty(value.shape, dtype=torch.uint8)
        )
        # Four 64-bit indices of one image, the parts before they are joined.
        scratch = 4 * 8 * value[0].numel() + value.untyped_storage().nbytes() + value.numel()
        given = (forward.args[0], *arguments)
        sites.add(forward, "index8", FORWARD, given, (result, place), workspace_bytes=scratch)
        sites.add(
            backward,
            "index8",
            BACKWARD,
            (g, place, shape, *arguments),
            workspace_bytes=image_bytes + 4 * 8 * value[0].numel(),
        )
