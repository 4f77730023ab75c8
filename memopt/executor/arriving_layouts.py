"""Warns where the gradient of an output arrives in another layout than it was captured for.

Autograd hands a kernel the gradient as the loss has laid it out; a planned backward is for the
layouts of the outputs, or of a named loss, and copies others first. Kernels may then round
otherwise.
"""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from memopt.step.captured import Captured
from memopt.step.memory_layout import is_dense
from memopt.torch_private import pytree
from memopt.torch_private.operators import aten

_LOOKED_AT = 4
"""Number of first calls that are looked at: a loop lays its gradients out alike in every step."""
_AS_LAID_OUT = frozenset(
    (
        aten.convolution_backward.default,
        aten.native_batch_norm_backward.default,
        aten.mm.default,
        aten.bmm.default,
        aten.sum.dim_IntList,
        aten.gelu_backward.default,
        aten.silu_backward.default,
        aten.mish_backward.default,
        aten.elu_backward.default,
        aten.softplus_backward.default,
        aten.log_sigmoid_backward.default,
    )
)
"""Sums, and functions that torch computes by vectors where it can, else one by one."""
_KEEPS_ORDER = frozenset(
    (
        aten.clone.default,
        aten._to_copy.default,
        aten.constant_pad_nd.default,
        aten.flip.default,
        aten.roll.default,
        aten.channel_shuffle.default,
        aten.pixel_shuffle.default,
        aten.pixel_unshuffle.default,
        aten.upsample_nearest2d_backward.default,
        aten.upsample_bilinear2d_backward.default,
        aten._upsample_bilinear2d_aa_backward.default,
        aten.upsample_nearest3d_backward.default,
        aten.upsample_trilinear3d_backward.default,
    )
)
"""Kernels, besides functions of each element, that lay their result out as their argument."""
_IN_A_ROW = frozenset((aten.view.default, aten._unsafe_view.default, aten.reshape.default))
"""Of another layout they make a copy, row by row, as eager does."""


class ArrivingLayouts:
    """Looks at the gradients of the outputs of a captured model's first calls.

    Args:
        captured: the captured model.
    """

    def __init__(self, captured: Captured) -> None:
        self._orders: dict[int, list[int]] = {}
        for tangent in captured.tangents:
            leaf = getattr(getattr(tangent.meta.get("desc"), "output", None), "idx", None)
            if leaf is not None and _rounds_as_laid_out(tangent):
                self._orders[leaf] = _order(tangent.meta["val"])
        self._left = _LOOKED_AT if self._orders else 0

    def look(self, output: Any) -> None:
        """Look at the gradients of a call's output when they arrive."""
        if not self._left:
            return
        self._left -= 1
        leaves = pytree.tree_leaves(output)
        for position in self._orders:
            if leaves[position].requires_grad:
                leaves[position].register_hook(partial(self._arrived, position))

    def _arrived(self, position: int, gradient: torch.Tensor | None) -> None:
        # An output that the loss does not use has none.
        if gradient is None or not is_dense(gradient.shape, gradient.stride()):
            return
        expected = self._orders.get(position)
        if expected is None or _order(gradient) == expected:
            return
        self._orders, self._left = {}, 0
        warnings.warn(
            f"the gradient of output {position} of a planned model, of shape "
            f"{list(gradient.shape)}, arrives in another memory layout than the output's: it is "
            "copied first, and gradients can differ in their last bits. Return the output "
            "contiguous (output.contiguous()), or name the loss (loss_fn= of memopt.plan or "
            "memopt.wrap)",
            stacklevel=2,
        )


def _order(value: torch.Tensor) -> list[int]:
    """Return a tensor's dimensions, those of size 1 left out, from the largest stride on."""
    strides, shape = value.stride(), value.shape
    several = (i for i, size in enumerate(shape) if size > 1)
    return sorted(several, key=lambda i: -strides[i])


def _rounds_as_laid_out(tangent: Node) -> bool:
    """Return whether a kernel may round a gradient, or what has its layout, as it lies there."""
    waiting, seen = [tangent], {tangent}
    while waiting:
        for user in waiting.pop().users:
            target: Any = user.target
            if target in _AS_LAID_OUT:
                return True
            tags = getattr(target, "tags", ())
            keeps = torch.Tag.pointwise in tags or getattr(target, "is_view", False)
            if (keeps or target in _KEEPS_ORDER) and target not in _IN_A_ROW and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False
