"""Notes where the gradient of an output arrives in another layout than it was captured for.

Autograd hands a kernel the gradient in the loss's layout; a planned backward is for the layouts of
the outputs, of a named loss or of earlier calls, and copies gradients in others first. Kernels may
then round differently. A wrapped model is planned for the new layout (`planning_in_backward`); a
module of an applied plan warns. An expanded gradient (`output.sum()`) is read as it arrived if the
kernels that read it give results in the planned layouts; else it is copied, with a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from memopt.models.warned import warn
from memopt.step.captured import Captured
from memopt.step.kernel import FusedKernel
from memopt.step.memory_layout import (
    expanded,
    in_order,
    is_dense,
    order_of,
    same_strides,
    storage_of,
)
from memopt.step.signature import REFUSALS
from memopt.torch_private import pytree
from memopt.torch_private.modes import dispatch_modes_off, function_modes_off, is_batch
from memopt.torch_private.operators import OpOverload, aten

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
_IN_A_ROW = frozenset((aten.view.default, aten._unsafe_view.default, aten.reshape.default))
"""Of a layout that they cannot see in the new shape they make a copy, row by row, as eager does."""
_LIKE_OF: dict[int, Callable[..., torch.Tensor]] = {1: torch.neg, 2: torch.add, 3: torch.addcmul}
"""How many tensors there are → a kernel that reads as many, element by element."""


@dataclass
class ArrivedLayouts:
    """The gradients of a call's outputs that arrived in another layout than planned.

    Attributes:
        orders: positions of outputs → their gradients' dimensions, from the largest stride on.
        expanded: positions of outputs → gradients whose elements share memory.
        others: positions of outputs → gradients that round as planned if none is missing, as
            tensors without data.
    """

    orders: dict[int, tuple[int, ...]] = field(default_factory=dict)
    expanded: dict[int, torch.Tensor] = field(default_factory=dict)
    others: dict[int, torch.Tensor] = field(default_factory=dict)


class ArrivingLayouts:
    """Checks the layouts of the output gradients of a captured model's calls."""

    def __init__(self, captured: Captured) -> None:
        self._all = captured.tangents
        self._absent: dict[frozenset[int], frozenset[Node]] = {}
        self._tangents: dict[int, Node] = {}
        self._numbers: dict[int, int] = {}
        self._rounds: dict[Any, bool] = {}
        self._exact: dict[int, bool] = {}
        self._said = False
        for number, tangent in enumerate(captured.tangents):
            leaf = getattr(getattr(tangent.meta.get("desc"), "output", None), "idx", None)
            if leaf is not None and _reaches_what_rounds(tangent):
                self._tangents[leaf], self._numbers[leaf] = tangent, number

    def look(self, output: Any, arrived: ArrivedLayouts) -> None:
        """When a call's backward begins, note in `arrived` the output gradients whose layout may
        change the backward's rounding."""
        if not self._tangents:
            return
        leaves = pytree.tree_leaves(output)
        for position in self._tangents:
            leaf = leaves[position]
            if leaf.grad_fn is not None:
                # Behind hooks of the tensor's, which may change its gradient.
                at = leaf.output_nr
                leaf.grad_fn.register_prehook(partial(self._look, arrived, position, at))

    def _look(
        self,
        arrived: ArrivedLayouts,
        position: int,
        at: int,
        gradients: tuple[torch.Tensor | None, ...],
    ) -> None:
        gradient = gradients[at]
        # An output that the loss does not use has none; the original runs for a batch of them.
        if gradient is None or is_batch(gradient):
            return
        if not self._may_round(position, gradient):
            if not same_strides(self._tangents[position].meta["val"], gradient.stride()):
                arrived.others[position] = _meta(gradient)
        elif not is_dense(gradient.shape, gradient.stride()):
            if gradient.untyped_storage().nbytes() > gradient.nbytes:
                self._say_loose(position, gradient)
            else:
                arrived.expanded[position] = gradient
        else:
            arrived.orders[position] = order_of(gradient)

    def without(self, arrived: ArrivedLayouts, missing: frozenset[int]) -> None:
        """Look once more at a backward without some tangents (positions among all): a sum with a
        missing gradient has the layout of the other one. Those gradients are ordered alike."""
        for position, gradient in arrived.others.items() if missing else ():
            if missing not in self._absent:
                self._absent[missing] = _absent(self._all, missing)
            absent = self._absent[missing]
            if not self._known(_may_round, position, gradient, True, absent):
                continue
            if not is_dense(gradient.shape, gradient.stride()):
                self._say_loose(position, gradient)
                continue
            order = order_of(gradient)
            lacking = (leaf for leaf, number in self._numbers.items() if number in missing)
            alike = (i for i in lacking if self._tangents[i].meta["val"].ndim == len(order))
            arrived.orders |= {position: order, **dict.fromkeys(alike, order)}

    def _may_round(self, position: int, gradient: torch.Tensor) -> bool:
        """Return whether the backward may round differently from the plan, given this gradient."""
        if self._known(_may_round, position, gradient, True):
            return True
        if not (expanded(gradient) and self._known(_may_round, position, gradient, False)):
            return False
        if gradient.is_cpu or position not in self._exact:
            # To see whether its sums are exact, the host waits for the device: once.
            with function_modes_off(), dispatch_modes_off():
                self._exact[position] = _sums_exactly(gradient)
        return not self._exact[position]

    def _known(
        self, asked: Callable[..., bool], position: int, gradient: torch.Tensor, *more: Any
    ) -> bool:
        """Return a function's answer for a tangent and a gradient, cached by layout."""
        key = asked, position, gradient.shape, gradient.stride(), more
        if key not in self._rounds:
            with function_modes_off(), dispatch_modes_off():
                self._rounds[key] = asked(self._tangents[position], gradient, *more)
        return self._rounds[key]

    def put_back(
        self, arrived: ArrivedLayouts, arguments: list[Any], by_kernels: Container[int]
    ) -> None:
        """Replace copies of expanded gradients among a backward's arguments, after the first, by
        the gradients that arrived; warn, once, of those that have to stay copies.

        Args:
            by_kernels: numbers of the tangents that a program's backward reads as eager does.
        """
        for position, gradient in arrived.expanded.items():
            number = self._numbers[position]
            if number in by_kernels and self._known(_lie_as_planned, position, gradient):
                arguments[1 + number] = gradient.detach()
            else:
                self._say_loose(position, gradient)
        arrived.expanded.clear()

    def _say(self, position: int, how: str) -> None:
        if not self._said:
            self._said = True
            warn(f"the gradient of output {position} of a planned model{how}")

    def _say_loose(self, position: int, gradient: torch.Tensor) -> None:
        how = "with gaps, a part of a larger one, as cat() gives it"
        if expanded(gradient):
            how = "expanded, one number for several elements, as sum() gives it"
        self._say(
            position,
            f" arrives {how}: it is copied first, and gradients can differ in their last bits from "
            "those of kernels that read it so. That of output * 1.0 is not: take the loss of it, "
            "with a plan or without",
        )

    def as_arrived(self, arrived: ArrivedLayouts, tangents: list[Any]) -> list[Any]:
        """Return the gradients with which a backward begins, in the layouts in which they
        arrived."""
        made = list(tangents)
        for position, order in arrived.orders.items():
            i = self._numbers[position]
            if isinstance(given := made[i], torch.Tensor):
                strides = in_order(given.shape, order)
                empty = torch.empty_strided(
                    given.shape, strides, dtype=given.dtype, device=given.device
                )
                made[i] = empty.copy_(given)
        return made

    def say(self, arrived: ArrivedLayouts) -> None:
        """Warn, once, that gradients in these layouts are copied."""
        # Orders of what is missing follow those of what arrives.
        position = min(arrived.orders.keys() & arrived.others.keys(), default=min(arrived.orders))
        shape = self._tangents[position].meta["val"].shape
        self._say(
            position,
            f", of shape {list(shape)}, arrives in another memory layout than the output's: it is "
            "copied first, and gradients can differ in their last bits. Return the output "
            "contiguous (output.contiguous()), or name the loss (loss_fn= of memopt.plan or "
            "memopt.wrap)",
        )


def _reaches_what_rounds(tangent: Node) -> bool:
    """Return whether a tangent reaches a kernel whose rounding depends on the layout."""
    waiting, seen = [tangent], {tangent}
    while waiting:
        for user in waiting.pop().users:
            if user.target in _AS_LAID_OUT:
                return True
            if user not in seen:
                seen.add(user)
                waiting.append(user)
    return False


def _absent(tangents: Sequence[Node], missing: frozenset[int]) -> frozenset[Node]:
    """Return the nodes of a graph that depend on missing tangents and on no other."""
    absent = {tangent: i in missing for i, tangent in enumerate(tangents)}
    for node in tangents[0].graph.nodes:
        if found := [absent[one] for one in node.all_input_nodes if one in absent]:
            absent[node] = all(found)
    return frozenset(node for node, alone in absent.items() if alone)


def _may_round(
    tangent: Node, gradient: torch.Tensor, exact: bool, absent: frozenset[Node] = frozenset()
) -> bool:
    """Return whether a kernel may round differently because the layout of a gradient, or of what is
    computed from it, is not the planned one.

    Args:
        exact: whether sums of the gradient's equal elements are exact.
        absent: nodes that are not computed.
    """
    shape = tangent.meta["val"].shape
    planned, found = {tangent: _meta(tangent.meta["val"])}, {tangent: _laid_as(gradient, shape)}
    if _alike(planned[tangent], found[tangent]):
        return False
    for node in tangent.graph.nodes:
        otherwise = [one for one in node.all_input_nodes if one in found]
        if node.op == "output" or not otherwise:
            continue
        if node.target in _AS_LAID_OUT:
            copied = all(expanded(found[one]) for one in otherwise)
            sums = node.target == aten.sum.dim_IntList and exact
            if not copied or not (sums or node.target in _COPY_FIRST):
                return True
            continue
        try:
            results = _layouts(node, planned), _layouts(node, found)
            if node.target is aten.add.Tensor and not absent.isdisjoint(node.all_input_nodes):
                results = results[0], (found[otherwise[0]], None)
        except REFUSALS:
            # A size that only the graph knows, or a kernel that says nothing of layouts.
            if _reaches_what_rounds(node):
                return True
            continue
        for one, other in zip(*results, strict=True):
            if not _alike(one, other):
                planned[node], found[node] = one, other
                break
    return False


def rounds_otherwise(node: Node, given: Mapping[Node, torch.Tensor]) -> bool:
    """Return whether a kernel may round differently from the plan if some arguments of an operator
    have the layouts of the given tensors (without data)."""
    try:
        result, _ = _layouts(node, {one: _meta(value) for one, value in given.items()})
    except REFUSALS:
        return _reaches_what_rounds(node)
    return isinstance(result, torch.Tensor) and _may_round(node, result, True)


def _lie_as_planned(tangent: Node, gradient: torch.Tensor) -> bool:
    """Return whether torch's kernels give results in the same layouts from an expanded gradient as
    from a gapless copy, which is planned."""
    given = tangent.meta["val"]
    as_given, as_arrived = {tangent: _meta(given)}, {tangent: _laid_as(gradient, given.shape)}
    for node in tangent.graph.nodes:
        if node.op == "output" or as_given.keys().isdisjoint(node.all_input_nodes):
            continue
        overload = node.target
        if not isinstance(overload, OpOverload) or overload.namespace != "aten":
            return False
        try:
            results = _layouts(node, as_given), _layouts(node, as_arrived)
        except REFUSALS:
            return False
        (planned, _), (found, _) = results
        views = [_is_view(node, planned, as_given), _is_view(node, found, as_arrived)]
        if all(views):
            as_given[node], as_arrived[node] = planned, found
        elif any(views) or not _alike(*results):
            return False
    return True


def _laid_as(gradient: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return a tensor without data of the planned shape, in the layout of a gradient, which may
    have another shape."""
    strides: Sequence[int] = gradient.stride()
    if gradient.shape != shape:
        shared = expanded(gradient)
        strides = in_order(shape, (i for i in order_of(gradient) if i not in shared))
    return torch.empty_strided(shape, strides, dtype=gradient.dtype, device="meta")


def _meta(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _layouts(node: Node, known: dict[Node, Any]) -> tuple[Any, Any]:
    """Return an operator's results without data, given some operands' layouts (the others as
    traced): with the layouts that torch's fake kernel gives, and with those of a kernel that
    computes element by element. Fake kernels of some such operators (`hardswish_backward`) give the
    layouts of a decomposition.

    Raises:
        one of REFUSALS: the operator does not run so.
    """

    def value(one: Node) -> Any:
        return known[one] if one in known else _meta(one.meta.get("val"))

    traced = node.meta["val"]
    if isinstance(node.target, FusedKernel):  # its results lie so however its inputs do
        return pytree.tree_map(_meta, traced), None
    args, kwargs = map_arg((node.args, node.kwargs), value)
    given = [value(one) for one in node.all_input_nodes]
    try:
        result = node.target(*args, **kwargs)  # type: ignore[operator]
    except RuntimeError:
        if node.target not in _IN_A_ROW:
            raise
        result = torch.empty(traced.shape, dtype=traced.dtype, device="meta")
    by_elements = isinstance(traced, torch.Tensor) and all(
        isinstance(one, torch.Tensor) and one.shape == traced.shape for one in given
    )
    if not by_elements or len(given) not in _LIKE_OF:
        return result, None
    like = [torch.empty_strided(one.shape, one.stride(), device="meta") for one in given]
    return result, _LIKE_OF[len(given)](*like)


def _is_view(node: Node, result: Any, known: dict[Node, Any]) -> bool:
    """Return whether an operator's result is in the memory of an argument that is known."""
    if not isinstance(result, torch.Tensor):
        return False
    arguments = [known[one] for one in node.all_input_nodes if one in known]
    return storage_of(result) in map(storage_of, arguments)


def _alike(planned: Any, found: Any) -> bool:
    """Return whether two results of an operator are laid out alike."""
    pairs = zip(pytree.tree_leaves(planned), pytree.tree_leaves(found), strict=True)
    return all(
        same_strides(one, other.stride())
        for one, other in pairs
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    )


def _sums_exactly(gradient: torch.Tensor) -> bool:
    """Return whether sums of a gradient's equal elements are exact: powers of two, or zeros."""
    few = gradient.detach()
    for dim in expanded(gradient):
        few = few.narrow(dim, 0, 1)
    if few.is_complex():
        few = torch.view_as_real(few)
    fractions = torch.frexp(few.float()).mantissa.abs()
    return bool(((fractions == 0.5) | (fractions == 0)).all())
