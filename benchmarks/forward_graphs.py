"""Graphs without a backward: random layered graphs within a share of their own order's peak.

The graphs are drawn by the recipe of Gagrani et al. (2022, appendix A), as those of Moccasin
(Bartan et al., 2023) are: layers of random width, edges between neighbouring ones, and skips.
`--files` instead plans published graphs in the node-link form of networkx, with out_cost, duration
and an order.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from benchmarks.runner import Benchmark
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator, Tensor
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies import STRATEGIES

SIZES = (100, 250)
SHARES = (0.9, 0.8)
SEEDS = (5000, 5005)
"""Of the table; the search was developed on seeds below 1000."""
NAMES = ("monet",)
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


def read_graph(path: Path) -> Graph:
    """Read a graph in the node-link form of networkx, as Moccasin's are published.

    Args:
        path: JSON; nodes with out_cost and duration, links with "0" and "1", the graph's order.
    """
    data = json.loads(path.read_text(encoding="utf-8"))
    order = data["graph"]["order"]
    return graph_of(
        [(link["0"], link["1"]) for link in data["links"]],
        [node["out_cost"] for node in data["nodes"]],
        [node["duration"] for node in data["nodes"]],
        json.loads(order) if isinstance(order, str) else order,
    )


@dataclass(frozen=True)
class Row:
    """One graph within a share of its peak; gap None: no plan."""

    text: str
    gap: float | None


class Planned(NamedTuple):
    """A row and its plan."""

    row: Row
    found: Solution


def row_of(label: str, graph: Graph, share: float, name: str, limit_s: float) -> Planned:
    """Plan a graph within a share of its peak; the plan is validated and replayed.

    Raises:
        AssertionError: the plan is not valid, or not what it says.
    """
    base = replay(graph, store_all(graph))
    budget = int(share * base.peak_bytes)
    strategy = next(strategy for strategy in STRATEGIES if strategy.name == name)
    cpu_s, clock_s = time.process_time(), time.monotonic()
    found = strategy.solve(graph, budget, time_limit_s=limit_s)
    spent = time.process_time() - cpu_s, time.monotonic() - clock_s
    if found.program is not None:
        violation, figures = validate_and_replay(graph, found.program, Budget(budget), Device())
        if violation is not None or figures.time_s != found.time_s:
            raise AssertionError(f"{label}: {violation}")
    edges = sum(len(operator.reads) for operator in graph.operators)
    least = (found.lower_bound_s or base.time_s) / base.time_s - 1
    result, gap = f"{found.status} |  | ", None
    if found.time_s is not None:
        gap = found.gap or 0.0
        result = f"{found.time_s / base.time_s - 1:.2%} | {least:.2%} | {gap:.2%}"
    cells = f"{label} | {len(graph.operators)} | {edges} | {share:g} | {name} | {result}"
    return Planned(Row(f"{cells} | {spent[0]:.1f} | {spent[1]:.1f}", gap), found)


def _cases(given: Any) -> dict[str, tuple[Graph, str, float, str]]:
    graphs = {path: read_graph(Path(path)) for path in given.files} or {
        f"{nodes} {seed}": layered_graph(nodes, seed)
        for nodes in SIZES
        for seed in range(*given.seeds)
    }
    return {
        f"{label} {share} {name}": (graph, label, share, name)
        for label, graph in graphs.items()
        for share in SHARES
        for name in given.strategies
    }


def _planned(given: Any, graph: Graph, label: str, share: float, name: str) -> list[Row]:
    return [row_of(label.split()[-1], graph, share, name, given.limit).row]


def _summary(rows: list[Row], _: Any) -> str:
    gaps = [100 * row.gap for row in rows if row.gap is not None]
    return (
        f"**{len(gaps)} of {len(rows)} have a plan, {sum(gap <= 1e-4 for gap in gaps)} of them "
        f"proved optimal**; median gap {statistics.median(gaps or [0.0]):.2f}%, largest "
        f"{max(gaps, default=0.0):.2f}%."
    )


BENCHMARK = Benchmark(
    row=Row,
    cases=_cases,
    measure=_planned,
    head="seed | operators | edges | budget / peak | strategy | plan | bound | gap | CPU s | "
    "clock s",
    summary=_summary,
    selects=("seeds", "strategies", "files"),
    options={"seeds": SEEDS, "limit": 55.0, "strategies": NAMES, "files": ()},
    prepare=lambda given: [
        row_of("", layered_graph(10, 0), 0.9, name, 10.0) for name in given.strategies
    ],
    failures=lambda rows, _: [f"{row.text}: no plan" for row in rows if row.gap is None],
)
