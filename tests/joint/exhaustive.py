"""Exhaustive search over the programs of a tiny graph, transfers included.

Written against the rules of docs/cost-model.md alone; it shares nothing with `replay` or a
strategy. A state is what is on the device and on the host, how far the step is, and how long the
link is still busy with what; Dijkstra over the time of the compute stream. Operators run for the
first time in the graph's order, forward ones again at any time, each by any implementation; any
tensor but results and tangents may move, as often as it likes, and may be dropped. Sizes and times
are whole numbers, and so are the times of copies.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from memopt.models.graph import Graph
from memopt.models.variants import variant


class State(NamedTuple):
    """Where a step is.

    Attributes:
        live: tensors on the device.
        host: tensors of which the host has a copy, or will have.
        done: operators that have run; the boundary counts as one after the forward.
        out, back: time for which the link is busy, each way.
        stored: (tensor, time until its copy to the host ends), for live tensors.
        coming: (tensor, time until its copy back ends).
    """

    live: frozenset[int]
    host: frozenset[int]
    done: int
    out: float
    back: float
    stored: tuple[tuple[int, float], ...]
    coming: tuple[tuple[int, float], ...]


def least_time(graph: Graph, budget_bytes: int, bytes_per_s: float) -> float:
    """Seconds of the fastest program within the budget; infinity: there is none."""
    start = State(frozenset(), frozenset(), 0, 0.0, 0.0, (), ())
    best, order = {start: 0.0}, itertools.count()
    queue: list[tuple[float, int, State | None]] = [(0.0, next(order), start)]
    search = _Search(graph, budget_bytes, bytes_per_s)
    while queue:
        now, _, state = heapq.heappop(queue)
        if state is None:
            return now
        if now > best[state]:
            continue
        if state.done == search.steps and graph.kept <= state.live:
            heapq.heappush(queue, (now + max(state.out, state.back), next(order), None))
        for waited, following in search.following(state):
            if now + waited < best.get(following, math.inf):
                best[following] = now + waited
                heapq.heappush(queue, (now + waited, next(order), following))
    return math.inf


class _Search:
    def __init__(self, graph: Graph, budget_bytes: int, bytes_per_s: float) -> None:
        self.graph, self.room = graph, budget_bytes - graph.resident_bytes
        self.rate = bytes_per_s
        self.boundary = graph.first_backward
        has_boundary = self.boundary < len(graph.operators) or bool(graph.tangents)
        self.order: list[int | None] = list(range(len(graph.operators)))
        if has_boundary:
            self.order.insert(self.boundary, None)
        self.steps = len(self.order)
        self.movable = graph.computed - graph.kept - set(graph.tangents)
        self.held = graph.kept if graph.tangents_held else graph.kept

    def size(self, tensors: frozenset[int] | tuple[int, ...]) -> int:
        return sum(self.graph.tensors[t].size_bytes for t in tensors)

    def following(self, state: State) -> Iterator[tuple[float, State]]:
        """(time that passes, the state after it) for every instruction."""
        for t in state.live - self.graph.kept:
            waits = max(dict(state.stored).get(t, 0.0), dict(state.coming).get(t, 0.0))
            yield waits, self.passed(state._replace(live=state.live - {t}), waits, t)
        for t in state.live & self.movable - state.host:
            if dict(state.coming).get(t, 0.0):
                continue
            end = state.out + self.size((t,)) / self.rate
            yield 0.0, state._replace(
                host=state.host | {t}, out=end, stored=tuple(sorted((*state.stored, (t, end))))
            )
        for t in state.host - state.live:
            if self.size(state.live) + self.size((t,)) <= self.room:
                end = state.back + self.size((t,)) / self.rate
                yield 0.0, state._replace(
                    live=state.live | {t},
                    back=end,
                    coming=tuple(sorted((*state.coming, (t, end)))),
                )
        following = self.order[state.done] if state.done < self.steps else -1
        if following is None:
            live = state.live | set(self.graph.tangents)
            if self.size(live) + self.graph.boundary_bytes <= self.room:
                yield 0.0, state._replace(live=live, done=state.done + 1)
        elif following >= 0:
            yield from self.computed(state, following, state.done + 1)
        for op in range(min(state.done, self.boundary)):
            if self.graph.operators[op].recomputable:
                yield from self.computed(state, op, state.done)

    def computed(self, state: State, op: int, done: int) -> Iterator[tuple[float, State]]:
        """An operator by each of its implementations, in place where it may be."""
        operator, graph = self.graph.operators[op], self.graph
        for name in (None, *(choice.name for choice in operator.implementations)):
            chosen = variant(operator, name)
            reads = set(chosen.reads) - graph.resident
            if not reads <= state.live:
                continue
            waits = max((s for t, s in state.coming if t in reads), default=0.0)
            # A result that is there already is made once more and dropped.
            need = self.size(state.live) + self.size(chosen.writes) + chosen.workspace_bytes
            leaving = {t for t, _ in state.stored}
            for taken in (None, *chosen.in_place):
                gone = frozenset() if taken is None else frozenset((taken,))
                if gone & leaving or gone & graph.kept or not gone <= state.live:
                    continue
                if need - self.size(gone) > self.room:
                    continue
                live = state.live - gone | set(chosen.writes)
                passed = waits + chosen.time_s
                yield passed, self.passed(state._replace(live=live, done=done), passed)

    def passed(self, state: State, seconds: float, freed: int | None = None) -> State:
        """The state so many seconds later; what is remembered of a freed tensor goes."""
        live = state.live
        stored = tuple((t, max(0.0, s - seconds)) for t, s in state.stored if t != freed)
        coming = tuple(
            (t, s - seconds) for t, s in state.coming if t != freed and s > seconds and t in live
        )
        back = {t for t, _ in state.coming}
        return state._replace(
            out=max(0.0, state.out - seconds),
            back=max(0.0, state.back - seconds),
            stored=tuple((t, s) for t, s in stored if t in live and t not in back),
            coming=coming,
        )
