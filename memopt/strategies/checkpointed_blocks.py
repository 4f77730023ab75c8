"""A candidate for steps with collectives: every block checkpointed, its collectives prefetched.

Strategies plan as if each collective were waited for, so gathering a weight again seems to cost its
whole time. Where the network is hidden behind computation it costs none, and FSDP2's schedule with
checkpointed blocks may be faster than theirs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, count

from memopt.models.bounds import relative_gap, time_lower_bound
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.passes.early_collectives import with_early_collectives
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.reductions.block_checkpoints import (
    by_worth,
    checkpointed,
    forward_of_blocks,
    largest_sent_bytes,
)

_HIDDEN = 0.002
"""A step that waits for its collectives less than this share has them hidden."""


def or_checkpointed(
    graph: Graph,
    solution: Solution,
    program: Callable[[Solution], Program | None],
    budget_bytes: int,
    device: Device | None,
) -> Solution:
    """Return a strategy's solution, or the step with checkpointed blocks if that is faster, or the
    only one that fits.

    Args:
        graph: with collectives.
        solution: of a strategy that recomputes, within the budget, or without a plan.
        program: makes the program of a solution as it runs.
        budget_bytes: of the device, total.
        device: link rates.
    """
    own = program(solution) if solution.plans else None
    if graph.movable:
        return solution
    planned_s = math.inf if own is None else replay(graph, own, device).time_s
    search = _Search(graph, budget_bytes, device, planned_s)
    best, least_s = search.best(), search.least_s
    if best is None:
        return solution
    checkpointed_step, peak_bytes = best
    bound_s = solution.lower_bound_s if solution.plans else None
    bound_s = min(least_s, time_lower_bound(graph) if bound_s is None else bound_s)
    return replace(
        solution,
        status=Status.FEASIBLE,
        steps=None,
        smallest=None,
        smallest_budget_bytes=None,
        program=checkpointed_step,
        peak_bytes=peak_bytes,
        time_s=least_s,
        lower_bound_s=bound_s,
        gap=relative_gap(least_s, bound_s),
        stats={**solution.stats, "schedule": "checkpointed blocks"},
    )


class _Search:
    """Looks for steps with checkpointed blocks that take less than `least_s`."""

    def __init__(
        self, graph: Graph, budget_bytes: int, device: Device | None, least_s: float
    ) -> None:
        self.least_s = least_s
        self._graph, self._budget_bytes, self._device = graph, budget_bytes, device
        self._best: tuple[Program, int] | None = None

    def best(self) -> tuple[Program, int] | None:
        """Return the fastest step and its peak bytes: with all blocks checkpointed, and room for
        one to prefetch; or, beside that prefetch or a quarter of it, with as many results kept in
        all blocks as fit, most time saved per byte first (selective checkpointing), or with as many
        of the last blocks not checkpointed as fit."""
        graph = self._graph
        blocks = forward_of_blocks(graph)
        if len(blocks) < 2:
            return None
        room_bytes = largest_sent_bytes(graph)
        orders: list[Sequence[Sequence[int]]] = [
            by_worth(graph, blocks, collectives) for collectives in (False, True)
        ]
        orders.append(list(blocks.values())[::-1])
        none_kept = self._step(blocks, ())
        if none_kept[1] > self._budget_bytes:
            return None
        before: _Kept | None = None
        for order in orders:
            kept = _Kept(graph, order, partial(self._step, blocks), none_kept)
            if before is None or not kept.begins_as(before):
                self._order(kept, room_bytes)
            before = kept
        self._offer(none_kept[0], min(self._budget_bytes, none_kept[1] + room_bytes))
        return self._best

    def _order(self, kept: _Kept, room_bytes: int) -> None:
        for free_bytes in (room_bytes // 4, room_bytes):
            limit_bytes = self._budget_bytes - free_bytes
            fewest = kept.saving(_compute_s(self._graph, kept.none_kept[0]) - self.least_s)
            # Where the network is hidden, keeping less is slower.
            if fewest is None or self._offer(kept.most(limit_bytes, fewest), self._budget_bytes):
                return

    def _step(
        self, blocks: Mapping[str, Sequence[int]], kept: Collection[int]
    ) -> tuple[Program, int]:
        program = with_in_place(self._graph, checkpointed(self._graph, blocks, kept))
        return program, replay(self._graph, program, self._device).peak_bytes

    def _offer(self, plain: Program | None, limit_bytes: int) -> bool:
        """Prefetch a step's collectives and keep it if it is faster; return whether they are
        hidden, or cannot make it faster than the best."""
        busy_s = 0.0 if plain is None else _compute_s(self._graph, plain)
        if plain is None or busy_s >= self.least_s:
            return plain is not None
        found = with_early_collectives(self._graph, plain, limit_bytes, self._device)
        timeline = replay(self._graph, found, self._device)
        if timeline.peak_bytes <= self._budget_bytes and timeline.time_s < self.least_s:
            self._best, self.least_s = (found, timeline.peak_bytes), timeline.time_s
        return timeline.time_s <= busy_s * (1 + _HIDDEN)


def _compute_s(graph: Graph, program: Program) -> float:
    """Return the seconds that the compute stream is busy: the least that a program takes."""
    operators = graph.operators
    runs = (operators[run.op] for _, run in program.computes)
    return sum(operator.time_s for operator in runs if operator.collective is None)


class _Kept:
    """How many groups of an order can be kept in a limit."""

    def __init__(
        self,
        graph: Graph,
        order: Sequence[Sequence[int]],
        made: Callable[[Collection[int]], tuple[Program, int]],
        none_kept: tuple[Program, int],
    ) -> None:
        groups = [[graph.operators[op] for op in group] for group in order]
        sizes = [sum(graph.tensors[t].size_bytes for x in one for t in x.writes) for one in groups]
        times = [sum(x.time_s for x in one if x.collective is None) for one in groups]
        self._order, self._made, self.none_kept = order, made, none_kept
        self._held, self._saved_s = [0, *accumulate(sizes)], [0.0, *accumulate(times)]
        self._tried, self._count = {0: none_kept}, 0

    def begins_as(self, other: _Kept) -> bool:
        """Whether this order keeps what another one was found to keep."""
        most = other._count + 1
        return self._order[:most] == other._order[:most]

    def saving(self, time_s: float) -> int | None:
        """Return how many groups save this time at least; None: all save less."""
        number = bisect_left(self._saved_s, time_s)
        return number if number < len(self._saved_s) else None

    def most(self, limit_bytes: int, fewest: int) -> Program | None:
        """Return the step that keeps the most groups found to fit, by secants: memory is nearly
        affine in the bytes of the results that are kept. It leaves 1/500 of the limit. None: not
        even the fewest fit."""
        held, tried = self._held, self._tried
        guess = fewest
        for turn in count(1):
            found = tried.get(guess) or self._made(
                {op for group in self._order[:guess] for op in group}
            )
            tried[guess] = found
            if guess == fewest and found[1] > limit_bytes:
                return None
            fitting = [one for one, (_, peak) in tried.items() if peak <= limit_bytes]
            least = max(fitting)
            above = min((one for one in tried if one > least), default=None)
            most = len(self._order) if above is None else above - 1
            if least >= most or held[most] - held[least] <= limit_bytes // 500:
                self._count = max(self._count, least)
                return tried[least][0]
            peak = tried[least][1]
            grown, by = peak - self.none_kept[1], held[least]
            if above is not None:
                grown, by = tried[above][1] - peak, held[above] - held[least]
            # Every third step halves: no order needs more than its logarithm.
            room = (limit_bytes - peak) * by // grown if grown > 0 and by else limit_bytes - peak
            guess = bisect_right(held, held[least] + room) - 1 if turn % 3 else (least + most) // 2
            guess = min(max(guess, least + 1), most)
        raise AssertionError
