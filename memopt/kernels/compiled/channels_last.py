"""Puts images of a captured step in channels-last order, where convolutions are faster on the CPU.

Inductor does the same to a whole graph (`GraphLowering.decide_layout_opt`: on the CPU wherever
oneDNN is); a region that is compiled alone takes the order of its surroundings. So here an image
that a convolution reads is copied into that order unless it has it already, and later values get
the layouts that their kernels then give them. Results of the step keep their layout, and views
that cannot read an image in that order read a copy in the old one. Which order is faster is
measured (`memopt.kernels.compiled.choice`): ResNet-50's filter gradients lose what its
convolutions gain, a U-Net gains an eighth of its step.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from memopt.capture.as_eager.layouts import layouts_of_kernels
from memopt.kernels.compiled.replace import with_renamed
from memopt.step.backend import autocast_off
from memopt.step.captured import Captured
from memopt.step.memory_layout import same_strides, storage_of
from memopt.step.nodes import is_random, tensors_of
from memopt.step.numerics import numeric_settings
from memopt.step.signature import (
    ENDS_PROCESS,
    REFUSALS,
    Answers,
    Arguments,
    Signature,
    StandIns,
    TensorArgument,
    call_signature,
    signature,
)
from memopt.step.trial import TrialData
from memopt.torch_private import pytree
from memopt.torch_private.operators import OpOverload

_ATEN = torch.ops.aten
_CONVOLUTIONS: dict[Any, int] = {
    _ATEN.convolution.default: 1,
    _ATEN.convolution_backward.default: 2,
}
"""Convolution → number of its leading arguments that are images."""
_BOUND_TO_STRIDES = frozenset(
    {"aten.as_strided.default", "aten.as_strided_scatter.default", "aten.view_as_real.default"}
)
_EMPTY = (_ATEN.empty_like.default, _ATEN.new_empty.default, _ATEN.new_empty_strided.default)
_ROW_MAJOR, _CHANNELS_LAST = torch.contiguous_format, torch.channels_last


@dataclass(frozen=True)
class InChannelsLast:
    """A step whose images were put in channels-last order."""

    captured: Captured
    undo: Callable[[], None]


def is_of_images(node: Node) -> bool:
    """Return whether a node convolves images, or copies one into another order."""
    if node.target in _CONVOLUTIONS:
        return _reads_image(node)
    return node.target is _ATEN.clone.default and "memory_format" in node.kwargs


def in_channels_last(captured: Captured) -> InChannelsLast | None:
    """Put the images of a step in channels-last order. Return None, and change nothing, if it has
    no convolution of images on the CPU, is not to be computed, or relies on strides."""
    graph = captured.module.graph
    images = [node for node in graph.nodes if node.target in _CONVOLUTIONS and _reads_image(node)]
    on_host = captured.device is not None and captured.device.type == "cpu"
    if not images or not on_host or not torch.backends.mkldnn.enabled:
        return None
    if any(str(node.target) in _BOUND_TO_STRIDES for node in graph.nodes):
        return None
    found = _Layouts(captured)
    try:
        found.follow()
    except REFUSALS:  # An operator takes its operands in one order only.
        return None
    return found.applied() if found.can_return() else None


def _reads_image(node: Node) -> bool:
    return all(value.dim() == 4 for value in tensors_of(node.args[0]))  # type: ignore[arg-type]


def _is_view(node: Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


@dataclass
class _Layouts:
    """The values of a graph's nodes in their new layouts, and the copies needed for that.

    Attributes:
        captured: the step.
        values: node → its value.
        copies: (copied node, order of the copy) → the copy's value.
        reads: node that reads copies → their order.
    """

    captured: Captured
    values: dict[Node, Any] = field(default_factory=dict)
    copies: dict[tuple[Node, torch.memory_format], torch.Tensor] = field(default_factory=dict)
    reads: dict[Node, torch.memory_format] = field(default_factory=dict)

    def follow(self) -> None:
        """Find every node's value, in the order of the graph."""
        graph = self.captured.module.graph
        with layouts_of_kernels(self.captured.device):
            for node in graph.nodes:
                if node.op == "call_function":
                    self.values[node] = self._value(node)
                else:
                    self.values[node] = node.meta.get("val")

    def _value(self, node: Node) -> Any:
        if node.target in _CONVOLUTIONS and _reads_image(node):
            return self._result(node, _CHANNELS_LAST)
        if all(self.values[one] is one.meta.get("val") for one in node.all_input_nodes):
            return node.meta.get("val")
        try:
            result = self._result(node, None)
        except REFUSALS:
            return self._result(node, _ROW_MAJOR)
        return result if self._computes_alike(node) else self._result(node, _ROW_MAJOR)

    def _computes_alike(self, node: Node) -> bool:
        """Return whether a kernel computes the same in any order. Views do, and so do kernels of
        random or uninitialised numbers."""
        target: Any = node.target
        if target is operator.getitem or is_random(node) or target in _EMPTY:
            return True
        if _is_view(node):
            return True
        before = signature(node)
        args, kwargs = map_arg((node.args, node.kwargs), lambda one: self.values[one])
        device = self.captured.device
        assert device is not None
        return computes_alike(before, call_signature(node.target, args, kwargs), device)

    def _result(self, node: Node, order: torch.memory_format | None) -> Any:
        """Return the result of a call whose images are in an order; None: in their present one."""
        if order is not None:
            self.reads[node] = order

        def given(one: Node) -> Any:
            return self.values[one] if order is None else self._ordered(node, one, order)

        args, kwargs = map_arg((node.args, node.kwargs), given)
        # A view shares the layout of its operand, here a copy; other kernels give their old result.
        if order is _ROW_MAJOR and not _is_view(node):
            return node.meta.get("val")
        fake = next((v.fake_mode for v in tensors_of(node)), None)  # type: ignore[attr-defined]
        if fake is None:
            return node.meta.get("val")
        with fake:
            return node.target(*args, **kwargs)  # type: ignore[operator]

    def _ordered(self, reader: Node, one: Node, order: torch.memory_format) -> Any:
        value = self.values[one]
        if not self._is_copied(reader, one, order):
            return value
        if (one, order) not in self.copies:
            with value.fake_mode:
                self.copies[one, order] = _ATEN.clone.default(value, memory_format=order)
        return self.copies[one, order]

    def _is_copied(self, reader: Node, one: Node, order: torch.memory_format) -> bool:
        """Return whether a node reads a copy of another: convolutions copy the image and its
        gradient, other nodes copy values that were row-major before."""
        value = self.values[one]
        if order is _ROW_MAJOR:
            return value is not one.meta.get("val") and isinstance(value, torch.Tensor)
        is_image = one in reader.args[: _CONVOLUTIONS[reader.target]]
        return is_image and not value.is_contiguous(memory_format=_CHANNELS_LAST)

    def can_return(self) -> bool:
        """Return whether each result of the step is laid out as before, or was row-major without
        sharing memory with another: then a copy is returned."""
        results = self.captured.module.graph.output_node().all_input_nodes
        shared = Counter(storage_of(value) for value in tensors_of(*results))
        return all(
            before.is_contiguous() and shared[storage_of(before)] == 1
            for _, before in self._returned()
        )

    def _returned(self) -> Iterator[tuple[Node, torch.Tensor]]:
        """Yield the step's results whose layout has changed, with their former values."""
        for one in self.captured.module.graph.output_node().all_input_nodes:
            before, after = one.meta.get("val"), self.values[one]
            if isinstance(before, torch.Tensor) and not same_strides(before, after.stride()):
                yield one, before

    def applied(self) -> InChannelsLast:
        """Change the graph."""
        graph = self.captured.module.graph
        output = graph.output_node()
        returned = list(self._returned())
        before_values = {node: node.meta.get("val") for node in self.values}
        made: dict[tuple[Node, torch.memory_format], Node] = {}
        for reader, order in self.reads.items():
            for one in reader.all_input_nodes:
                if self._is_copied(reader, one, order):
                    if (one, order) not in made:
                        made[one, order] = self._copy(reader, one, order)
                    reader.replace_input_with(one, made[one, order])
        for node, value in self.values.items():
            if node.op == "call_function" and "val" in node.meta:
                node.meta["val"] = value
        renamed = {}
        for one, before in returned:
            self.copies[one, _ROW_MAJOR] = before
            renamed[one] = self._copy(one.next, one, _ROW_MAJOR)
            output.replace_input_with(one, renamed[one])

        def undo() -> None:
            for one, copy in [*((key[0], copy) for key, copy in made.items()), *renamed.items()]:
                copy.replace_all_uses_with(one)
                graph.erase_node(copy)
            for node, value in before_values.items():
                if node.op == "call_function" and "val" in node.meta:
                    node.meta["val"] = value

        return InChannelsLast(with_renamed(self.captured, renamed), undo)

    def _copy(self, before: Node, one: Node, order: torch.memory_format) -> Node:
        graph = self.captured.module.graph
        with graph.inserting_before(before):
            copy = graph.call_function(_ATEN.clone.default, (one,), {"memory_format": order})
        copy.meta = {**one.meta, "val": self.copies[one, order]}
        return copy


_CLOSE, _CLOSE_IN_HALF = 1e-3, 0.05
"""Tolerances, relative to the largest number that a call reads or returns."""
_known = Answers()


def computes_alike(before: Signature, after: Signature, device: torch.device) -> bool:
    """Return whether a call, which draws no random numbers, gives the same numbers up to rounding
    on stand-in data when its operands have other layouts.

    Some kernels go through memory without looking at strides: the backward of `weight_norm` gives
    other numbers for a filter's gradient in channels-last order. A user's model does not run into
    that, but a model whose images memopt puts in another order could."""
    key = before.text, after.text, device, numeric_settings()
    return bool(_known.find(key, lambda: _tried(before, after, device)))


def _tried(before: Signature, after: Signature, device: torch.device) -> bool:
    if before.target in ENDS_PROCESS:
        return False
    with torch.no_grad(), autocast_off():
        # Values of either sign test more, but not every kernel takes them.
        for data in (TrialData(device), StandIns(device)):
            given = data.arguments(after)
            try:
                same = _laid_out(given, before)
                found, wanted = (before.target(*one[0], **one[1]) for one in (given, same))
            except REFUSALS:
                continue
            return _are_close(found, wanted, [given, wanted])
    return False


def _laid_out(given: Arguments, like: Signature) -> Arguments:
    """Return arguments with the given values and a call's strides.

    Raises:
        RuntimeError: elements that share memory have different values.
    """

    def copied(value: Any, wanted: Any) -> Any:
        if not isinstance(wanted, TensorArgument) or value.stride() == wanted.stride:
            return value
        made = torch.empty_strided(
            wanted.shape, wanted.stride, dtype=value.dtype, device=value.device
        )
        return made.copy_(value)

    made: Arguments = pytree.tree_map(copied, given, (like.args, like.kwargs))
    return made


def _are_close(found: Any, wanted: Any, around: Any) -> bool:
    pairs = list(zip(_tensors(found), _tensors(wanted), strict=True))
    numbers = [one for one in _tensors(around) if one.is_floating_point()]
    largest = max((float(one.abs().max()) for one in numbers if one.numel()), default=0.0)
    half = any(one.itemsize < torch.float32.itemsize for one in numbers)
    atol = largest * (_CLOSE_IN_HALF if half else _CLOSE)
    return all(
        torch.allclose(one.float(), other.float(), rtol=0, atol=atol, equal_nan=True)
        if one.is_floating_point()
        else torch.equal(one, other)
        for one, other in pairs
    )


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in pytree.tree_leaves(values) if isinstance(one, Tensor)]
