"""Runs a region's operators on some tokens at a time.

What a region returns for each token is written chunk by chunk; what it sums over tokens, such as a
weight's gradient, is added up chunk by chunk, in float32 at least, which rounds otherwise than one
product over all tokens does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph as FxGraph
from torch.fx import Node

from memopt.kernels.tiled.dims import SIZED
from memopt.kernels.tiled.subgraph import PLACES
from memopt.step.memory_layout import storage_of
from memopt.step.nodes import overload_of
from memopt.step.region_graph import Subgraph

MULTIPLE = 16
"""Chunks have a multiple of so many tokens, but for the last one, which has the rest besides:
matrix products of whole tiles round alike, however many rows they have."""
LEAST_ROWS = 32
LEAST_ROWS_OF_ACCELERATORS = 1024
"""Of a chunk: below, products take longer for each token."""
_MOST = 128
_SHARE = 4
"""A chunk's values are to take at most so small a part of the largest tensor at the border."""


@dataclass(frozen=True)
class Chunk:
    """Some tokens: of the sequences `first` to `last`, those from `start` to `stop`."""

    first: int
    last: int
    start: int
    stop: int

    def size(self, part: str) -> int:
        """Return how many there are along a dimension."""
        sequences, length = self.last - self.first, self.stop - self.start
        return {"rows": sequences * length, "sequences": sequences, "length": length}[part]

    def begin(self, part: str, length: int) -> int:
        """Return where they begin along a dimension, with so many tokens in a sequence."""
        starts = {
            "rows": self.first * length + self.start,
            "sequences": self.first,
            "length": self.start,
        }
        return starts[part]


def chunks_of(counts: tuple[int, int], rows: int) -> list[Chunk]:
    """Divide (sequences, tokens of each) into chunks of about so many tokens: whole sequences, or
    parts of one."""
    sequences, length = counts
    if rows >= length:
        step = max(1, rows // length)
        return [
            Chunk(first, min(first + step, sequences), 0, length)
            for first in range(0, sequences, step)
        ]
    step = max(MULTIPLE, rows - rows % MULTIPLE)
    starts = list(range(0, length, step))
    if len(starts) > 1 and length - starts[-1] < MULTIPLE:
        starts.pop()
    spans = list(zip(starts, [*starts[1:], length], strict=True))
    return [Chunk(one, one + 1, a, b) for one in range(sequences) for a, b in spans]


def peak_bytes(graph: FxGraph, share: float) -> int:
    """Return the bytes that a region's values take at most, if it runs on a share of its tokens,
    beside its operands and results for all tokens."""
    sizes: dict[Any, int] = {}
    last: dict[Any, int] = {}
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    for number, node in enumerate(nodes):
        values = node.meta["val"]
        counts = node.meta[PLACES]
        for place, value in enumerate(values if isinstance(values, (tuple, list)) else [values]):
            if isinstance(value, Tensor):
                held = storage_of(value)
                whole = value.untyped_storage().nbytes()
                sizes.setdefault(held, int(whole * (share if any(counts[place]) else 1)))
        for one in (node, *node.all_input_nodes):
            for value in _tensors(one.meta["val"]):
                last[storage_of(value)] = number
    given = {
        storage_of(v) for p in graph.find_nodes(op="placeholder") for v in _tensors(p.meta["val"])
    }
    summed = 0
    for node in graph.output_node().all_input_nodes:
        held = storage_of(node.meta["val"])
        last[held] = len(nodes)
        if not any(node.meta[PLACES][0]):
            wide = torch.promote_types(node.meta["val"].dtype, torch.float32)
            summed += node.meta["val"].numel() * wide.itemsize
    live: dict[Any, int] = {}
    peak = 0
    for number, node in enumerate(nodes):
        for value in _tensors(node.meta["val"]):
            held = storage_of(value)
            if held not in given:
                live[held] = sizes[held]
        peak = max(peak, sum(live.values()))
        live = {held: size for held, size in live.items() if last[held] > number}
    return peak + summed


def _tensors(value: Any) -> Iterator[Tensor]:
    for one in value if isinstance(value, (tuple, list)) else [value]:
        if isinstance(one, Tensor):
            yield one


def rows_of_chunk(one: Subgraph, counts: tuple[int, int], least: int) -> int:
    """Return how many tokens, of these sequences and tokens of each, a region runs on at a time."""
    total = counts[0] * counts[1]
    border = [
        node.meta["val"].untyped_storage().nbytes()
        for node in (
            *one.graph.find_nodes(op="placeholder"),
            *one.graph.output_node().all_input_nodes,
        )
        if isinstance(node.meta["val"], Tensor) and any(node.meta[PLACES][0])
    ]
    fixed = peak_bytes(one.graph, 0.0)
    whole = peak_bytes(one.graph, 1.0) - fixed
    wanted = min(_MOST, -(-_SHARE * whole // max(1, max(border, default=1))))
    rows = max(least, -(-total // max(1, wanted)))
    return -(-rows // MULTIPLE) * MULTIPLE


def tiled(one: Subgraph, counts: tuple[int, int], rows: int) -> Callable[[list[Any]], Any]:
    """Return the function that runs a region in chunks: it takes the list of its inputs, and
    empties it.

    Args:
        one: the region.
        counts: sequences, and tokens of each.
        rows: tokens of a chunk.
    """
    program = _Program(one, counts[1])
    chunks = chunks_of(counts, rows)

    def run(given: list[Any]) -> tuple[Tensor, ...]:
        inputs = tuple(given)
        given.clear()
        results: list[Any] = [None] * len(one.outputs)
        for chunk in chunks:
            program.run(inputs, chunk, results)
        return tuple(
            found.to(layout.dtype) if found.dtype != layout.dtype else found
            for found, layout in zip(results, one.results, strict=True)
        )

    return run


class _Program:
    """A region's calls, as a list of steps over numbered values."""

    def __init__(self, one: Subgraph, length: int) -> None:
        self._length, self._layouts = length, one.results
        nodes = list(one.graph.nodes)
        self._number = {node: i for i, node in enumerate(nodes)}
        self._given = [
            (self._number[node], node.meta[PLACES][0])
            for node in one.graph.find_nodes(op="placeholder")
        ]
        results: Any = one.graph.output_node().args[0]
        self._results = [(self._number[node], node.meta[PLACES][0]) for node in results]
        kept = {number for number, _ in self._results}
        last: dict[int, int] = {}
        self._calls = [node for node in nodes if node.op == "call_function"]
        for place, node in enumerate(self._calls):
            for source in (node, *node.all_input_nodes):
                last[self._number[source]] = place
        self._frees: list[list[int]] = [[] for _ in self._calls]
        for number, place in last.items():
            if number not in kept:
                self._frees[place].append(number)

    def run(self, inputs: Sequence[Any], chunk: Chunk, results: list[Any]) -> None:
        """Run all calls on a chunk, and add what they give to the results."""
        values: dict[int, Any] = {}
        for (number, places), value in zip(self._given, inputs, strict=True):
            values[number] = self._some(value, places, chunk)
        for node, frees in zip(self._calls, self._frees, strict=True):
            values[self._number[node]] = self._called(node, values, chunk)
            for number in frees:
                del values[number]
        for place, (number, places) in enumerate(self._results):
            self._add(results, place, values.pop(number), places, chunk)

    def _some(self, value: Any, places: Sequence[str], chunk: Chunk) -> Any:
        for dim, part in enumerate(places):
            if part:
                value = value.narrow(dim, chunk.begin(part, self._length), chunk.size(part))
        return value

    def _called(self, node: Node, values: dict[int, Any], chunk: Chunk) -> Any:
        def given(value: Any) -> Any:
            if isinstance(value, Node):
                return values[self._number[value]]
            if isinstance(value, (list, tuple)):
                return type(value)(map(given, value))
            return value

        args = [given(arg) for arg in node.args]
        name = str(overload_of(node))
        if name in SIZED:
            shape = node.meta["val"].shape
            places = node.meta[PLACES][0]
            args[1] = [
                chunk.size(part) if part else int(size)
                for part, size in zip(places, shape, strict=True)
            ]
            if name.startswith(("aten.view", "aten._unsafe")):
                return args[0].reshape(args[1])
        call: Any = node.target
        return call(*args, **{key: given(v) for key, v in node.kwargs.items()})

    def _add(
        self, results: list[Any], place: int, value: Tensor, places: Sequence[str], chunk: Chunk
    ) -> None:
        layout = self._layouts[place]
        if any(places):
            if results[place] is None:
                results[place] = torch.empty_strided(
                    layout.shape, layout.strides, dtype=layout.dtype, device=value.device
                )
            self._some(results[place], places, chunk).copy_(value)
        elif results[place] is None:
            wide = torch.promote_types(layout.dtype, torch.float32)
            results[place] = torch.empty_strided(
                layout.shape, layout.strides, dtype=wide, device=value.device
            ).copy_(value)
        else:
            results[place] += value
