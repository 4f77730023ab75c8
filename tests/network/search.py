"""Exhaustive search over the programs of a tiny graph with collectives, transfers apart.

Written against docs/cost-model.md alone: it shares nothing with `replay`, the validator or any
pass. A state is what is in memory, which operators have run, whether the loss boundary is past, and
how much longer each collective takes that nothing has waited for.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from itertools import combinations
from random import Random
from typing import NamedTuple

from memopt.models.collective import Collective, CollectiveKind
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Phase


class Pending(NamedTuple):
    """A collective under way: seconds left, what it reads and writes."""

    left_s: float
    reads: frozenset[int]
    writes: frozenset[int]


class State(NamedTuple):
    live: frozenset[int]
    ran: frozenset[int]
    past: bool
    pending: tuple[Pending, ...] = ()
    network_s: float = 0.0
    """Until the network is free."""

    def after(self, seconds: float) -> State:
        left = [p._replace(left_s=p.left_s - seconds) for p in self.pending]
        rest = tuple(p for p in left if p.left_s > 0)
        return self._replace(pending=rest, network_s=max(0.0, self.network_s - seconds))

    def wait(self, read: frozenset[int], dropped: frozenset[int]) -> tuple[float, State]:
        """Wait for the collectives that write what is read, or touch what is dropped."""
        over = (p for p in self.pending if p.writes & (read | dropped) or p.reads & dropped)
        seconds = max((p.left_s for p in over), default=0.0)
        return seconds, self.after(seconds) if seconds else self


def least_time(graph: Graph, budget_bytes: int) -> float:
    """Seconds of the fastest program within a budget; infinity: there is none."""
    search = _Search(graph, budget_bytes - graph.resident_bytes)
    start = State(frozenset(), frozenset(), not search.boundary)
    best: dict[State | None, float] = {start: 0.0}
    queue: list[tuple[float, int, State | None]] = [(0.0, 0, start)]
    count = 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state is None:
            return cost
        if best[state] < cost:
            continue
        for seconds, new in search.steps(state):
            if new not in best or cost + seconds < best[new] - 1e-12:
                best[new] = cost + seconds
                count += 1
                heapq.heappush(queue, (cost + seconds, count, new))
    return math.inf


class _Search:
    def __init__(self, graph: Graph, limit_bytes: int) -> None:
        self.graph, self.limit = graph, limit_bytes
        self.boundary = bool(graph.tangents) or graph.first_backward < len(graph.operators)
        self.must = {i for i, o in enumerate(graph.operators) if o.has_effects}
        forward = {t for o in graph.operators[: graph.first_backward] for t in o.writes}
        self.early = forward & set(graph.outputs)

    def bytes_of(self, tensors: frozenset[int] | tuple[int, ...]) -> int:
        return sum(self.graph.tensors[t].size_bytes for t in tensors)

    def steps(self, state: State) -> list[tuple[float, State | None]]:
        found: list[tuple[float, State | None]] = []
        if state.past and self.graph.kept <= state.live and self.must <= state.ran:
            found.append((state.network_s, None))
        for tensor in state.live - self.graph.kept:
            seconds, new = state.wait(frozenset(), frozenset({tensor}))
            found.append((seconds, new._replace(live=new.live - {tensor})))
        if not state.past and self.early <= state.live:
            live = state.live | set(self.graph.tangents)
            if self.bytes_of(live) + self.graph.boundary_bytes <= self.limit:
                found.append((0.0, state._replace(live=live, past=True)))
        for index, operator in enumerate(self.graph.operators):
            found += self.runs(state, index, operator)
        return found

    def runs(self, state: State, index: int, operator: Operator) -> list[tuple[float, State]]:
        reads = frozenset(operator.reads) - self.graph.resident
        again = index in state.ran
        if not reads <= state.live or (again and not operator.recomputable):
            return []
        if operator.phase is not Phase.FORWARD and not state.past:
            return []
        earlier = (i for i in range(index) if self.graph.operators[i].collective)
        if operator.collective and not again and not state.ran.issuperset(earlier):
            return []
        made = self.bytes_of(operator.writes) + operator.workspace_bytes
        # What is live already is written beside the first, and dropped first where it is kept.
        if self.bytes_of(state.live) + made > self.limit:
            return []
        waited, before = state.wait(reads, frozenset())
        fresh = frozenset(operator.writes) - state.live
        # A run whose operator runs again later need not keep its results.
        results = fresh & self.graph.kept if operator.recomputable else frozenset()
        found = []
        for count in range(len(results) + 1):
            for dropped in combinations(sorted(results), count):
                kept = fresh - set(dropped)
                live, ran = before.live | kept, before.ran | {index}
                seconds, new = self._run(before._replace(live=live, ran=ran), operator, kept)
                found.append((waited + seconds, new))
        return found

    def _run(self, state: State, operator: Operator, kept: frozenset[int]) -> tuple[float, State]:
        if not operator.collective:
            return operator.time_s, state.after(operator.time_s)
        left_s = state.network_s + operator.time_s
        if len(kept) < len(operator.writes):
            return left_s, state.after(left_s)
        reads = frozenset(operator.reads)
        one = Pending(left_s, reads, frozenset(operator.writes))
        pending = (*state.pending, one)
        return 0.0, state._replace(pending=pending, network_s=left_s)


def graph_with_collectives(rng: Random, forward: int = 3) -> Graph:
    """A random training step in which some operators are collectives."""
    while True:
        graph = random_graph(rng, forward)
        operators = tuple(_sent(rng, x) if rng.random() < 0.4 else x for x in graph.operators)
        plain = tuple(replace(x, random=False, implementations=(), in_place=()) for x in operators)
        graph = replace(graph, operators=plain)
        if graph.network_time_s:
            return graph


def _sent(rng: Random, operator: Operator) -> Operator:
    if not operator.writes or operator.phase is Phase.UPDATE:
        return operator
    collective = Collective(CollectiveKind.ALL_GATHER, 8, 100)
    return replace(
        operator,
        random=False,
        implementations=(),
        in_place=(),
        collective=collective,
        time_s=float(rng.randint(1, 6)),
        workspace_bytes=0,
    )
