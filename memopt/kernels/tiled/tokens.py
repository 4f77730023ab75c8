"""Finds the dimensions of a step that count tokens, and the operators that work token by token.

Dimensions that operators take element by element are one class. The rows of a product's left
operand are the tokens of a class, wherever that is computed; where a view joins two dimensions to
such rows, as [sequences, length, features] to [rows, features], the two are the tokens' sequences
and their length.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from memopt.kernels.tiled.dims import Dims, Labels, dims_of
from memopt.models.disjoint import DisjointSets
from memopt.models.graph import Phase
from memopt.step.build import Lowering
from memopt.step.signature import values_of

PRODUCTS = ("aten.mm.default", "aten.addmm.default")
Element = tuple[Node, int, int]
"""A node, the number of its result, and a dimension of that."""


@dataclass(frozen=True)
class Axis:
    """The dimensions of one kind of tokens.

    Attributes:
        rows: the class of all tokens in one dimension.
        sequences, length: the classes of two dimensions that `rows` joins; None: nothing does.
        counts: how many sequences, and how many tokens each.
    """

    rows: Any
    sequences: Any
    length: Any
    counts: tuple[int, int]

    def part_of(self, found: Any) -> str:
        """Return the unit that a class of dimensions counts: "rows", "sequences", "length"; "" for
        no tokens."""
        if found is None:
            return ""
        names = {self.rows: "rows", self.sequences: "sequences", self.length: "length"}
        return names.get(found, "")


class Tokens:
    """The classes of a step's dimensions."""

    def __init__(self, lowering: Lowering) -> None:
        self._lowering = lowering
        self._equal = DisjointSets[Any]()
        self._size: dict[Any, int] = {}
        self._merged: list[tuple[Any, tuple[Any, Any]]] = []
        self.dims: dict[Node, Dims] = {}
        nodes = [*lowering.nodes, *lowering.views]
        for node in nodes:
            made = dims_of(node)
            if made is not None:
                self.dims[node] = made
                self._join(node, made)
        for node in nodes:
            if node.target is operator.getitem and isinstance(node.args[0], Node):
                parent, number = node.args
                for dim in range(node.meta["val"].dim() if _is_tensor(node) else 0):
                    self._equal.join((parent, number, dim), (node, 0, dim))
        self._close()
        self.axes = tuple(self._found_axes())

    def _join(self, node: Node, made: Dims) -> None:
        own = {label: (node, label) for label in _labels(made)}
        shapes = [
            ((one, 0), labels, one.meta["val"].shape)
            for one, labels in made.ins
            if isinstance(one.meta["val"], torch.Tensor)
        ]
        values = values_of(node)
        shapes += [
            ((node, number), labels, values[number].shape)
            for number, labels in enumerate(made.outs)
            if labels is not None
        ]
        for (one, number), labels, shape in shapes:
            for dim, (label, size) in enumerate(zip(labels, shape, strict=True)):
                if label is not None:
                    self._equal.join(own[label], (one, number, dim))
                    self._size[own[label]] = int(size)
        for whole, (outer, inner) in made.merges:
            self._merged.append((own[whole], (own[outer], own[inner])))

    def _close(self) -> None:
        """Join classes until nothing changes: joined dimensions are equal if their parts are, and
        parts of equal sizes are equal if the dimensions that they are joined to are."""
        changed = True
        while changed:
            changed = False
            wholes: dict[Any, Any] = {}
            parts: dict[Any, tuple[Any, Any]] = {}
            for whole, (outer, inner) in self._merged:
                pair = self._equal.root(outer), self._equal.root(inner)
                changed |= self._equal.join(wholes.setdefault(pair, whole), whole)
                sizes = self._size[outer], self._size[inner]
                known = parts.setdefault((self._equal.root(whole), sizes), pair)
                changed |= self._equal.join(known[0], pair[0])
                changed |= self._equal.join(known[1], pair[1])

    def _found_axes(self) -> Iterator[Axis]:
        graph = self._lowering.graph
        seen = set()
        for node, call in zip(self._lowering.nodes, graph.operators, strict=True):
            if call.phase is not Phase.FORWARD or str(node.target) not in PRODUCTS:
                continue
            left: Any = node.args[-2]
            (held,) = self._lowering.storages[left]
            rows = self.class_of(left, 0)
            if held in graph.resident or rows in seen or left.meta["val"].shape[0] == 1:
                continue
            seen.add(rows)
            yield self._axis(rows, int(left.meta["val"].shape[0]))

    def _axis(self, rows: Any, count: int) -> Axis:
        for whole, (outer, inner) in self._merged:
            if self._equal.root(whole) == rows:
                counts = self._size[outer], self._size[inner]
                return Axis(rows, self._equal.root(outer), self._equal.root(inner), counts)
        return Axis(rows, None, None, (1, count))

    def class_of(self, node: Node, dim: int, number: int = 0) -> Any:
        """Return the class of a dimension."""
        return self._equal.root((node, number, dim))

    def places(self, node: Node, axis: Axis, number: int = 0) -> tuple[str, ...]:
        """Return the unit that each dimension of a result counts (`Axis.part_of`)."""
        value = values_of(node)[number]
        return tuple(
            axis.part_of(self.class_of(node, dim, number)) if size != 1 else ""
            for dim, size in enumerate(value.shape)
        )

    def axis_of(self, node: Node, *, sums: bool) -> Axis | None:
        """Return the tokens that a call processes one by one; None if it does not."""
        made = self.dims.get(node)
        if made is None:
            return None
        classes = {label: self._equal.root((node, label)) for label in _labels(made)}
        found = [axis for axis in self.axes if _touches(axis, classes)]
        if len(found) != 1:
            return None
        (axis,) = found
        return axis if _works_by_token(made, axis, classes, sums) else None


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _labels(made: Dims) -> set[int]:
    groups = [labels for _, labels in made.ins] + [labels or () for labels in made.outs]
    return {label for labels in groups for label in labels if label is not None}


def _touches(axis: Axis, classes: Mapping[int, Any]) -> bool:
    own = {axis.rows} | ({axis.length} if axis.length is not None else set())
    return any(found in own for found in classes.values())


def _works_by_token(made: Dims, axis: Axis, classes: Mapping[int, Any], sums: bool) -> bool:
    parts = {label: axis.part_of(found) for label, found in classes.items()}
    counting = [label for label, part in parts.items() if part]
    if any(label in made.mixed for label in counting):
        return False
    if len({parts[label] for label in counting}) != len(counting):
        return False  # two dimensions of one class, as in a product of tokens with tokens
    joined = {whole: set(pair) for whole, pair in made.merges}
    for whole, pair in joined.items():
        named = {parts[whole], *(parts[one] for one in pair)}
        if named != {""} and named != {"rows", "sequences", "length"}:
            return False
    complete = [{"rows"}, {"sequences", "length"} if axis.sequences is not None else {"rows"}]

    def counted(labels: Labels) -> set[str]:
        return {parts[label] for label in labels if label is not None and parts[label]}

    if not any(counted(labels) in complete for _, labels in made.ins):
        return False
    owns = [counted(labels) for labels in made.outs if labels is not None]
    return all(own in complete or (not own and sums and made.sums) for own in owns)
