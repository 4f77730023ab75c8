"""Copies a region into a graph of its own, with what it computes again of the forward."""

from __future__ import annotations

from typing import Any

from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

from memopt.kernels.compiled.divide import Region
from memopt.kernels.compiled.subgraph import region_key
from memopt.kernels.tiled.divide import Tiling
from memopt.kernels.tiled.tokens import Axis, Tokens
from memopt.models.graph import Phase
from memopt.step.build import Lowering
from memopt.step.region_graph import Subgraph, TensorLayout
from memopt.step.signature import values_of

PLACES = "memopt_places"
"""Key in the meta of a copied node: for each result, what its dimensions count."""
ORIGIN = "memopt_origin"
"""Key in the meta of a copied node: the step's node."""


def taken(
    lowering: Lowering, tokens: Tokens, made: Tiling, order: dict[Node, int]
) -> list[tuple[Region, Axis, Subgraph]]:
    """Return the regions as graphs of their own, without regions that write nothing."""
    found = []
    for region, axis in made.regions:
        one = _Copied(lowering, tokens, made, region, axis).made(order)
        if one is not None:
            found.append((region, axis, one))
    return found


class _Copied:
    def __init__(
        self, lowering: Lowering, tokens: Tokens, made: Tiling, region: Region, axis: Axis
    ) -> None:
        self._lowering, self._tokens, self._axis = lowering, tokens, axis
        operators = lowering.graph.operators
        self._ops = region.operators
        backward = operators[region.operators[0]].phase is Phase.BACKWARD
        self._written = {t for op in region.operators for t in operators[op].writes}
        self._made_here = self._written | (made.again if backward else frozenset())
        self._readable = made.again
        self._graph = FxGraph()

    def made(self, order: dict[Node, int]) -> Subgraph | None:
        outputs = self._outputs()
        if not outputs:
            return None
        inputs, inside = self._read(outputs, order)
        copies: dict[Node, Node] = {}
        for node in inputs:
            copies[node] = self._graph.placeholder(f"in{len(copies)}")
            self._tell(copies[node], node)
        for node in inside:
            args, kwargs = map_arg((node.args, node.kwargs), copies.__getitem__)
            copies[node] = self._graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
            self._tell(copies[node], node)
        self._graph.output(tuple(copies[node] for node in outputs))
        layouts = tuple(TensorLayout.of(node.meta["val"]) for node in inputs)
        values = tuple(node.meta["val"] for node in outputs)
        written = tuple(map(TensorLayout.of, values))
        key = region_key(self._graph, layouts, written)
        boundary = tuple(inputs), outputs, values, layouts, written, ()
        return Subgraph(self._graph, *boundary, key)

    def _tell(self, copied: Node, node: Node) -> None:
        copied.meta["val"] = node.meta["val"]
        copied.meta[ORIGIN] = node
        copied.meta[PLACES] = tuple(
            self._tokens.places(node, self._axis, number) if hasattr(value, "shape") else ()
            for number, value in enumerate(values_of(node))
        )

    def _outputs(self) -> tuple[Node, ...]:
        """Return the nodes that name the tensors read outside of the region."""
        graph, bases = self._lowering.graph, self._lowering.bases
        results, own = {*graph.outputs, *graph.gradients}, set(self._ops)
        return tuple(
            bases[t]
            for t in sorted(self._written & bases.keys())
            if t not in self._readable and (t in results or not own.issuperset(graph.readers[t]))
        )

    def _is_made_here(self, node: Node) -> bool:
        if node.op != "call_function":
            return False
        held = self._lowering.storages.get(node, ())
        return any(t in self._made_here for t in held)

    def _read(
        self, outputs: tuple[Node, ...], order: dict[Node, int]
    ) -> tuple[list[Node], list[Node]]:
        """Return the nodes that the region reads, and those that it computes, in the step's
        order."""
        inputs: set[Node] = set()
        inside: set[Node] = set()
        stack: list[Any] = list(outputs)
        while stack:
            node = stack.pop()
            if node in inputs or node in inside:
                continue
            if self._is_made_here(node):
                inside.add(node)
                stack.extend(node.all_input_nodes)
            else:
                inputs.add(node)
        return sorted(inputs, key=order.__getitem__), sorted(inside, key=order.__getitem__)
