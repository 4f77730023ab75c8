"""Max pooling over windows that tile the image, as pointwise operators of a region.

ATen's kernel keeps 64-bit indices into the image, and its backward takes the image, too, for its
shape. Here a maximum is named by its place in the window, in 8 bits, and the kernels of the
backward write zeros around it. Other windows (overlapping, padded) stay ATen's.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node

from memopt.torch_private.operators import aten as _ATEN

_FORWARD = _ATEN.max_pool2d_with_indices.default
_BACKWARD = _ATEN.max_pool2d_with_indices_backward.default
_LARGEST = 16
"""Most places of a window; a kernel reads them in turn."""


def is_pooling(node: Any) -> bool:
    """Return whether a node is the forward of a max pooling over images."""
    return isinstance(node, Node) and node.target is _FORWARD


def is_unpooling(node: Any) -> bool:
    """Return whether a node is the backward of one."""
    return isinstance(node, Node) and node.target is _BACKWARD


def poolings(nodes: Iterable[Node], anchors: Collection[Node]) -> set[Node]:
    """Return the poolings that regions may compute, forwards and backwards: whole pairs without an
    anchor, whose indices nothing else reads."""
    found: set[Node] = set()
    for call in nodes:
        if not is_pooling(call) or not _tiles(call):
            continue
        indices = [user for user in call.users if user.args[1] == 1]
        readers = [reader for one in indices for reader in one.users]
        pair = {call, *readers}
        if all(map(is_unpooling, readers)) and pair.isdisjoint(anchors):
            found |= pair
    return found


def _tiles(call: Node) -> bool:
    value: torch.Tensor = call.args[0].meta["val"]  # type: ignore[union-attr]
    size, stride, padding, dilation = _arguments(call)
    whole = all(length % part == 0 for length, part in zip(value.shape[-2:], size, strict=True))
    plain = padding == (0, 0) and dilation == (1, 1) and stride == size
    return value.dim() == 4 and whole and plain and 1 < size[0] * size[1] <= _LARGEST


def _arguments(call: Node) -> tuple[tuple[int, int], ...]:
    """Return size, stride, padding and dilation of the windows."""
    first = 1 if is_pooling(call) else 2
    given: list[Any] = [*call.args[first : first + 4], *(None,) * 4][:4]
    size = pair(given[0])
    return size, pair(given[1] or size), pair(given[2] or 0), pair(given[3] or 1)


def pair(value: Any) -> tuple[int, int]:
    """Return an argument for rows and columns, given as one number for both or as two."""
    found = list(value) if isinstance(value, (list, tuple)) else [value]
    return int(found[0]), int(found[-1])


def read_by(call: Node) -> list[Node]:
    """Return the nodes whose values a call in a region reads: for a pooling's backward the gradient
    and the places, but not the image."""
    if is_unpooling(call):
        return [call.args[0], call.args[-1]]  # type: ignore[list-item]
    return call.all_input_nodes


def names_maxima(node: Node) -> Node | None:
    """Return the pooling that this node is the index tensor of; None if it is none's."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return None
    call = node.args[0]
    return call if is_pooling(call) else None  # type: ignore[return-value]


def pooled(graph: FxGraph, call: Node, image: Node) -> tuple[Node, Node]:
    """Add the maxima of a pooling's windows and their places to a graph. Of equal maxima the first
    is named, of NaNs the last, as ATen does."""
    size, *_ = _arguments(call)

    def make(target: Any, *args: Any, **kwargs: Any) -> Node:
        return graph.call_function(target, args, kwargs)

    def every(start: tuple[int, ...]) -> Node:
        """Return the elements at one place of every window."""
        one = image
        for dim, (first, step) in enumerate(zip(start, size, strict=True), start=2):
            one = make(_ATEN.slice.Tensor, one, dim, first, 2**62, step)
        return one

    first, *others = itertools.product(range(size[0]), range(size[1]))
    best = every(first)
    # In the image's own dtype until the end, which compilers vectorise.
    places = make(_ATEN.full_like.default, best, 0)
    for place, start in enumerate(others, start=1):
        one = every(start)
        odd = make(_ATEN.ne.Tensor, one, one)
        better = make(_ATEN.bitwise_or.Tensor, make(_ATEN.gt.Tensor, one, best), odd)
        best = make(_ATEN.where.self, better, one, best)
        places = make(_ATEN.where.ScalarSelf, better, float(place), places)
    return best, make(_ATEN._to_copy.default, places, dtype=torch.uint8)


def unpooled(graph: FxGraph, call: Node, gradient: Node, places: Node) -> Node:
    """Add the gradient of a pooling's image to a graph."""
    image: torch.Tensor = call.args[1].meta["val"]  # type: ignore[union-attr]
    size, *_ = _arguments(call)
    rows, columns = image.shape[-2] // size[0], image.shape[-1] // size[1]

    def make(target: Any, *args: Any, **kwargs: Any) -> Node:
        return graph.call_function(target, args, kwargs)

    def spread(node: Node) -> Node:
        shape = [*image.shape[:2], rows, 1, columns, 1]
        return make(_ATEN.view.default, node, shape)

    count = size[0] * size[1]
    own = make(_ATEN.arange.start_step, 0, count, 1, dtype=image.dtype, device=image.device)
    own = make(_ATEN.view.default, own, [1, 1, 1, size[0], 1, size[1]])
    given = make(_ATEN._to_copy.default, places, dtype=image.dtype)
    here = make(_ATEN.eq.Tensor, spread(given), own)
    found = make(_ATEN.where.ScalarOther, here, spread(gradient), 0.0)
    return make(_ATEN.reshape.default, found, list(image.shape))
