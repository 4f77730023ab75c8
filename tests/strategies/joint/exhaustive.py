"""Exhaustive search over the programs of a tiny graph, transfers included.

Written against the rules of docs/cost-model.md alone; it shares nothing with `replay` or a
strategy. A state is what is on the device and on the host, how far the step is, and how long the
link is still busy with what; Dijkstra over the time of the compute stream. Operators run for the
first time in the graph's order, forward ones again after the boundary, each by any implementation;
any tensor but results and tangents may move, as often as it likes, and may be dropped. What nothing
needs need not run. Room is made where something needs it, and no more than it needs: a later free
never costs more.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from memopt.models.bounds import needed_operators
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


class TooLargeError(Exception):
    """A search with more states than it may have."""


def least_time(
    graph: Graph, budget_bytes: int, bytes_per_s: float, most_states: int = 20_000
) -> float:
    """Seconds of the fastest program within the budget; infinity: there is none.

    Raises:
        TooLargeError: it takes more than `most_states`.
    """
    start = State(frozenset(), frozenset(), 0, 0.0, 0.0, (), ())
    best, order = {start: 0.0}, itertools.count()
    search = _Search(graph, budget_bytes, bytes_per_s)
    queue: list[tuple[float, int, float, State | None]] = [(0.0, next(order), 0.0, start)]
    while queue:
        _, _, now, state = heapq.heappop(queue)
        if state is None:
            return now
        if now > best[state]:
            continue
        if len(best) > most_states:
            raise TooLargeError(f"{len(best)} states")
        if state.done == search.steps and graph.kept <= state.live:
            end = now + max(state.out, state.back)
            heapq.heappush(queue, (end, next(order), end, None))
        for waited, following in search.following(state):
            if now + waited < best.get(following, math.inf):
                best[following] = now + waited
                least_s = now + waited + search.left_s[following.done]
                heapq.heappush(queue, (least_s, next(order), now + waited, following))
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
        self.read_by = self._read_by()
        """For each operator, what it or one after it may read, again runs included."""
        self.movable = graph.computed - graph.kept - set(graph.tangents)
        left_s = [0.0]
        for op in reversed(self.order):
            operator = None if op is None else graph.operators[op]
            sure = operator is not None and op in needed_operators(graph)
            times = [operator.time_s, *(c.time_s for c in operator.implementations)] if sure else []
            left_s.append(left_s[-1] + min(times, default=0.0))
        self.left_s = left_s[::-1]
        """What still must run takes so long at least."""
        forward = {t for operator in graph.operators[: self.boundary] for t in operator.writes}
        self.early = forward.intersection(graph.outputs)

    def _read_by(self) -> dict[int, frozenset[int]]:
        writers = {
            t: i
            for i, operator in enumerate(self.graph.operators)
            for choice in (operator, *operator.implementations)
            for t in choice.writes or ()
        }
        found: dict[int, frozenset[int]] = {}
        for first in range(len(self.graph.operators)):
            stack, seen = list(range(first, len(self.graph.operators))), set[int]()
            reads: set[int] = set()
            while stack:
                op = stack.pop()
                if op in seen:
                    continue
                seen.add(op)
                operator = self.graph.operators[op]
                for choice in (operator, *operator.implementations):
                    reads.update(operator.reads if choice.reads is None else choice.reads)
                stack += [writers[t] for t in reads if t in writers]
            found[first] = frozenset(reads)
        return found

    def size(self, tensors: frozenset[int] | tuple[int, ...]) -> int:
        return sum(self.graph.tensors[t].size_bytes for t in tensors)

    def following(self, state: State) -> Iterator[tuple[float, State]]:
        """(time that passes, the state after it) for every instruction, frees that make room for
        it included."""
        left = [op for op in self.order[state.done :] if op is not None]
        useful = self.read_by[left[0]] if left else frozenset()
        for t in (state.live & self.movable & useful) - state.host:
            if not dict(state.coming).get(t, 0.0):
                end = state.out + self.size((t,)) / self.rate
                stored = tuple(sorted((*state.stored, (t, end))))
                yield 0.0, state._replace(host=state.host | {t}, out=end, stored=stored)
        for t in (state.host & useful) - state.live:
            for waits, roomy in self.with_room(state, self.size((t,)), frozenset()):
                end = roomy.back + self.size((t,)) / self.rate
                coming = tuple(sorted((*roomy.coming, (t, end))))
                yield waits, roomy._replace(live=roomy.live | {t}, back=end, coming=coming)
        following = self.order[state.done] if state.done < self.steps else -1
        if following is None:
            need = self.size(tuple(set(self.graph.tangents) - state.live))
            if self.early <= state.live:
                for waits, roomy in self.with_room(
                    state, need + self.graph.boundary_bytes, frozenset()
                ):
                    live = roomy.live | set(self.graph.tangents)
                    yield waits, self.living(roomy._replace(live=live, done=state.done + 1))
        elif following >= 0:
            yield from self.computed(state, following, state.done + 1)
            if not self.graph.operators[following].has_effects:
                yield 0.0, self.living(state._replace(done=state.done + 1))
        for op in range(self.boundary if state.done > self.boundary else 0):
            operator = self.graph.operators[op]
            if operator.recomputable and not set(operator.writes) <= state.live:
                yield from self.computed(state, op, state.done)

    def with_room(
        self, state: State, need: int, held: frozenset[int]
    ) -> Iterator[tuple[float, State]]:
        """(time that passes, the state) for every way to make room for so many bytes, nothing of
        `held` freed and nothing that need not be."""
        lacking = self.size(state.live) + need - self.room
        if lacking <= 0:
            yield 0.0, state
            return
        victims = [t for t in state.live - held - self.graph.kept if self.size((t,))]
        for count in range(1, len(victims) + 1):
            for freed in itertools.combinations(victims, count):
                sizes = [self.size((t,)) for t in freed]
                if sum(sizes) < lacking or sum(sizes) - min(sizes) >= lacking:
                    continue
                times = dict(state.stored) | dict(state.coming)
                waits = max(times.get(t, 0.0) for t in freed)
                yield waits, self.passed(state._replace(live=state.live - set(freed)), waits)

    def living(self, state: State) -> State:
        """The state without tensors that nothing will read."""
        left = [op for op in self.order[state.done :] if op is not None]
        useful = self.read_by[left[0]] if left else frozenset()
        return self.passed(state._replace(live=state.live & (useful | self.graph.kept)), 0.0)

    def computed(self, state: State, op: int, done: int) -> Iterator[tuple[float, State]]:
        """An operator by each of its implementations, in place where it may be."""
        operator, graph = self.graph.operators[op], self.graph
        for name in (None, *(choice.name for choice in operator.implementations)):
            chosen = variant(operator, name)
            reads = frozenset(chosen.reads) - graph.resident
            if not reads <= state.live:
                continue
            # A result that is there already is made once more and dropped.
            need = self.size(chosen.writes) + chosen.workspace_bytes
            leaving = {t for t, _ in state.stored}
            for taken in (None, *chosen.in_place):
                gone = frozenset() if taken is None else frozenset((taken,))
                if gone & leaving or gone & graph.kept:
                    continue
                for waits, roomy in self.with_room(state, need - self.size(tuple(gone)), reads):
                    more = max((s for t, s in roomy.coming if t in reads), default=0.0)
                    live = roomy.live - gone | set(chosen.writes)
                    passed = more + chosen.time_s
                    after = self.passed(roomy._replace(live=live, done=done), passed)
                    yield waits + passed, self.living(after)

    def passed(self, state: State, seconds: float) -> State:
        """The state so many seconds later; what is remembered of tensors that are gone goes."""
        live = state.live
        stored = tuple((t, max(0.0, s - seconds)) for t, s in state.stored if t in live)
        coming = tuple((t, s - seconds) for t, s in state.coming if s > seconds and t in live)
        return state._replace(
            out=max(0.0, state.out - seconds),
            back=max(0.0, state.back - seconds),
            stored=stored,
            coming=coming,
        )
