"""The brute force of `oracle.py` for up to eight forward operators: the same class and count of
memory, sets as bits, every set of runs enumerated by compiled loops.

Two things are left out, since they cost time and memory and give nothing: running an operator
whose results are all there, and saving what nothing may need later.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from memopt.models.graph import Graph
from tests.strategies.monet.oracle import Brute

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
NEVER = float("inf")


@njit(cache=True)
def total(bits: int, size: Ints) -> int:
    """Bytes of a set."""
    found = 0
    for t in range(size.size):
        if bits >> t & 1:
            found += size[t]
    return found


@njit(cache=True)
def forward_states(
    count: Ints, reads: Ints, writes: Ints, own: Ints, seconds: Floats, before: Ints, local: Ints,
    kept: int, size: Ints, limit: int, boundary: int, best: Floats,
) -> None:  # fmt: skip
    """best[saved] after the forward: over all choices of implementations and all saved sets."""
    n = count.size
    digit = np.zeros(n, np.int64)
    while True:
        written, took, legal, bad = 0, 0.0, True, n - 1
        for i in range(n):
            if reads[i, digit[i]] & ~written:
                legal, bad = False, i
                break
            written |= writes[i, digit[i]]
            took += seconds[i, digit[i]]
        if legal:
            saved = written
            while True:
                if saved & kept == kept and took < best[saved]:
                    fits = total(saved, size) + boundary <= limit
                    for i in range(n):
                        held = local[i] | (before[i] & saved)
                        fits = fits and total(held, size) + own[i, digit[i]] <= limit
                    if fits:
                        best[saved] = took
                if saved == 0:
                    break
                saved = (saved - 1) & written
        place = bad
        for i in range(bad + 1, n):
            digit[i] = 0
        while place >= 0:
            digit[place] += 1
            if digit[place] < count[place]:
                break
            digit[place] = 0
            place -= 1
        if place < 0:
            return


@njit(cache=True)
def next_states(
    best: Floats, after: Floats, again: Ints, count: Ints, reads: Ints, writes: Ints, own: Ints,
    seconds: Floats, before: Ints, local: Ints, owned: Ints, later: int, kept: int, last: bool,
    gradient: int, stage_reads: Ints, stage_own: Ints, stage_seconds: Floats, size: Ints,
    limit: int,
) -> None:  # fmt: skip
    """after[saved] of the next stage: over all runs in this one, in the graph's order."""
    n = again.size
    digit = np.zeros(n, np.int64)
    for saved in range(best.size):
        if best[saved] == np.inf:
            continue
        digit[:] = 0
        while True:
            have, took, legal, bad = saved, best[saved], True, n - 1
            for a in range(n):
                if digit[a] == 0:
                    continue
                i, c = again[a], digit[a] - 1
                if reads[i, c] & ~have or writes[i, c] & ~have == 0:
                    legal, bad = False, a
                    break
                have |= writes[i, c]
                took += seconds[i, c]
            if legal:
                _leave(
                    after, saved, have, took, digit, again, writes, own, before, local, owned,
                    later, kept, last, gradient, stage_reads, stage_own, stage_seconds, size, limit,
                )  # fmt: skip
            place = bad
            for a in range(bad + 1, n):
                digit[a] = 0
            while place >= 0:
                digit[place] += 1
                if digit[place] <= count[again[place]]:
                    break
                digit[place] = 0
                place -= 1
            if place < 0:
                break


@njit(cache=True)
def _leave(
    after: Floats, saved: int, have: int, took: float, digit: Ints, again: Ints, writes: Ints,
    own: Ints, before: Ints, local: Ints, owned: Ints, later: int, kept: int, last: bool,
    gradient: int, stage_reads: Ints, stage_own: Ints, stage_seconds: Floats, size: Ints,
    limit: int,
) -> None:  # fmt: skip
    """All that may be saved after given runs."""
    for c in range(stage_reads.size):
        if stage_reads[c] & ~have:
            continue
        seconds = took + stage_seconds[c]
        most = have & (kept if last else later | kept)
        keep = most
        while True:
            if keep & kept == kept and seconds < after[keep]:
                held = keep | stage_reads[c]
                fits = gradient + total(held, size) + stage_own[c] <= limit
                for a in range(again.size):
                    if not fits or digit[a] == 0:
                        continue
                    i, o = again[a], digit[a] - 1
                    there = before[i] & (local[i] | held)
                    there |= saved & ~before[i] & ~owned[i]
                    there |= saved & owned[i] & ~writes[i, o]
                    twice = total(kept & writes[i, o], size)
                    fits = gradient + own[i, o] + twice + total(there, size) <= limit
                if fits:
                    after[keep] = seconds
            if keep == 0:
                break
            keep = (keep - 1) & most


class FastBrute(Brute):
    """As Brute; gradients are written by every implementation of their operator."""

    def __init__(self, graph: Graph, budget_bytes: int) -> None:
        super().__init__(graph, budget_bytes)
        self.bit = {t: n for n, t in enumerate(sorted(self.owner))}
        self.sizes = np.array([graph.tensors[t].size_bytes for t in self.bit], np.int64)
        most = max(map(len, self.choices))
        shape = (self.split, most)
        self.reads, self.writes = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.own, self.seconds = np.zeros(shape, np.int64), np.zeros(shape)
        for i in range(self.split):
            for c, choice in enumerate(self.choices[i]):
                self.reads[i, c] = self.bits(choice.reads)
                self.writes[i, c] = self.bits(choice.writes)
                self.own[i, c] = self.size(choice.writes) + choice.workspace_bytes
                self.seconds[i, c] = choice.time_s
        self.many = np.array([len(self.choices[i]) for i in range(self.split)], np.int64)
        self.owned = np.array(
            [self.bits(t for t, j in self.owner.items() if j == i) for i in range(self.split)],
            np.int64,
        )
        self.before = np.array(
            [self.bits(t for t, j in self.owner.items() if j < i) for i in range(self.split)],
            np.int64,
        )

    def bits(self, tensors: object) -> int:
        """A set of forward tensors as bits; others are left out."""
        return sum(1 << self.bit[t] for t in set(tensors) if t in self.bit)  # type: ignore[call-overload]

    def best_s(self) -> float:
        forward = list(range(self.split))
        local = [self.bits(self.readers(forward, i)) & int(self.before[i]) for i in forward]
        best = np.full(1 << len(self.bit), NEVER)
        kept = self.bits(self.kept)
        boundary = self.size(self.graph.tangents) + self.graph.boundary_bytes
        forward_states(
            self.many, self.reads, self.writes, self.own, self.seconds, self.before,
            np.array(local, np.int64), kept, self.sizes, self.limit, boundary, best,
        )  # fmt: skip
        for k in range(self.split, self.count):
            best = self._next(k, best, kept)
        return float(best.min())

    def _next(self, k: int, best: Floats, kept: int) -> Floats:
        useful = self._useful(k)[0]
        again = sorted(i for i in useful if self.graph.operators[i].recomputable)
        local = [self.bits(self.readers(again, i)) for i in range(self.split)]
        read = self.readers(list(range(k, self.count)), k) | self.graph.kept
        gone = {t for j in range(self.split, k) for c in self.choices[j] for t in c.writes}
        gradient = self.size((gone | set(self.graph.tangents)) & read)
        own = [self.size(c.writes) + c.workspace_bytes for c in self.choices[k]]
        after = np.full(best.size, NEVER)
        next_states(
            best, after, np.array(again, np.int64), self.many, self.reads, self.writes, self.own,
            self.seconds, self.before, np.array(local, np.int64), self.owned,
            self.bits(self._useful(k + 1)[1]), kept, k == self.count - 1, gradient,
            np.array([self.bits(c.reads) for c in self.choices[k]], np.int64),
            np.array(own, np.int64), np.array([c.time_s for c in self.choices[k]]), self.sizes,
            self.limit,
        )  # fmt: skip
        return after

    def _useful(self, k: int) -> tuple[set[int], set[int]]:
        """(operators, tensors) of the forward that operators from k on may need."""
        operators: set[int] = set()
        tensors: set[int] = set()
        # What the step returns is saved throughout, so that nothing runs again for it alone.
        stack = list(self.readers(list(range(k, self.count)), k))
        while stack:
            t = stack.pop()
            i = self.owner.get(t)
            if i is None or t in tensors:
                continue
            tensors.add(t)
            if i not in operators:
                operators.add(i)
            stack.extend(u for c in self.choices[i] for u in c.reads)
        return operators, tensors
