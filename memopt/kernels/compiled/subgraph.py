"""Copies a region into a graph of its own, with inputs, outputs and a key of its computation."""

from __future__ import annotations

import hashlib
import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

from memopt.kernels.compiled.divide import Region
from memopt.kernels.compiled.dropout import dropped_out, is_dropout, kept_elements, mask_of
from memopt.kernels.compiled.fusible import is_constant
from memopt.kernels.compiled.norms import output_of, parts_of
from memopt.kernels.compiled.pooling import (
    is_pooling,
    is_unpooling,
    names_maxima,
    pooled,
    read_by,
    unpooled,
)
from memopt.kernels.compiled.rematerialise import Rematerialised
from memopt.models.graph import Phase
from memopt.step.build import Lowering
from memopt.step.region_graph import Subgraph, TensorLayout
from memopt.step.signature import each

_FORM = "3"
"""Changed when equal operators are compiled otherwise, since measured costs are stored by key."""


def subgraphs(
    lowering: Lowering,
    regions: Sequence[Region],
    again: Rematerialised,
) -> list[tuple[Region, Subgraph]]:
    """Return regions as graphs of their own, without those that write nothing. They must be
    replaced together: masks of dropouts that only they read are not written, nor are the tensors
    that the backward's regions rematerialise (`again`)."""
    together = _Together.of(lowering, regions, again)
    taken = ((region, _Taken(lowering, region, together).made()) for region in regions)
    return [(region, one) for region, one in taken if one is not None]


@dataclass(frozen=True)
class _Together:
    """The regions that are replaced together: their calls, all calls of the backward, the tensors
    that its regions rematerialise, and the nodes that hold each tensor."""

    calls: frozenset[Node]
    backward: frozenset[Node]
    again: Rematerialised
    holders: Mapping[int, Sequence[Node]]

    @staticmethod
    def of(lowering: Lowering, regions: Sequence[Region], again: Rematerialised) -> _Together:
        nodes, operators = lowering.nodes, lowering.graph.operators
        backward = (op for op, one in enumerate(operators) if one.phase is Phase.BACKWARD)
        holders: dict[int, list[Node]] = defaultdict(list)
        for node, held in lowering.storages.items():
            for tensor in held:
                if tensor is not None:
                    holders[tensor].append(node)
        return _Together(
            frozenset(nodes[op] for region in regions for op in region.operators),
            frozenset(nodes[op] for op in backward),
            again,
            holders,
        )


class _Taken:
    """Copies a region's calls, the views between them, constants and masks into a graph."""

    def __init__(self, lowering: Lowering, region: Region, together: _Together) -> None:
        self.lowering = lowering
        self.together = together
        self.calls = [lowering.nodes[op] for op in region.operators]
        self.inside = set(self.calls)
        self.written = {
            tensor for op in region.operators for tensor in lowering.graph.operators[op].writes
        }
        written = (t for t, one in together.again.written.items() if one == region)
        self.again = tuple(lowering.bases[tensor] for tensor in written)
        self.graph = FxGraph()
        self.copies: dict[Node, Node] = {}
        self.inputs: dict[Node, Node] = {}
        self.seeds: dict[Node, Node] = {}
        self.pooled: dict[Node, tuple[Node, Node]] = {}

    def made(self) -> Subgraph | None:
        outputs = (*self._outputs(), *self.again)
        if not outputs:
            return None
        inputs, dropouts = self._read()
        for node in inputs:
            self.inputs[node] = self.graph.placeholder(f"in{len(self.inputs)}")
            self.inputs[node].meta["val"] = self._value(node)
        for node in dropouts:
            self.seeds[node] = self.graph.placeholder(f"seed{len(self.seeds)}")
            value = node.args[0].meta["val"]  # type: ignore[union-attr]
            with value.fake_mode:
                self.seeds[node].meta["val"] = torch.empty(
                    2, dtype=torch.int32, device=value.device
                )
        results = [self.copy(node) for node in outputs]
        self.graph.output(tuple(results))
        given = self.graph.find_nodes(op="placeholder")
        layouts = tuple(TensorLayout.of(node.meta["val"]) for node in given)
        values = tuple(map(self._value, outputs))
        written = tuple(map(TensorLayout.of, values))
        key = region_key(self.graph, layouts, written)
        boundary = tuple(inputs), outputs, values, layouts, written, tuple(dropouts)
        return Subgraph(self.graph, *boundary, key, frozenset(self.again))

    def _value(self, node: Node) -> torch.Tensor:
        """Return the value of a node of the step, in the form in which regions read or write it."""
        value: torch.Tensor = node.meta["val"]
        if names_maxima(node) in self.together.calls:
            return _like(value, torch.uint8)
        return _like(value, value.dtype) if node in self.again else value

    def _outputs(self) -> tuple[Node, ...]:
        """Return the nodes that name the tensors read outside of the region."""
        together, bases = self.together, self.lowering.bases
        return tuple(
            bases[tensor]
            for tensor in sorted(self.written & bases.keys())
            if tensor in together.again.kept
            or any(map(self._is_read_outside, together.holders[tensor]))
        )

    def _is_read_outside(self, node: Node) -> bool:
        """Return whether a node's value leaves the region: a kernel outside of it reads the value,
        or the step returns it. Readers that recompute it themselves do not count."""
        together = self.together
        inside = together.calls if self._masking(node) is not None else self.inside
        making = together.backward if self._is_made_again(node) else frozenset()
        return any(
            user not in inside
            and user not in self.lowering.views
            and user not in making
            and not (user in together.calls and node not in read_by(user))
            for user in node.users
            if user.op == "output" or user in self.lowering.storages
        )

    def _is_made_again(self, node: Node) -> bool:
        """Return whether the backward's regions recompute a value of the forward themselves."""
        return self.lowering.storages.get(node, (None,))[0] in self.together.again.tensors

    def _masking(self, node: Node) -> Node | None:
        """Return the dropout, inside a region, whose mask this node is or views; None if there is
        none."""
        held = self.lowering.storages.get(node, (None,))
        if len(held) != 1 or held[0] is None:
            return None
        base = self.lowering.bases.get(held[0])
        if base is None or base.target is not operator.getitem or base.args[1] != 1:
            return None
        call = base.args[0]
        found = isinstance(call, Node) and call in self.together.calls and is_dropout(call)
        return call if found else None  # type: ignore[return-value]

    def _read(self) -> tuple[list[Node], list[Node]]:
        """Return the step's nodes that the region reads, and the dropouts whose masks it makes, in
        the order in which it makes them."""
        inputs: dict[Node, None] = {}
        dropouts: dict[Node, None] = {}

        def look(node: Node) -> None:
            call = self._masking(node)
            if call is not None:
                dropouts.setdefault(call)
            elif node in self.inside:
                if is_dropout(node):
                    dropouts.setdefault(node)
            elif self._is_between(node) or self._is_constant(node) or self._makes_again(node):
                if is_dropout(node):
                    dropouts.setdefault(node)
                for source in self._sources(node):
                    look(source)
            else:
                inputs.setdefault(node)

        for call in self.calls:
            look(call)
            for source in read_by(call):
                look(source)
        for node in self.again:
            look(node)
        return list(inputs), list(dropouts)

    def _sources(self, node: Node) -> list[Node]:
        """Return the operands from which the region makes a node outside of it."""
        call = self._norm(node)
        if call is None:
            return node.all_input_nodes
        return [one for one in parts_of(call) or () if one is not None]

    def _norm(self, node: Node) -> Node | None:
        """Return the norm that this node is the output of, if the region recomputes the node; else
        None."""
        if node.target is not operator.getitem or node.args[1] != 0 or not self._makes_again(node):
            return None
        call = node.args[0]
        return call if isinstance(call, Node) and parts_of(call) is not None else None

    def _makes_again(self, node: Node) -> bool:
        return self.calls[0] in self.together.backward and self._is_made_again(node)

    def _is_between(self, node: Node) -> bool:
        """Return whether a node is a view of a tensor that the region writes."""
        held = self.lowering.storages.get(node, ())
        return node in self.lowering.views and any(tensor in self.written for tensor in held)

    def _is_constant(self, node: Node) -> bool:
        """Return whether a node is a small constant that the region makes itself."""
        from_nothing = not any(source.op == "call_function" for source in node.all_input_nodes)
        return node in self.lowering.storages and is_constant(node) and from_nothing

    def copy(self, node: Node) -> Node:
        """Return the node of the region's graph that stands for a node of the step."""
        if node in self.inputs:
            return self.inputs[node]
        if node not in self.copies:
            self.copies[node] = self._copied(node)
        return self.copies[node]

    def _copied(self, node: Node) -> Node:
        norm = self._norm(node)
        if norm is not None:
            return output_of(self.graph, norm, self.copy)
        if node.target is operator.getitem and is_dropout(node.args[0]):  # type: ignore[arg-type]
            call: Any = node.args[0]
            if node.args[1] == 0:
                return self.copy(call)
            value = call.args[0].meta["val"]
            return kept_elements(self.graph, value, float(call.args[1]), self.seeds[call])
        if is_dropout(node):
            x, p, _ = node.args
            mask = self._mask(node)
            return dropped_out(self.graph, self.copy(x), float(p), mask)  # type: ignore[arg-type]
        if is_pooling(node.args[0]) and node.target is operator.getitem:
            return self._pooled(node.args[0])[node.args[1]]  # type: ignore[arg-type, index]
        if is_unpooling(node):
            gradient, places = map(self.copy, read_by(node))
            return unpooled(self.graph, node, gradient, places)
        args, kwargs = map_arg((node.args, node.kwargs), self.copy)
        made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta["val"] = node.meta["val"]
        return made

    def _pooled(self, call: Node) -> tuple[Node, Node]:
        if call not in self.pooled:
            image: Any = call.args[0]
            self.pooled[call] = pooled(self.graph, call, self.copy(image))
        return self.pooled[call]

    def _mask(self, call: Node) -> Node:
        named = mask_of(call)
        if named is not None:
            return self.copy(named)
        x, p, _ = call.args
        return kept_elements(self.graph, x.meta["val"], float(p), self.seeds[call])  # type: ignore[union-attr, arg-type]


def _like(value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a fake value with another's layout, in memory of its own."""
    with value.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(value.shape, value.stride(), dtype=dtype, device=value.device)


def _shown(value: Any) -> str:
    return value.type if isinstance(value, torch.device) else str(value)


def region_key(
    graph: FxGraph, layouts: Iterable[TensorLayout], results: Iterable[TensorLayout]
) -> str:
    """Return a key that equal regions have in every process."""
    numbers = {node: position for position, node in enumerate(graph.nodes)}

    def named(value: Any) -> Any:
        return map_arg(value, lambda node: f"%{numbers[node]}")

    lines = [_FORM, *map(str, layouts), "->", *map(str, results)]
    for node in graph.nodes:
        if node.op != "placeholder":
            shown = each(_shown, named(node.args)), each(_shown, named(node.kwargs))
            lines.append(f"{node.target}{shown}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]
