"""Chooses the forward values that the backward's kernels rematerialise instead of reading them.

A pointwise operator costs a fused kernel arithmetic only. So a result that the backward reads need
not be kept if it can be recomputed from something smaller: the input of a GELU instead of its
factors. The kept tensors are a minimum cut, as in torch's own partitioner (Zheng et al.,
`min_cut_rematerialization_partition`). An edge goes through each tensor, as wide as its bytes; from
the source to tensors that cannot be recomputed, from an operand to its result, and from tensors
that the backward's kernels read to the sink. Tensors in memory anyway cost nothing: the model's
inputs and parameters, and those that an operator outside of the backward's kernels reads there.

A product that gives a weight's gradient reads a value of the forward, too (the output of a GELU, of
a norm). A kernel of the backward that reads all operands of such a value may write it for the
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
from memopt.step.build import Lowering
from memopt.step.results import held_by

_WIDEST = 2**30
"""Largest capacity: capacities are 32-bit integers."""
_WRITTEN, _UNWRITTEN = 10, 11
"""Weight of a kept byte: of a tensor that the forward writes anyway, of one that it need not."""
_WRITTEN_AGAIN = 2
"""Weight of a byte that a kernel of the backward writes for a product."""

_SPREAD = 4
"""A result this many times as large as its operand uses each element of it several times."""


@dataclass(frozen=True)
class Rematerialised:
    """The tensors that regions of the backward rematerialise.

    Attributes:
        tensors: tensors that they recompute where they read them.
        kept: operands of these, which must be written.
        written: recomputed tensor that operators outside of regions read in the backward → the
            region that writes it for them.
    """

    tensors: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()
    written: Mapping[int, Region] = field(default_factory=dict)


def rematerialised(
    lowering: Lowering, regions: Sequence[Region], again: Iterable[int]
) -> Rematerialised:
    """Choose what the regions of the backward recompute, so that the fewest bytes are kept.

    Args:
        lowering: of the captured step, its graph in the framework's order.
        regions: those of forward and backward.
        again: operators that a region of the backward may run again.
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
        inside: operator in a region of either half → the region.
        made_of: forward tensor that can be recomputed → its operands.
        reads: operator in a region → the tensors that it reads.
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
        """Return the operators outside of regions that read a tensor in the backward."""
        readers = self.graph.readers[tensor]
        return [op for op in readers if self.is_backward(op) and op not in self.inside]

    def read_by_regions(self) -> set[int]:
        """Return the forward tensors that regions of the backward read."""
        operators = (op for one in self.regions for op in one.operators)
        return {t for op in operators for t in self.reads[op] if self._of_forward(t)}

    def read_by_products(self) -> set[int]:
        """Return the recomputable tensors that the backward reads outside of regions."""
        return {t for t in set(self.made_of) - set(self.graph.outputs) if self._outside(t)}

    def with_operands(self, tensors: set[int], ways: Mapping[int, tuple[int, ...]]) -> set[int]:
        """Return the tensors, with all tensors from which `ways` (tensor → operands) recompute
        them."""
        found, stack = set(tensors), list(tensors)
        while stack:
            new = set(ways.get(stack.pop(), ())) - found
            found |= new
            stack.extend(new)
        return found

    def width(self, tensor: int, for_products: set[int]) -> int:
        """Return the cost of keeping a tensor."""
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
        """Map tensors to the backward region that can write them for readers outside of regions:
        the first that reads all operands of the tensor and depends on no such reader. Tensors
        without one are missing."""
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
        """Return the kept forward tensors from which tensors are recomputed."""
        return {
            t for t in self.with_operands(tensors, ways) if t not in ways and self._of_forward(t)
        }


def _is_spread(lowering: Lowering, tensor: int) -> bool:
    """Return whether a reader broadcasts a tensor to a much larger one, where it would be
    recomputed once for each place (the cosines of positions, for every head). Products write more
    than they read, too, but read it as it is."""
    graph = lowering.graph
    readers = (op for op in graph.readers[tensor] if is_pointwise(lowering.nodes[op]))
    written = (t for op in readers for t in graph.operators[op].writes)
    most_bytes = max((graph.tensors[t].size_bytes for t in written), default=0)
    return most_bytes >= _SPREAD * graph.tensors[tensor].size_bytes


class _Order:
    """The order of the backward: the dependences of operators, each region being one operator."""

    def __init__(self, graph: Graph, inside: dict[int, Region]) -> None:
        self._unit = [
            inside[op].operators[0] if op in inside else op for op in range(len(graph.operators))
        ]
        self._after: dict[int, set[int]] = defaultdict(set)
        for op, one in enumerate(graph.operators):
            readers = (reader for tensor in one.writes for reader in graph.readers[tensor])
            self._after[self._unit[op]] |= {self._unit[reader] for reader in readers}

    def put_before(self, region: Region, readers: Iterable[int]) -> bool:
        """Put a region before operators outside of it, unless it depends on one of them."""
        first = region.operators[0]
        found = {self._unit[one] for one in readers}
        if first in self._reached(found):
            return False
        self._after[first] |= found
        return True

    def _reached(self, units: set[int]) -> set[int]:
        """Return units, and all that come after them."""
        found, stack = set(units), list(units)
        while stack:
            new = self._after[stack.pop()] - found
            found |= new
            stack.extend(new)
        return found


def _on_the_sinks_side(
    step: _DividedStep, widths: dict[int, int], read: set[int], for_products: set[int]
) -> set[int]:
    """Return the tensors that a minimum cut leaves to be recomputed. Of several minimum cuts it is
    the one nearest to the sink, which recomputes least."""
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
