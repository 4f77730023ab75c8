"""Exhaustive search over chain schedules, for chains of up to about eight stages.

Written against Rotor's Table 1 directly, with bit masks, and not with `ChainState`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from memopt.models.chain import Chain

State = tuple[int, int, int]
"""(a^0..a^n held on their own, ā^1..ā^n held, ℓ of the δ^ℓ held), the first two as bit masks."""


class ChainSearch:
    """The moves of one chain."""

    def __init__(self, chain: Chain, drops: bool) -> None:
        self.chain = chain
        self.drops = drops
        self.activation = [chain.activation_bytes(i) for i in range(len(chain) + 1)]
        self.saved = [0] + [stage.saved_bytes for stage in chain.stages]

    def held(self, state: State) -> int:
        activations, saved, gradient = state
        total = self.chain.resident_bytes + self.chain.gradient_bytes(gradient)
        for i, size in enumerate(self.activation):
            total += size if activations >> i & 1 else 0
            total += self.saved[i] if saved >> i & 1 else 0
        return total + sum(x.parameter_gradient_bytes for x in self.chain.stages[gradient:])

    def moves(self, state: State) -> Iterator[tuple[State, int, float]]:
        """(state after, memory during, seconds) of every operation that is possible."""
        activations, saved, gradient = state
        held = self.held(state)
        for i, stage in enumerate(self.chain.stages, 1):
            if not (activations | saved) >> (i - 1) & 1:
                continue
            plain = stage.forward_no_save_overhead_bytes
            plain = stage.forward_overhead_bytes if plain is None else plain
            if not activations >> i & 1:
                during = held + stage.output_bytes + plain
                with_output = activations | 1 << i
                yield (with_output, saved, gradient), during, stage.forward_time_s
                # F_∅ drops its input; not while ā^i is held (the class of the papers' programs).
                if i > 1 and activations >> (i - 1) & 1 and not saved >> i & 1:
                    after = (with_output & ~(1 << i - 1), saved, gradient)
                    yield after, during, stage.forward_time_s
            if not saved >> i & 1:
                during = held + stage.saved_bytes + stage.forward_overhead_bytes
                yield (activations, saved | 1 << i, gradient), during, stage.forward_time_s
            elif gradient == i:
                during = held + self.chain.gradient_bytes(i - 1) + stage.backward_overhead_bytes
                during += stage.parameter_gradient_bytes
                left = activations if i == 1 else activations & ~(1 << i - 1)
                yield (left, saved & ~(1 << i), i - 1), during, stage.backward_time_s
        if self.drops:
            for i in range(1, len(self.chain) + 1):
                if activations >> i & 1:
                    yield (activations & ~(1 << i), saved, gradient), held, 0.0
                if saved >> i & 1:
                    yield (activations, saved & ~(1 << i), gradient), held, 0.0

    def best(
        self, budget_bytes: float, combine: Callable[[float, int, float], float], start: float
    ) -> float | None:
        """Dijkstra over states; `combine(cost, memory during, seconds)` never falls."""
        queue: list[tuple[float, State]] = [(start, (1, 0, len(self.chain)))]
        cheapest: dict[State, float] = {queue[0][1]: start}
        while queue:
            cost, state = heapq.heappop(queue)
            if cost > cheapest[state]:
                continue
            if state[2] == 0:
                return cost
            for after, during, seconds in self.moves(state):
                if during <= budget_bytes:
                    total = combine(cost, during, seconds)
                    if total < cheapest.get(after, float("inf")):
                        cheapest[after] = total
                        heapq.heappush(queue, (total, after))
        return None


def best_makespan(chain: Chain, budget_bytes: int, drops: bool = False) -> float | None:
    """The least makespan within a budget over Table 1's operations; with `drops`, over
    schedules that may drop any value at any time. None: infeasible."""
    search = ChainSearch(chain, drops)
    return search.best(budget_bytes, lambda cost, _, seconds: cost + seconds, 0.0)


def smallest_peak(chain: Chain) -> float:
    """The least peak of any schedule, bytes."""
    search = ChainSearch(chain, drops=True)
    peak = search.best(float("inf"), lambda cost, during, _: max(cost, during), -float("inf"))
    assert peak is not None
    return peak
