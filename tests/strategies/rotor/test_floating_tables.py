"""The floating programs' tables against their recurrences at every memory, and every schedule that
is read out of them."""

from __future__ import annotations

from functools import cache

import pytest

from memopt.reductions.chain_replay import replay_chain
from memopt.strategies.rotor.floating_kernels import gradient_need
from memopt.strategies.rotor.floating_trace_kernels import Whole, floating_schedule
from memopt.strategies.rotor.model import ChainArrays
from memopt.strategies.rotor.schedule_cost_kernels import peak_and_time
from memopt.strategies.rotor.schedules import steps_of
from memopt.strategies.rotor.steps_kernels import Steps, evaluate
from memopt.strategies.rotor.tables import _tables
from tests.strategies.rotor.chains import random_chain
from tests.strategies.rotor.test_tables import INF, LIMITS, arrays, costly_forwards


class Recurrences:
    """W and H of Rotor's floating programs, in slots, by plain recursion."""

    def __init__(self, c: ChainArrays, kinds: int) -> None:
        self.c, self.kinds = c, kinds
        self.w = cache(self._w)
        self.h = cache(self._h)

    def slots(self, size: int) -> int:
        return -(-int(size) // self.c.slot)

    def held(self, kind: int, last: int) -> int:
        """δ^ℓ, which is not there yet where ā^ℓ is left."""
        return int(gradient_need(self.c, last, kind))

    def _h(self, kind: int, s: int, u: int, last: int, m: int) -> float:
        """From a^s on: it is kept, or runs on."""
        c = self.c
        best = float(c.forward_sum_s[s]) + self.w(kind, s + 1, u, last, m - int(c.output[s]))
        if s + 1 < u and m >= self.slots(self.held(kind, last) + c.running[s + 1]):
            best = min(best, self.h(kind, s + 1, u, last, m))
        return best

    def _own(self, kind: int, s: int, last: int, m: int) -> float:
        """F_all^s first, or B^s alone."""
        c, arrived, leaves = self.c, kind >= 2, kind % 2 == 1
        saving, reverse = self.slots(self.held(kind, last) + c.saving[s]), self.slots(c.reverse[s])
        forward, backward = float(c.forward_s[s]), 0.0 if leaves else float(c.backward_s[s])
        if s == last and arrived:
            return backward if m >= reverse and not leaves else INF
        if m < (saving if leaves else max(saving, reverse)):
            return INF
        if s == last:
            return forward + backward
        left = m - int(c.saved[s]) + (int(c.output[s - 1]) if leaves else 0)
        return forward + backward + self.w(kind - kind % 2, s + 1, s + 1, last, left)

    def _w(self, kind: int, s: int, t: int, last: int, m: int) -> float:
        c, arrived, leaves = self.c, kind - kind % 2, kind % 2
        if (kind == 3 and t == last) or (s == 1 and leaves):
            return INF
        best = self._own(kind, s, last, m) if s == t else INF
        if m < self.slots(self.held(kind, last) + c.first[s]):
            return best
        before = float(c.forward_sum_s[s - 1])
        for route in range(1 + (self.kinds > 1)):
            for u in range(max(t + 1 - route * (1 - leaves), s + 1), last + 1):
                if route and arrived and u == last:
                    continue
                left = (2 + leaves, s, t, u, m) if route else (leaves, s, t, u - 1, m)
                right = self.h(arrived + route, s, u, last, m)
                if right < INF:
                    best = min(best, right + self.w(*left) - before)
        if s < t:
            best = min(best, self.h(kind, s, t, last, m + int(c.output[s - 1])) - before)
        return best


def known(whole: Whole, kind: int, s: int, t: int, last: int) -> Steps:
    start = whole.start[kind, s, t, last]
    stop = start + whole.length[kind, s, t, last]
    return Steps(whole.steps.at[start:stop], whole.steps.value[start:stop])


@pytest.mark.parametrize("kinds", [1, 4])
@pytest.mark.parametrize("slot", [1, 3])
def test_tables_by_recursion(slot: int, kinds: int) -> None:
    for seed in range(8):
        c = arrays(random_chain(seed, most_stages=5), slot)
        n = c.length
        whole, expected = _tables(c, kinds, LIMITS, 2**30), Recurrences(c, kinds)
        for s in range(1, n + 1):
            for t in range(s, n + 1 if s > 1 else 2):
                for last in range(t, n + 1):
                    for kind in range(kinds):
                        found = known(whole, kind, s, t, last)
                        if slot == 1:
                            least = found.at[0] if found.at.size else 2**61
                            assert whole.floor[kind, s, t, last] == least
                        for m in range(-4, 44 // slot):
                            value = expected.w(kind, s, t, last, m)
                            assert evaluate(found, m) == pytest.approx(value), (seed, kind, s, t)


@pytest.mark.parametrize("kinds", [1, 4])
def test_the_least_memory_of_every_part(kinds: int) -> None:
    """Recurrences without time, beside the tables' first steps."""
    finite = 0
    for seed in range(16):
        chain = costly_forwards(seed, random_chain(900 + seed, most_stages=9))
        c = arrays(chain, 1)
        n = c.length
        whole = _tables(c, kinds, LIMITS, 2**30)
        for s in range(1, n + 1):
            for t in range(s, n + 1 if s > 1 else 2):
                for last in range(t, n + 1):
                    for kind in range(kinds):
                        at = known(whole, kind, s, t, last).at
                        assert whole.floor[kind, s, t, last] == (at[0] if at.size else 2**61)
                        finite += at.size > 0
    assert finite > 300


@pytest.mark.parametrize("kinds", [1, 4])
@pytest.mark.parametrize("slot", [1, 3])
def test_schedules_at_every_memory(slot: int, kinds: int) -> None:
    """What a table promises, its schedules keep: within the memory, in no more time."""
    longest = 0
    for seed in range(8):
        chain = costly_forwards(seed, random_chain(800 + seed, most_stages=11))
        c = arrays(chain, slot)
        n = c.length
        whole = _tables(c, kinds, LIMITS, 2**30)
        root = known(whole, 0, 1, 1, n)
        least, fixed = int(whole.floor[0, 1, 1, n]), chain.resident_bytes + chain.input_bytes
        assert floating_schedule(c, whole, least - 1).size == 0
        for memory in range(least, int(root.at[-1] * slot) + 2):
            codes = floating_schedule(c, whole, memory)
            timeline = replay_chain(chain, steps_of(codes))
            peak = timeline.peak_bytes - fixed
            assert peak <= memory
            assert peak_and_time(c, codes) == (peak, pytest.approx(timeline.time_s))
            promised = evaluate(root, memory // slot)
            assert timeline.time_s <= promised + 1e-9
            assert slot > 1 or timeline.time_s == pytest.approx(promised)
            longest = max(longest, len(codes) - 2 * n)
    assert longest > 10
