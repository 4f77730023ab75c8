"""Replaces chains of views by one strided view of a kernel's result.

A view of a view of a product is three calls through torch's dispatcher, each of which takes longer
than a small kernel's arithmetic. If the first result has the layout of its capture, that of the
last view is known, and one call without the dispatcher makes it. A few kernels' results are certain
to have it; others are checked when the step runs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from memopt.step.kernel import FusedKernel
from memopt.step.nodes import ANY_OFFSET
from memopt.torch_private.access import private

_VIEWS = frozenset(
    {
        "aten.view.default",
        "aten._unsafe_view.default",
        "aten.t.default",
        "aten.transpose.int",
        "aten.permute.default",
        "aten.unsqueeze.default",
        "aten.squeeze.default",
        "aten.squeeze.dim",
        "aten.squeeze.dims",
        "aten.expand.default",
        "aten.slice.Tensor",
        "aten.select.int",
        "aten.detach.default",
        "aten.alias.default",
    }
)
_PARTS = frozenset({"aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int"})
"""Views of several parts, each unpacked by its number."""
_PRODUCTS = frozenset({"aten.mm.default", "aten.addmm.default", "aten.bmm.default"})


@dataclass(frozen=True)
class Look:
    """A view, described by its position and strides in another tensor.

    Attributes:
        root: the viewed tensor, no view itself.
        shape, strides: the view's.
        offset: elements between the beginning of the root and that of the view.
    """

    root: Node
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def is_whole(self) -> bool:
        """Whether the view equals the root."""
        value = self.root.meta["val"]
        return not self.offset and (value.shape, value.stride()) == (self.shape, self.strides)


Looked = Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...], int], torch.Tensor]


def looked_at_plain() -> Looked:
    """Return the function that makes a view of a plain tensor by shape, strides and offset. It
    bypasses dispatcher and autograd."""
    native: Looked = private("torch._C._dynamo.guards._reinterpret_tensor")
    return native


@functools.cache
def looked() -> Looked:
    """Return a function that makes a view by shape, strides and offset of any tensor."""
    native = looked_at_plain()

    def look(
        root: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        if type(root) is torch.Tensor:
            return native(root, shape, strides, offset)
        return root.as_strided(shape, strides, root.storage_offset() + offset)

    return look


def is_laid_out_one_way(call: Node, result: Node) -> bool:
    """Return whether a kernel always gives a result the layout of its capture: compiled kernels
    (checked when they are compiled) and ATen's products."""
    if isinstance(call.target, FusedKernel):
        return True
    return str(call.target) in _PRODUCTS and result.meta["val"].is_contiguous()


def look_of(node: Node, views: Container[Node]) -> Look | None:
    """Return a chain of views as one view of its root; None: `node` is no such chain."""
    if ANY_OFFSET in node.meta:
        return None
    root = node
    while root in views and (str(root.target) in _VIEWS or _is_part(root)):
        root = root.args[0]  # type: ignore[assignment]
        if str(root.target) in _PARTS:
            root = root.args[0]  # type: ignore[assignment]
    if root is node or not _is_plain(root.meta.get("val")):
        return None
    value, whole = node.meta["val"], root.meta["val"]
    offset = int(value.storage_offset()) - int(whole.storage_offset())
    return Look(root, tuple(value.shape), tuple(value.stride()), offset)


def _is_part(node: Node) -> bool:
    """Return whether a node unpacks a view of several parts."""
    whole = node.args[0] if node.target is operator.getitem else None
    return isinstance(whole, Node) and str(whole.target) in _PARTS


def seen_outside(outputs: Iterable[Node], views: Container[Node]) -> set[Node]:
    """Return outputs, and the views between them and their bases. Autograd must know outside of
    the step which of them are views of one tensor, so that it counts their changes in place
    together."""
    found: set[Node] = set()
    for node in outputs:
        while node in views and node not in found:
            found.add(node)
            node = node.args[0]  # type: ignore[assignment]
        found.add(node)
    return found


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )
