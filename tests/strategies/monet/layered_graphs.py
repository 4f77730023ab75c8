"""Random layered graphs without a backward, by the recipe of Gagrani et al. (2022, appendix A),
as those of Moccasin (Bartan et al., 2023) are: layers of random width, edges between neighbouring
ones, and skips."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from random import Random

from memopt.models.graph import Graph, Operator, Tensor

WIDTHS = (0.25, 0.5)
"""Least and largest width of a graph, as a share."""
UNEVEN = 0.75
"""How far a layer's width is from the mean at most, over the mean."""
DENSITY = 0.2
"""Of edges between neighbouring layers."""
SKIPS = 0.14
"""Share of edges that skip layers."""
ASIDE = 0.2
"""How far a skip connection moves sideways at most, over the width of its layers."""
BYTES = ((0.3, 500, 500), (0.3, 1000, 1000), (0.3, 3000, 1000), (0.1, 5000, 1000))
"""(weight, mean, standard deviation) of a mixture of normal distributions."""
LONGEST = 1000
Edges = set[tuple[int, int]]


def layered_graph(nodes: int, seed: int) -> Graph:
    """Draw a layered graph; its operators are in a random topological order.

    Node 0 is read by all that read nothing else, the last node reads all that nothing else reads;
    its tensor is the one result. Both take no time, as in Moccasin's graphs.

    Args:
        nodes: 10 or more.
        seed: of everything.
    """
    rng = Random(seed)
    layers = list(_layers(nodes - 2, rng))
    edges = set().union(*(_between(one, other, rng) for one, other in pairwise(layers)))
    edges |= set(_skips(layers, len(edges), rng))
    written, read = {b for _, b in edges}, {a for a, _ in edges}
    edges |= {(0, node) for node in range(1, nodes - 1) if node not in written}
    edges |= {(node, nodes - 1) for node in range(1, nodes - 1) if node not in read}
    sizes = [_bytes(rng) for _ in range(nodes)]
    times = [0, *(rng.randint(0, LONGEST) for _ in range(nodes - 2)), 0]
    return graph_of(edges, sizes, times, _some_order(nodes, edges, rng))


def _layers(nodes: int, rng: Random) -> Iterator[range]:
    """Divide nodes 1, 2, ... into layers (algorithm 1)."""
    mean = nodes / math.ceil(math.sqrt(nodes * (1 / rng.uniform(*WIDTHS) - 1)))
    begin = 1
    while begin <= nodes:
        width = rng.randint(math.ceil(mean * (1 - UNEVEN)), math.floor(mean * (1 + UNEVEN)))
        yield range(begin, min(begin + width, nodes + 1))
        begin += width


def _between(one: Sequence[int], other: Sequence[int], rng: Random) -> Edges:
    """Connect neighbouring layers: each node of the wider one with those about its own place in the
    other (algorithm 2)."""
    wide, narrow = (one, other) if len(one) >= len(other) else (other, one)
    number = math.ceil(len(one) * len(other) * DENSITY) + math.ceil((1 - DENSITY) * len(wide))
    more = set(rng.sample(range(len(wide)), number % len(wide)))
    edges: Edges = set()
    for place, node in enumerate(wide):
        degree = number // len(wide) + (place in more)
        middle = math.ceil(place * (len(narrow) - 1) / max(1, len(wide) - 1))
        first = middle - (degree - 1) // 2
        for at in range(max(0, first), min(first + degree, len(narrow))):
            edges.add((min(node, narrow[at]), max(node, narrow[at])))
    return edges


def _skips(layers: Sequence[Sequence[int]], edges: int, rng: Random) -> Iterator[tuple[int, int]]:
    """Connect layers that are not neighbours, at about the same place (algorithm 3)."""
    for _ in range(math.ceil(edges * SKIPS / (1 - SKIPS)) if len(layers) > 2 else 0):
        begin = rng.randrange(len(layers) - 2)
        end = rng.randrange(begin + 2, len(layers))
        place = rng.random()
        aside = min(place + ASIDE * rng.random(), 1 - 1e-9)
        one, other = layers[begin], layers[end]
        yield one[int(place * len(one))], other[int(aside * len(other))]


def _bytes(rng: Random) -> int:
    _, mean, deviation = rng.choices(BYTES, [weight for weight, _, _ in BYTES])[0]
    return 10 * max(1, round(abs(rng.gauss(mean, deviation)) / 10))


def _some_order(nodes: int, edges: Edges, rng: Random) -> list[int]:
    """Give a topological order, the next of those that can run drawn again and again."""
    waits = [sum(b == node for _, b in edges) for node in range(nodes)]
    ready, order = [node for node in range(nodes) if not waits[node]], list[int]()
    while ready:
        order.append(ready.pop(rng.randrange(len(ready))))
        for node in sorted(b for a, b in edges if a == order[-1]):
            waits[node] -= 1
            ready += [] if waits[node] else [node]
    return order


def graph_of(
    edges: Iterable[tuple[int, int]],
    sizes: Sequence[int],
    times: Sequence[float],
    order: Sequence[int],
) -> Graph:
    """Make a graph of nodes that write a tensor each, in a topological order."""
    place = {node: n for n, node in enumerate(order)}
    reads: list[list[int]] = [[] for _ in order]
    for a, b in sorted(edges):
        reads[place[b]].append(place[a])
    read = {t for row in reads for t in row}
    return Graph(
        [Tensor(f"t{node}", sizes[node]) for node in order],
        [
            Operator(f"op{node}", tuple(sorted(row)), (n,), float(times[node]))
            for n, (node, row) in enumerate(zip(order, reads, strict=True))
        ],
        outputs=[n for n in range(len(order)) if n not in read],
    )
