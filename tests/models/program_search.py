"""Exhaustive search over all valid programs of a tiny graph, transfers apart.

Written against the rules of `docs/cost-model.md` alone, with bit masks: it shares nothing with
`replay`, the validator or any strategy. A state is what is in memory, which operators have run, and
whether the loss boundary is past. Operators may run at any time and any number of times, by any of
their implementations; any tensor but a result may be dropped at any time; an output may take over
the storage of what its operator overwrites; a result may be dropped by early runs of its operator.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
from numba import njit, typed, types

from memopt.models.graph import Graph, Implementation, Operator, Phase

Ints = npt.NDArray[np.int64]
TENSORS = 32
"""Bits for the tensors of a state."""
OPERATORS = 20
BOUNDARY = 1 << (TENSORS + OPERATORS)


@njit(cache=True)
def total(bits: int, sizes: Ints) -> int:
    """Bytes of a set."""
    found = 0
    for t in range(sizes.size):
        if bits >> t & 1:
            found += sizes[t]
    return found


@njit(cache=True)
def least(
    sizes: Ints, masks: Ints, figures: Ints, seconds: npt.NDArray[np.float64], graph: Ints,
    rules: Ints, by_peak: bool, limit: int,
) -> float:  # fmt: skip
    """The least peak, or the least time within `limit` bytes; infinity if there is none.

    masks: reads, writes and what may be overwritten, of every choice; figures: its operator, its
    scratch memory, the bytes of its first output; graph: results, outputs of the forward,
    tangents, bytes of the boundary, whether there is one, operators that must run, those that
    may run once only, the first backward operator.
    """
    kept, early, tangents, loss, boundary, must, once, first = graph
    in_order, again_forward, again_after, drops = rules
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
            again = ran >> op & 1
            if masks[c, 0] & ~live or (again and once >> op & 1):
                continue
            if again and ((again_after and not past) or (again_forward and op >= first)):
                continue
            if boundary and (op >= first) != (past != 0) and not again:
                if op >= first or in_order:
                    continue
            if in_order and not again and ran >> op:
                continue
            results = masks[c, 1] & kept & ~live
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
                    # An output that is live already is written once more, beside the first.
                    if new not in best or value < best[new]:
                        best[new] = value
                        heapq.heappush(queue, (value, new))
                    if some == 0 or once >> op & 1 or not drops:
                        break
                    some = (some - 1) & results
    return np.inf


class ProgramSearch:
    """All programs of one graph.

    Attributes:
        graph: at most 32 computed tensors and 20 operators, no parameter updates.
        in_order: whether operators run for the first time in the graph's order.
        allowed: which implementations programs may use; None: all.
    """

    def __init__(
        self,
        graph: Graph,
        *,
        in_order: bool,
        allowed: Callable[[Operator, Implementation], bool] | None = None,
    ) -> None:
        computed = [t for t in range(len(graph.tensors)) if t not in graph.resident]
        assert len(computed) <= TENSORS
        assert len(graph.operators) <= OPERATORS
        self.place = {t: n for n, t in enumerate(computed)}
        self.resident_bytes = graph.resident_bytes
        self.in_order = in_order
        self.rules = np.array([in_order, 0, 0, 1], np.int64)
        self.sizes = np.array([graph.tensors[t].size_bytes for t in computed], np.int64)
        masks, figures, seconds = [], [], []
        for i, operator in enumerate(graph.operators):
            assert operator.phase is not Phase.UPDATE
            rows = [(operator.reads, operator.writes, operator)]
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
        has_boundary = bool(graph.tangents) or graph.first_backward < len(graph.operators)
        self.about = np.array(
            [
                self.bits(graph.kept),
                self.bits(forward.intersection(graph.outputs)),
                self.bits(graph.tangents),
                graph.boundary_bytes,
                has_boundary,
                sum(1 << i for i, o in enumerate(graph.operators) if not o.writes),
                sum(1 << i for i, o in enumerate(graph.operators) if not o.recomputable),
                graph.first_backward,
            ],
            np.int64,
        )

    def bits(self, tensors: Iterable[int]) -> int:
        """A set of computed tensors as bits; resident ones are left out."""
        return sum(1 << self.place[t] for t in set(tensors) if t in self.place)

    def _least(self, by_peak: bool, limit: int) -> float:
        return float(
            least(
                self.sizes,
                self.masks,
                self.figures,
                self.seconds,
                self.about,
                self.rules,
                by_peak,
                limit,
            )  # fmt: skip
        )

    def smallest_peak(self) -> int:
        """Of any program, total bytes."""
        return self.resident_bytes + int(self._least(True, 1 << 60))

    def least_time(self, budget_bytes: int) -> float:
        """Of any program within the budget, seconds; infinity: there is none."""
        return self._least(False, budget_bytes - self.resident_bytes)
