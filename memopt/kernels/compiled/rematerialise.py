"""Which values of the forward the backward's kernels make again, instead of reading what was kept.

A pointwise operator costs a fused kernel arithmetic only, so what the backward reads of it need not
be kept where something smaller is that it can be made of: the input of a GELU instead of its
factors. What is kept instead is a minimum cut, as in torch's own partitioner (Zheng et al.,
`min_cut_rematerialization_partition`): an edge through each tensor, as wide as its bytes; from the
source to what cannot be made again, from an operand to its result, and from what the backward's
kernels read to the sink. What is in memory anyway costs nothing: the model's inputs and parameters,
and what an operator outside of the backward's kernels reads in the backward.

A product that gives a weight's gradient reads a value of the forward, too (the output of a GELU, of
a norm). A kernel of the backward that reads all that such a value is made of may write it for the
product. That costs one more write, so it has a narrow edge of its own, from the source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from memopt.kernels.compiled.divide import Region
from memopt.kernels.compiled.fusible import is_pointwise
from memopt.kernels.compiled.norms import statistics_of
from memopt.kernels.compiled.pooling import read_by
from memopt.models.graph import Graph, Phase
from memopt.step.build import Lowering, held_by

_WIDEST = 2**30
"""Capacities are 32-bit integers."""
_WRITTEN, _UNWRITTEN = 10, 11
"""Weight of a byte kept: of a tensor that the forward writes anyway, of one that it need not."""
_WRITTEN_AGAIN = 2
"""Weight of a byte that a kernel of the backward writes for a product."""

_SPREAD = 4
"""How many times as large a result is of whose operand each element counts several times."""


@dataclass(frozen=True)
class Rematerialised:
    """What regions of the backward make themselves.

    Attributes:
        tensors: what they make again where they read it.
        kept: what they make it of, which must be written.
        written: of the tensors those that operators outside of regions read in the backward, and
            the region that writes each for them.
    """

    tensors: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    written: Mapping[int, Region] = field(default_factory=dict)


def rematerialised(
    lowering: Lowering, regions: Sequence[Region], again: Iterable[int]
) -> Rematerialised:
    """Choose what the regions of the backward make again: what is kept for them is least in bytes.

    Args:
        lowering: of the captured step, its graph in the framework's order.
        regions: of both halves of the step.
        again: operators that may be part of a region.
    """
    step = _DividedStep.of(lowering, regions, again)
    for_products = step.read_by_products()
    while True:
        read = step.read_by_regions() | for_products
        wanted = step.with_operands(read, step.made_of)
        if wanted.isdisjoint(step.made_of):
            return Rematerialised()
        widths = {t: step.width(t, for_products) for t in wanted}
        made = _on_the_sinks_side(step, widths, read, for_products)
        ways = {t: step.made_of[t] for t in made}
        written = step.writers(sorted(for_products & made), ways)
        if for_products & made <= written.keys():
            used = step.with_operands(read & made, ways)
            return Rematerialised(frozenset(used & made), frozenset(used - made), written)
        for_products -= made - written.keys()


@dataclass(frozen=True)
class _DividedStep:
    """A step divided into regions.

    Attributes:
        graph: of the step.
        regions: those of the backward.
        inside: for each operator in a region, of either half, the region.
        made_of: for each tensor of the forward that can be made again, what it is made of.
        reads: what each operator in a region reads.
    """

    graph: Graph
    regions: tuple[Region, ...]
    inside: dict[int, Region]
    made_of: dict[int, tuple[int, ...]]
    reads: dict[int, tuple[int, ...]]

    @staticmethod
    def of(lowering: Lowering, regions: Sequence[Region], again: Iterable[int]) -> _DividedStep:
        graph, nodes = lowering.graph, lowering.nodes
        inside = {op: region for region in regions for op in region.operators}
        made_of = {}
        for op in again:
            one = graph.operators[op]
            if one.phase is not Phase.FORWARD or (one.random and op not in inside):
                continue
            statistics = statistics_of(lowering, op)
            if _is_spread(lowering, one.writes[0]):
                continue
            if is_pointwise(nodes[op]):
                made_of[one.writes[0]] = one.reads
            elif statistics is not None:
                made_of[one.writes[0]] = statistics
        backward = (r for r in regions if graph.operators[r.operators[0]].phase is Phase.BACKWARD)
        reads = {op: held_by(read_by(nodes[op]), lowering.storages) for op in inside}
        return _DividedStep(graph, tuple(backward), inside, made_of, reads)

    def is_backward(self, op: int) -> bool:
        return self.graph.operators[op].phase is Phase.BACKWARD

    def _of_forward(self, tensor: int) -> bool:
        producer = self.graph.producer.get(tensor)
        return producer is not None and not self.is_backward(producer)

    def _outside(self, tensor: int) -> list[int]:
        """The operators outside of regions that read a tensor in the backward."""
        readers = self.graph.readers[tensor]
        return [op for op in readers if self.is_backward(op) and op not in self.inside]

    def read_by_regions(self) -> set[int]:
        """What regions of the backward read of the forward."""
        operators = (op for one in self.regions for op in one.operators)
        return {t for op in operators for t in self.reads[op] if self._of_forward(t)}

    def read_by_products(self) -> set[int]:
        """What can be made again and is read in the backward by operators outside of regions."""
        return {t for t in set(self.made_of) - set(self.graph.outputs) if self._outside(t)}

    def with_operands(self, tensors: set[int], ways: Mapping[int, tuple[int, ...]]) -> set[int]:
        """Tensors, and all that they are made of in these ways."""
        found, stack = set(tensors), list(tensors)
        while stack:
            new = set(ways.get(stack.pop(), ())) - found
            found |= new
            stack.extend(new)
        return found

    def width(self, tensor: int, for_products: set[int]) -> int:
        """What keeping a tensor costs."""
        graph = self.graph
        if tensor not in graph.producer or tensor in graph.outputs:
            return 0
        if tensor not in for_products and self._outside(tensor):
            return 0
        own = self.inside.get(graph.producer[tensor])
        forward = (op for op in graph.readers[tensor] if not self.is_backward(op))
        written = own is None or any(self.inside.get(op) is not own for op in forward)
        return graph.tensors[tensor].size_bytes * (_WRITTEN if written else _UNWRITTEN)

    def writers(
        self, tensors: Iterable[int], ways: Mapping[int, tuple[int, ...]]
    ) -> dict[int, Region]:
        """For each tensor that has one the first region of the backward that reads all that it is
        made of, and to which nothing leads from what is to read the tensor."""
        order = _Order(self.graph, self.inside)
        read = [
            self._leaves({t for op in r.operators for t in self.reads[op]}, ways)
            for r in self.regions
        ]
        found = {}
        for tensor in tensors:
            needed = self._leaves({tensor}, ways)
            readers = self._outside(tensor)
            for region, held in zip(self.regions, read, strict=True):
                if needed and needed <= held and order.put_before(region, readers):
                    found[tensor] = region
                    break
        return found

    def _leaves(self, tensors: set[int], ways: Mapping[int, tuple[int, ...]]) -> set[int]:
        """What is kept of the forward to make tensors of it."""
        return {
            t for t in self.with_operands(tensors, ways) if t not in ways and self._of_forward(t)
        }


def _is_spread(lowering: Lowering, tensor: int) -> bool:
    """Whether a reader lays a tensor along a larger one: made again there it would be made once
    for each of its places (the cosines of positions, for every head). Products write more than they
    read, too, but read it as it is."""
    graph = lowering.graph
    readers = (op for op in graph.readers[tensor] if is_pointwise(lowering.nodes[op]))
    written = (t for op in readers for t in graph.operators[op].writes)
    most_bytes = max((graph.tensors[t].size_bytes for t in written), default=0)
    return most_bytes >= _SPREAD * graph.tensors[tensor].size_bytes


class _Order:
    """What comes after what in the backward: operators, and regions as one."""

    def __init__(self, graph: Graph, inside: dict[int, Region]) -> None:
        self._unit = [
            inside[op].operators[0] if op in inside else op for op in range(len(graph.operators))
        ]
        self._after: dict[int, set[int]] = defaultdict(set)
        for op, one in enumerate(graph.operators):
            readers = (reader for tensor in one.writes for reader in graph.readers[tensor])
            self._after[self._unit[op]] |= {self._unit[reader] for reader in readers}

    def put_before(self, region: Region, readers: Iterable[int]) -> bool:
        """Put a region before operators outside of it, unless one of them leads to it."""
        first = region.operators[0]
        found = {self._unit[one] for one in readers}
        if first in self._reached(found):
            return False
        self._after[first] |= found
        return True

    def _reached(self, units: set[int]) -> set[int]:
        """Units, and all that come after them."""
        found, stack = set(units), list(units)
        while stack:
            new = self._after[stack.pop()] - found
            found |= new
            stack.extend(new)
        return found


def _on_the_sinks_side(
    step: _DividedStep, widths: dict[int, int], read: set[int], for_products: set[int]
) -> set[int]:
    """What a minimum cut leaves to be made again. Of several minimum cuts it is the one nearest to
    the sink, so that as little as possible is."""
    place = {t: 2 * i for i, t in enumerate(sorted(widths))}
    source, sink = 2 * len(place), 2 * len(place) + 1
    again = {t: step.graph.tensors[t].size_bytes * _WRITTEN_AGAIN for t in for_products}
    unit = (sum(widths.values()) + sum(again.values())) // _WIDEST + 1
    edges: dict[tuple[int, int], int] = {}
    for tensor, i in place.items():
        edges[i, i + 1] = -(-widths[tensor] // unit)
        if tensor in step.made_of:
            edges |= {(place[one] + 1, i): _WIDEST for one in step.made_of[tensor]}
            if tensor in again:
                edges[source, i] = -(-again[tensor] // unit)
        else:
            edges[source, i] = _WIDEST
        if tensor in read:
            edges[i + 1, sink] = _WIDEST
    rows, columns = np.array(list(edges), dtype=np.int32).T
    width = np.fromiter(edges.values(), dtype=np.int32)
    network = csr_array((width, (rows, columns)), shape=(sink + 1, sink + 1))
    left = csr_array(network - maximum_flow(network, source, sink).flow)
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reaching = set(breadth_first_order(left.T.tocsr(), sink, return_predecessors=False).tolist())
    return {tensor for tensor, i in place.items() if i in reaching and tensor in step.made_of}
