"""Exhaustive search over the valid programs of a tiny graph, transfers apart.

Written against the rules of `docs/cost-model.md` alone, with bit masks: it shares nothing with
`replay`, the validator or any strategy. A state is what is in memory, which operators have run, and
whether the loss boundary is past. What nothing needs need not run; forward operators that no output
needs may run after the boundary. Any tensor but a result may be dropped at any time, a result
by early runs of its operator, and an output may take over the storage of what it overwrites.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass

import numpy as np
import numpy.typing as npt
from numba import njit, typed, types

from memopt.models.graph import Graph, Implementation, Operator, Phase

Ints = npt.NDArray[np.int64]
TENSORS = 32
"""Bits for the tensors of a state."""
OPERATORS = 20
BOUNDARY = 1 << (TENSORS + OPERATORS)


@dataclass(frozen=True)
class Rules:
    """Which programs are searched.

    Attributes:
        in_order: operators run for the first time in the graph's order.
        again: whether operators may run more than once at all.
        forward_again: only forward operators run again.
        after_boundary: operators run again after the boundary only.
        drops: a result may be dropped where its operator runs again later.
    """

    in_order: bool = True
    again: bool = True
    forward_again: bool = False
    after_boundary: bool = False
    drops: bool = True


@njit(cache=True)
def total(bits: int, sizes: Ints) -> int:
    """Bytes of a set."""
    found = 0
    for t in range(sizes.size):
        if bits >> t & 1:
            found += sizes[t]
    return found


@njit(cache=True)
def runs(op: int, ran: int, past: bool, graph: Ints, rules: Ints) -> bool:
    """Whether the rules let an operator run in a state."""
    boundary, once, first, draws = graph[4] != 0, graph[6], graph[7], graph[8]
    in_order, repeats, forward_again, after_boundary = rules[0], rules[1], rules[2], rules[3]
    if ran >> op & 1:
        if not repeats or once >> op & 1:
            return False
        return not (after_boundary and not past) and not (forward_again and op >= first)
    if op >= first and not past:
        return False
    late = boundary and past and op < first
    if draws >> op & 1 and (draws & ((np.int64(1) << op) - 1) & ~ran or late):
        return False
    return late or not in_order or ran >> op == 0


@njit(cache=True)
def least(
    sizes: Ints, masks: Ints, figures: Ints, seconds: npt.NDArray[np.float64], graph: Ints,
    rules: Ints, by_peak: bool, limit: int,
) -> float:  # fmt: skip
    """The least peak, or the least time within `limit` bytes; infinity if there is none.

    masks: reads, writes and what may be overwritten, of every choice; figures: its operator, its
    scratch memory, the bytes of its first output; graph: results, outputs of the forward,
    tangents, bytes of the boundary, whether there is one, operators that must run, those that
    may run once only, the first backward operator, random operators.
    """
    kept, early, tangents, loss, boundary, must = graph[:6]
    bound = np.int64(BOUNDARY)
    live_mask = (np.int64(1) << TENSORS) - 1
    best = typed.Dict.empty(types.int64, types.float64)
    start = np.int64(0) if boundary else bound
    best[start] = 0.0
    queue = [(0.0, start)]
    while len(queue):
        cost, state = heapq.heappop(queue)
        if best[state] < cost:
            continue
        live, ran, past = state & live_mask, (state & ~bound) >> TENSORS, state & bound
        if past and kept & ~live == 0 and must & ~ran == 0:
            return cost
        for t in range(sizes.size):
            bit = np.int64(1) << t
            if live & bit and not kept & bit:
                new = state ^ bit
                if new not in best or cost < best[new]:
                    best[new] = cost
                    heapq.heappush(queue, (cost, new))
        held = total(live, sizes)
        if not past and early & ~live == 0:
            during = held + total(tangents, sizes) + loss
            new = state | tangents | bound
            value = max(cost, float(during)) if by_peak else cost
            if during <= limit and (new not in best or value < best[new]):
                best[new] = value
                heapq.heappush(queue, (value, new))
        for c in range(seconds.size):
            op = figures[c, 0]
            if masks[c, 0] & ~live or not runs(op, ran, past != 0, graph, rules):
                continue
            results = masks[c, 1] & kept & ~live
            # An output that is live already is written once more, beside the first.
            during = held + total(masks[c, 1], sizes) + figures[c, 1]
            after = (live | masks[c, 1] | (ran | np.int64(1) << op) << TENSORS | past) & ~results
            for taken in range(-1, sizes.size):
                bit = np.int64(0)
                if taken >= 0:
                    bit = np.int64(1) << taken
                    if not masks[c, 2] & live & ~kept & bit:
                        continue
                need = during - figures[c, 2] if taken >= 0 else during
                if need > limit:
                    continue
                value = max(cost, float(need)) if by_peak else cost + seconds[c]
                some = results
                while True:
                    new = (after & ~bit) | some
                    if new not in best or value < best[new]:
                        best[new] = value
                        heapq.heappush(queue, (value, new))
                    if some == 0 or graph[6] >> op & 1 or not rules[4]:
                        break
                    some = (some - 1) & results
    return np.inf


class ProgramSearch:
    """The programs of one graph.

    Attributes:
        graph: at most 32 computed tensors and 20 operators, no parameter updates.
        rules: which programs.
        allowed: which implementations they may use; None: all.
        all_run: whether operators run that nothing needs, too.
    """

    def __init__(
        self,
        graph: Graph,
        rules: Rules = Rules(),
        allowed: Callable[[Operator, Implementation], bool] | None = None,
        all_run: bool = False,
    ) -> None:
        computed = [t for t in range(len(graph.tensors)) if t not in graph.resident]
        assert len(computed) <= TENSORS
        assert len(graph.operators) <= OPERATORS
        self.place = {t: n for n, t in enumerate(computed)}
        self.resident_bytes = graph.resident_bytes
        self.rules = np.array(astuple(rules), np.int64)
        self.sizes = np.array([graph.tensors[t].size_bytes for t in computed], np.int64)
        masks, figures, seconds = [], [], []
        for i, operator in enumerate(graph.operators):
            assert operator.phase is not Phase.UPDATE
            rows: list[tuple[tuple[int, ...], tuple[int, ...], Operator | Implementation]] = [
                (operator.reads, operator.writes, operator)
            ]
            for choice in operator.implementations:
                if allowed is None or allowed(operator, choice):
                    reads = operator.reads if choice.reads is None else choice.reads
                    writes = operator.writes if choice.writes is None else choice.writes
                    rows.append((reads, writes, choice))
            for reads, writes, own in rows:
                masks.append([self.bits(reads), self.bits(writes), self.bits(own.in_place)])
                first = graph.tensors[writes[0]].size_bytes if writes else 0
                figures.append([i, own.workspace_bytes, first])
                seconds.append(own.time_s)
        self.masks, self.figures = np.array(masks, np.int64), np.array(figures, np.int64)
        self.seconds = np.array(seconds, np.float64)
        forward = {t for o in graph.operators[: graph.first_backward] for t in o.writes}
        operators = list(enumerate(graph.operators))
        self.graph = np.array(
            [
                self.bits(graph.kept),
                self.bits(forward.intersection(graph.outputs)),
                self.bits(graph.tangents),
                graph.boundary_bytes,
                bool(graph.tangents) or graph.first_backward < len(graph.operators),
                sum(1 << i for i, o in operators if all_run or o.has_effects),
                sum(1 << i for i, o in operators if not o.recomputable),
                graph.first_backward,
                sum(1 << i for i, o in operators if o.random),
            ],
            np.int64,
        )

    def bits(self, tensors: Iterable[int]) -> int:
        """A set of computed tensors as bits; resident ones are left out."""
        return sum(1 << self.place[t] for t in set(tensors) if t in self.place)

    def _least(self, by_peak: bool, limit: int) -> float:
        figures = (self.sizes, self.masks, self.figures, self.seconds, self.graph, self.rules)
        return float(least(*figures, by_peak, limit))

    def smallest_peak(self) -> int:
        """Of any program, total bytes."""
        return self.resident_bytes + int(self._least(True, 1 << 60))

    def least_time(self, budget_bytes: int) -> float:
        """Of any program within the budget, seconds; infinity: there is none."""
        return self._least(False, budget_bytes - self.resident_bytes)
