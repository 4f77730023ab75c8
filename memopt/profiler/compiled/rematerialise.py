"""Which values of the forward the backward's kernels make again, instead of reading what was kept.

A pointwise operator costs a fused kernel arithmetic only, so what the backward reads of it need not
be kept where something smaller is that it can be made of: the input of a GELU instead of its
factors. What is kept instead is a minimum cut, as in torch's own partitioner (Zheng et al.,
`min_cut_rematerialization_partition`): an edge through each tensor, as wide as its bytes; from the
source to what cannot be made again, from an operand to its result, and from what the backward's
kernels read to the sink. What is in memory anyway costs nothing: the model's inputs and parameters,
and what an operator outside of the backward's kernels reads in the backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from memopt.models.graph import Phase
from memopt.profiler.build import Lowering
from memopt.profiler.compiled.divide import Region
from memopt.profiler.compiled.fusible import is_pointwise

_WIDEST = 2**30
"""Capacities are 32-bit integers."""
_WRITTEN, _UNWRITTEN = 10, 11
"""Weight of a byte kept: of a tensor that the forward writes anyway, of one that it need not."""


@dataclass(frozen=True)
class Rematerialised:
    """What regions of the backward make themselves.

    Attributes:
        tensors: what they make again where they read it.
        kept: what they make it of, which must be written.
    """

    tensors: frozenset[int] = frozenset()
    kept: frozenset[int] = frozenset()


def rematerialised(
    lowering: Lowering, regions: Sequence[Region], again: Iterable[int]
) -> Rematerialised:
    """Choose what the regions of the backward make again: what is kept for them is least in bytes.

    Args:
        lowering: of the captured step, its graph in the framework's order.
        regions: of both halves of the step.
        again: operators that may be part of a region.
    """
    graph, nodes = lowering.graph, lowering.nodes
    backward = {op for region in regions for op in region.operators if _is_backward(lowering, op)}
    inside = {op: region for region in regions for op in region.operators}
    makers = {
        graph.operators[op].writes[0]: op
        for op in again
        if graph.operators[op].phase is Phase.FORWARD
        and is_pointwise(nodes[op])
        and (op in inside or not graph.operators[op].random)
    }
    read = {
        t
        for op in backward
        for t in graph.operators[op].reads
        if t in graph.producer and not _is_backward(lowering, graph.producer[t])
    }
    wanted = _with_operands(lowering, read, makers)
    if wanted.isdisjoint(makers):
        return Rematerialised()
    widths = {t: _width(lowering, t, inside, backward) for t in wanted}
    made = _on_the_sinks_side(lowering, widths, read, makers)
    used = _with_operands(lowering, read & made, {t: makers[t] for t in made})
    return Rematerialised(frozenset(used & made), frozenset(used - made))


def _is_backward(lowering: Lowering, op: int) -> bool:
    return lowering.graph.operators[op].phase is Phase.BACKWARD


def _with_operands(lowering: Lowering, tensors: set[int], makers: dict[int, int]) -> set[int]:
    """Tensors, and all that those of them are made of which can be made again."""
    found, stack = set(tensors), list(tensors)
    while stack:
        op = makers.get(stack.pop())
        if op is not None:
            new = set(lowering.graph.operators[op].reads) - found
            found |= new
            stack.extend(new)
    return found


def _width(lowering: Lowering, tensor: int, inside: dict[int, Region], backward: set[int]) -> int:
    """What keeping a tensor costs."""
    graph = lowering.graph
    others = [op for op in graph.readers[tensor] if op not in backward]
    if tensor not in graph.producer or tensor in graph.outputs:
        return 0
    if any(_is_backward(lowering, op) for op in others):
        return 0
    own = inside.get(graph.producer[tensor])
    written = own is None or any(inside.get(op) is not own for op in others)
    return graph.tensors[tensor].size_bytes * (_WRITTEN if written else _UNWRITTEN)


def _on_the_sinks_side(
    lowering: Lowering, widths: dict[int, int], read: set[int], makers: dict[int, int]
) -> set[int]:
    """What a minimum cut leaves to be made again. Of several minimum cuts it is the one nearest to
    the sink, so that as little as possible is."""
    place = {t: 2 * i for i, t in enumerate(sorted(widths))}
    source, sink = 2 * len(place), 2 * len(place) + 1
    unit = sum(widths.values()) // _WIDEST + 1
    edges: dict[tuple[int, int], int] = {}
    for tensor, i in place.items():
        edges[i, i + 1] = -(-widths[tensor] // unit)
        if tensor in makers:
            operands = lowering.graph.operators[makers[tensor]].reads
            edges |= {(place[one] + 1, i): _WIDEST for one in operands}
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
    return {tensor for tensor, i in place.items() if i in reaching and tensor in makers}
