"""Random training steps small enough for exhaustive search, with whatever a graph may have."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator
from tests.strategies.monet.graphs import training_graph, with_one_gradient_choices

MOST_OPERATORS = 8


def tiny_graph(rng: Random) -> Graph:
    """At most eight operators: several outputs, scratch memory, zero sizes, results that nothing
    reads, operators that are random or may not run twice, tangents held or not or results
    themselves, implementations, computing in place."""
    while True:
        graph = _drawn(rng)
        if len(graph.operators) <= MOST_OPERATORS:
            break
    if rng.random() < 0.2 and graph.tangents:
        graph = replace(graph, gradients=(*graph.gradients, rng.choice(graph.tangents)))
    return with_in_place_marks(rng, graph) if rng.random() < 0.6 else graph


def _drawn(rng: Random) -> Graph:
    kind = rng.random()
    if kind < 0.75:
        return random_graph(
            rng, rng.randint(1, 4), implementations=rng.random() < 0.4, inference=rng.random() < 0.1
        )
    graph = training_graph(rng, rng.randint(2, 4), rng.random() < 0.6)
    return with_one_gradient_choices(graph, rng) if kind > 0.9 else graph


def with_in_place_marks(rng: Random, graph: Graph) -> Graph:
    """The graph with operators that may overwrite what they read; some tensors get the size of
    what overwrites them."""
    tensors = list(graph.tensors)
    fixed = graph.resident | set(graph.tangents)
    for operator in graph.operators:
        if operator.writes and rng.random() < 0.5:
            for t in operator.reads:
                if t not in fixed and rng.random() < 0.7:
                    size_bytes = tensors[operator.writes[0]].size_bytes
                    tensors[t] = replace(tensors[t], size_bytes=size_bytes)

    def possible(reads: tuple[int, ...], writes: tuple[int, ...]) -> tuple[int, ...]:
        if not writes:
            return ()
        size_bytes = tensors[writes[0]].size_bytes
        return tuple(
            t
            for t in dict.fromkeys(reads)
            if t not in fixed and tensors[t].size_bytes == size_bytes and rng.random() < 0.7
        )

    def marked(operator: Operator) -> Operator:
        choices = tuple(
            replace(
                choice,
                in_place=possible(
                    operator.reads if choice.reads is None else choice.reads,
                    operator.writes if choice.writes is None else choice.writes,
                ),
            )
            for choice in operator.implementations
        )
        own = possible(operator.reads, operator.writes)
        return replace(operator, implementations=choices, in_place=own)

    return replace(graph, tensors=tuple(tensors), operators=tuple(map(marked, graph.operators)))
