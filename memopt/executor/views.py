"""Replaces chains of views by one strided view of a kernel's result whose layout is certain.

A view of a view of a product is three calls through torch's dispatcher, each of which takes longer
than a small kernel's arithmetic. If the layout of the first result is certain, that of the last
view is known, and one call without the dispatcher makes it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from memopt.step.kernel import FusedKernel
from memopt.step.memory_layout import same_strides
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
        return not self.offset and value.shape == self.shape and same_strides(value, self.strides)


Looked = Callable[[torch.Tensor, tuple[int, ...], tuple[int, ...], int], torch.Tensor]


@functools.cache
def looked() -> Looked:
    """Return the function that makes strided views of a tensor by shape, strides and offset. For
    plain tensors it is the one that bypasses dispatcher and autograd."""
    native = private("torch._C._dynamo.guards._reinterpret_tensor")

    def look(
        root: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int
    ) -> torch.Tensor:
        if type(root) is torch.Tensor:
            view: torch.Tensor = native(root, shape, strides, offset)
            return view
        return root.as_strided(shape, strides, root.storage_offset() + offset)

    return look


def is_laid_out_one_way(call: Node, result: Node) -> bool:
    """Return whether a kernel always gives a result the layout of its capture: compiled kernels
    (checked when they are compiled) and ATen's products."""
    if isinstance(call.target, FusedKernel):
        return True
    return str(call.target) in _PRODUCTS and result.meta["val"].is_contiguous()


def look_of(node: Node, views: Container[Node]) -> Look | None:
    """Return a chain of views as one view of its root; None: `node` is no such chain.

    Args:
        node: of a captured step.
        views: the nodes of the step that are views.
    """
    root = node
    while root in views and str(root.target) in _VIEWS:
        root = root.args[0]  # type: ignore[assignment]
    if root is node or not _is_plain(root.meta.get("val")):
        return None
    value, whole = node.meta["val"], root.meta["val"]
    offset = int(value.storage_offset()) - int(whole.storage_offset())
    return Look(root, tuple(value.shape), tuple(value.stride()), offset)


def _is_plain(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.layout is torch.strided
        and not value.is_conj()
        and not value.is_neg()
    )
