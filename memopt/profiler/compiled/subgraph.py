"""A region as a graph of its own: what it reads, what it writes, and a key of what it computes."""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from memopt.profiler.build import Lowering
from memopt.profiler.compiled.divide import Region
from memopt.profiler.compiled.dropout import is_dropout, seeded
from memopt.profiler.compiled.fusible import is_constant

_ALIGNED = 64
"""Bytes: kernels may ask where in them a tensor begins."""


@dataclass(frozen=True)
class Layout:
    """A tensor that goes into a region or comes out of it: all that its kernel depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0

    @staticmethod
    def of(value: torch.Tensor) -> Layout:
        """The layout of a tensor; of its offset what matters to alignment."""
        offset = int(value.storage_offset()) % max(1, _ALIGNED // value.dtype.itemsize)
        return Layout(tuple(value.shape), tuple(value.stride()), value.dtype, value.device, offset)

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        where = "" if self.device.type == "cpu" else f"@{self.device.type}"
        return f"{dtype}{list(self.shape)}s{list(self.strides)}+{self.offset}{where}"


@dataclass(frozen=True)
class Subgraph:
    """A region taken out of the step.

    Attributes:
        graph: of ATen operators; its inputs are placeholders, in the order of `inputs`.
        inputs: nodes of the step that the region reads.
        outputs: nodes of the step whose values it writes, each in memory of its own.
        layouts: of the inputs; the seeds of random operators are the last, if there are any.
        results: the outputs' layouts.
        dropouts: the step's random nodes in the region, in the order of their seeds.
        key: equal regions have equal keys, in every process.
    """

    graph: FxGraph
    inputs: tuple[Node, ...]
    outputs: tuple[Node, ...]
    layouts: tuple[Layout, ...]
    results: tuple[Layout, ...]
    dropouts: tuple[Node, ...]
    key: str


def subgraph(
    lowering: Lowering, region: Region, seeds: Callable[[int, torch.device], torch.Tensor]
) -> Subgraph | None:
    """A region as a graph of its own.

    Args:
        lowering: of the captured step.
        region: some of its operators.
        seeds: makes the (fake) tensor of so many seeds on a device.

    Returns:
        None for a region that writes nothing.
    """
    return _Taken(lowering, region).made(seeds)


class _Taken:
    """Copies a region's calls, the views between them, and constants into a graph."""

    def __init__(self, lowering: Lowering, region: Region) -> None:
        self.lowering = lowering
        self.calls = [lowering.nodes[op] for op in region.operators]
        self.inside = set(self.calls)
        self.written = {
            tensor for op in region.operators for tensor in lowering.graph.operators[op].writes
        }
        self.graph = FxGraph()
        self.copies: dict[Node, Node] = {}
        self.inputs: dict[Node, Node] = {}
        self.seeds: Node | None = None
        self.dropouts: list[Node] = []

    def made(self, seeds: Callable[[int, torch.device], torch.Tensor]) -> Subgraph | None:
        outputs = self._outputs()
        if not outputs:
            return None
        for node in self._read():
            self.inputs[node] = self.graph.placeholder(f"in{len(self.inputs)}")
            self.inputs[node].meta["val"] = node.meta["val"]
        layouts = [Layout.of(node.meta["val"]) for node in self.inputs]
        count = sum(is_dropout(call) for call in self.calls)
        if count:
            self.seeds = self.graph.placeholder("seeds")
            self.seeds.meta["val"] = seeds(count, outputs[0].meta["val"].device)
            layouts.append(Layout.of(self.seeds.meta["val"]))
        results = [self.copy(node) for node in outputs]
        self.graph.output(tuple(results))
        made = tuple(layouts), tuple(Layout.of(node.meta["val"]) for node in outputs)
        key = _key(self.graph, *made)
        return Subgraph(
            self.graph, tuple(self.inputs), outputs, *made, tuple(self.dropouts), key
        )

    def _outputs(self) -> tuple[Node, ...]:
        """The nodes that name the tensors which something outside reads."""
        bases, storages = self.lowering.bases, self.lowering.storages
        wanted: dict[int, None] = {}
        for node, held in storages.items():
            for tensor in held:
                if tensor in self.written and self._leaves(node):
                    wanted.setdefault(tensor)
        return tuple(bases[tensor] for tensor in sorted(wanted) if tensor in bases)

    def _leaves(self, node: Node) -> bool:
        """Whether a kernel outside the region, or the step's result, reads a node."""
        return any(
            user not in self.inside and user not in self.lowering.views
            for user in node.users
            if user.op == "output" or user in self.lowering.storages
        )

    def _read(self) -> list[Node]:
        """The step's nodes that the region reads, in the order in which it does."""
        found: dict[Node, None] = {}

        def look(node: Node) -> None:
            if node in self.inside or self._is_between(node) or self._is_copied(node):
                for source in node.all_input_nodes:
                    look(source)
            else:
                found.setdefault(node)

        seen: set[Node] = set()
        for call in self.calls:
            for source in call.all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    if source not in self.inside:
                        look(source)
        return list(found)

    def _is_between(self, node: Node) -> bool:
        """Whether a node is a view of what the region writes."""
        held = self.lowering.storages.get(node, ())
        return node in self.lowering.views and any(tensor in self.written for tensor in held)

    def _is_copied(self, node: Node) -> bool:
        """Whether the region makes a small constant itself."""
        return node in self.lowering.storages and is_constant(node) and not any(
            source.op == "call_function" for source in node.all_input_nodes
        )

    def copy(self, node: Node) -> Node:
        """The node of the region's own graph."""
        if node in self.inputs:
            return self.inputs[node]
        if node not in self.copies:
            for source in node.all_input_nodes:
                self.copy(source)
            if node.target is operator.getitem and is_dropout(node.args[0]):  # type: ignore[arg-type]
                self.copy_dropout(node.args[0])  # type: ignore[arg-type]
            elif is_dropout(node):
                self.copy_dropout(node)
            else:
                self._copy_call(node)
        return self.copies[node]

    def _copy_call(self, node: Node) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), self.copy)
        made = self.graph.call_function(node.target, args, kwargs)  # type: ignore[arg-type]
        made.meta["val"] = node.meta["val"]
        self.copies[node] = made

    def copy_dropout(self, node: Node) -> None:
        """Both results of a dropout, drawn by its seed."""
        if node in self.copies:
            return
        assert self.seeds is not None
        index = len(self.dropouts)
        self.dropouts.append(node)
        x, p, _ = node.args
        parts = seeded(self.graph, self.copy(x), float(p), self.seeds, index)  # type: ignore[arg-type]
        self.copies[node] = parts[0]
        for user in node.users:
            if user.target is operator.getitem:
                self.copies[user] = parts[int(user.args[1])]  # type: ignore[call-overload]


def _key(graph: FxGraph, layouts: Iterable[Layout], results: Iterable[Layout]) -> str:
    numbers = {node: position for position, node in enumerate(graph.nodes)}

    def named(value: Any) -> Any:
        return map_arg(value, lambda node: f"%{numbers[node]}")

    lines = [*map(str, layouts), "->", *map(str, results)]
    for node in graph.nodes:
        if node.op != "placeholder":
            shown = pytree.tree_map(str, (named(node.args), named(node.kwargs)))
            lines.append(f"{node.target}{shown}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]

