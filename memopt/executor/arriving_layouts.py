"""Notes where the gradient of an output arrives in another layout than it was captured for.

Autograd hands a kernel the gradient as the loss has laid it out; a planned backward is for the
layouts of the outputs, of a named loss or of earlier calls, and copies others first. Kernels may
then round otherwise. A wrapped model is planned for the new layout (`planning_in_backward`); of
another one it is said.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import torch
from torch.fx import Node

from memopt.models.warned import warn
from memopt.step.captured import Captured
from memopt.step.memory_layout import expanded, in_order, is_dense, order_of
from memopt.torch_private import pytree
from memopt.torch_private.operators import aten

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
_COPY_FIRST = frozenset((aten.convolution_backward.default, aten.mm.default, aten.bmm.default))
"""Of these, those that copy an expanded gradient first, as a plan does."""
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
"""Of a layout that they cannot see in the new shape they make a copy, row by row, as eager does."""

ArrivedOrders: TypeAlias = dict[int, tuple[int, ...]]
"""Positions of outputs → their gradients' dimensions, from the largest stride on."""


class ArrivingLayouts:
    """Looks at the gradients of the outputs of a captured model's calls."""

    def __init__(self, captured: Captured) -> None:
        self._tangents: dict[int, Node] = {}
        self._numbers: dict[int, int] = {}
        self._rounds: dict[tuple[int, tuple[int, ...]], bool] = {}
        self._looked_at: set[int] = set()
        self._said = False
        for number, tangent in enumerate(captured.tangents):
            leaf = getattr(getattr(tangent.meta.get("desc"), "output", None), "idx", None)
            if leaf is not None and _reaches_what_rounds(tangent):
                self._tangents[leaf], self._numbers[leaf] = tangent, number

    def look(self, output: Any, arrived: ArrivedOrders) -> None:
        """Note in `arrived`, when a call's backward begins, gradients of its output in a layout
        with which the backward may round otherwise."""
        if not self._tangents:
            return
        leaves = pytree.tree_leaves(output)
        for position in self._tangents:
            if leaves[position].requires_grad:
                leaves[position].register_hook(partial(self._look, arrived, position))

    def _look(self, arrived: ArrivedOrders, position: int, gradient: torch.Tensor | None) -> None:
        # An output that the loss does not use has none.
        if gradient is None:
            return
        if not is_dense(gradient.shape, gradient.stride()):
            self._look_at_expanded(position, gradient)
            return
        order = order_of(gradient)
        rounds = self._rounds.get((position, order))
        if rounds is None:
            try:
                rounds = _may_round(self._tangents[position], order)
            except (RuntimeError, TypeError):  # a view by a size that only the graph knows
                rounds = True
            self._rounds[position, order] = rounds
        if rounds:
            arrived[position] = order

    def _look_at_expanded(self, position: int, gradient: torch.Tensor) -> None:
        """Warn, once, of a gradient whose elements share memory, if a backward that has it copied
        may round otherwise."""
        tangent = self._tangents[position]
        # To see whether its sums are exact, the host waits for the device: once.
        looked_at = position in self._looked_at and not gradient.is_cpu
        self._looked_at.add(position)
        if self._said or looked_at or not expanded(gradient):
            return
        if not _may_round_expanded(tangent, gradient):
            return
        self._said = True
        warn(
            f"the gradient of output {position} of a planned model arrives expanded, one number "
            "for several elements, as sum() gives it: it is copied first, and gradients can "
            "differ in their last bits from those of kernels that read it so. The gradient of "
            "(output * 1.0).sum() is not, with a plan or without",
        )

    def as_arrived(self, orders: ArrivedOrders, tangents: list[Any]) -> list[Any]:
        """Return the gradients with which a backward begins in the layouts in which they came."""
        made = list(tangents)
        for position, order in orders.items():
            i = self._numbers[position]
            if isinstance(given := made[i], torch.Tensor):
                strides = in_order(given.shape, order)
                empty = torch.empty_strided(
                    given.shape, strides, dtype=given.dtype, device=given.device
                )
                made[i] = empty.copy_(given)
        return made

    def say(self, orders: ArrivedOrders) -> None:
        """Warn, once, that gradients in these layouts are copied."""
        if self._said:
            return
        self._said = True
        position = min(orders)
        shape = self._tangents[position].meta["val"].shape
        warn(
            f"the gradient of output {position} of a planned model, of shape "
            f"{list(shape)}, arrives in another memory layout than the output's: it is "
            "copied first, and gradients can differ in their last bits. Return the output "
            "contiguous (output.contiguous()), or name the loss (loss_fn= of memopt.plan or "
            "memopt.wrap)",
        )


def _lies_as_before(target: Any) -> bool:
    """Return whether an operator's result is laid out by its argument."""
    tags = getattr(target, "tags", ())
    keeps = torch.Tag.pointwise in tags or getattr(target, "is_view", False)
    return bool(keeps) or target in _KEEPS_ORDER or target in _IN_A_ROW


def _reaches_what_rounds(tangent: Node) -> bool:
    """Return whether a kernel may round a gradient, or what has its layout, as it lies there."""
    waiting, seen = [tangent], {tangent}
    while waiting:
        for user in waiting.pop().users:
            if user.target in _AS_LAID_OUT:
                return True
            if _lies_as_before(user.target) and user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _may_round_expanded(tangent: Node, gradient: torch.Tensor) -> bool:
    """Return whether a kernel reads a gradient, or a view of it, that may round otherwise where
    elements share memory. Everything else makes a tensor of its own of it."""
    waiting = [tangent]
    while waiting:
        for user in waiting.pop().users:
            if user.target == aten.sum.dim_IntList:
                if not _sums_exactly(gradient):
                    return True
            elif user.target in _AS_LAID_OUT - _COPY_FIRST:
                return True
            elif getattr(user.target, "is_view", False):
                waiting.append(user)
    return False


def _sums_exactly(gradient: torch.Tensor) -> bool:
    """Return whether sums of a gradient's equal elements are exact: powers of two, or zeros."""
    few = gradient.detach()
    for dim in expanded(gradient):
        few = few.narrow(dim, 0, 1)
    if few.is_complex():
        few = torch.view_as_real(few)
    fractions = torch.frexp(few.float()).mantissa.abs()
    return bool(((fractions == 0.5) | (fractions == 0)).all())


def _may_round(tangent: Node, order: tuple[int, ...]) -> bool:
    """Return whether a kernel is reached that may round otherwise if a gradient's dimensions lie in
    this order."""
    shape = tangent.meta["val"].shape
    waiting = [(tangent, in_order(shape, order))]
    seen = {tangent}
    while waiting:
        node, strides = waiting.pop()
        given = node.meta["val"]
        laid = torch.empty_strided(given.shape, strides, dtype=given.dtype, device="meta")
        if _several(laid) == _several(given):
            continue
        for user in node.users:
            if user.target in _AS_LAID_OUT:
                return True
            if _lies_as_before(user.target) and user not in seen:
                seen.add(user)
                after = _strides_after(user, node, laid)
                waiting += [] if after is None else [(user, after)]
    return False


def _several(value: torch.Tensor) -> list[int]:
    """Return the dimensions of more than one element, from the largest stride on."""
    return [i for i in order_of(value) if value.shape[i] > 1]


def _strides_after(user: Node, node: Node, laid: torch.Tensor) -> tuple[int, ...] | None:
    """Return the strides of an operator's result where its argument `node` is laid out so; None: it
    has several results."""
    result = user.meta["val"]
    if not isinstance(result, torch.Tensor):
        return None
    rows = in_order(result.shape, range(result.dim()))
    if user.target in _IN_A_ROW:
        try:
            return laid.view(result.shape).stride()
        except RuntimeError:
            return rows
    if getattr(user.target, "is_view", False):
        args = [laid if given is node else given for given in user.args]
        return user.target(*args, **user.kwargs).stride()  # type: ignore[operator,no-any-return]
    in_rows = user.kwargs.get("memory_format") is torch.contiguous_format
    return rows if in_rows or result.dim() != laid.dim() else in_order(result.shape, order_of(laid))
