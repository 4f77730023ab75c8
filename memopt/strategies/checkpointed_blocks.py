"""A candidate for steps with collectives: every block checkpointed, its collectives prefetched.

Strategies plan as if each collective were waited for, so gathering a weight again seems to cost its
whole time. Where the network is hidden behind computation it costs none, and FSDP2's schedule with
checkpointed blocks may be faster than theirs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate, count

from memopt.models.bounds import time_lower_bound
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.last_of import LastOf
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
    planned: Program | None,
    prefetched: Callable[[], Program | None],
    budget_bytes: int,
    device: Device | None,
    view: object = None,
) -> Solution:
    """Return a strategy's solution, or the step with checkpointed blocks if that is faster, or the
    only one that fits.

    Args:
        graph: with collectives.
        solution: of a strategy that recomputes, within the budget, or without a plan.
        planned: the solution's program; None without a plan.
        prefetched: makes that program with its collectives early, as it runs. That takes long, and
            is not done where the program computes for longer than another step takes.
        budget_bytes: of the device, total.
        device: link rates.
        view: of the graph; a caller that plans with one view at several budgets has each step with
            checkpointed blocks made once. None: the graph.

    Returns:
        The solution; or another one, whose program is to run as it is.
    """
    if graph.movable:
        return solution
    planned_s = math.inf if planned is None else replay(graph, planned, device).time_s
    steps = _STEPS.of(
        (graph if view is None else view,), device, lambda: _CheckpointedSteps(graph, device)
    )
    search = _CheckpointSearch(steps, budget_bytes, planned_s)
    best, least_s = search.best(), search.least_s
    if best is None:
        return solution
    if planned is not None and _compute_s(graph, planned) < least_s:
        own = prefetched()
        if own is not None and replay(graph, own, device).time_s <= least_s:
            return solution
    checkpointed_step, peak_bytes = best
    bound_s = solution.lower_bound_s if solution.plans else None
    bound_s = min(least_s, time_lower_bound(graph) if bound_s is None else bound_s)
    found = replace(
        solution,
        steps=None,
        smallest=None,
        smallest_budget_bytes=None,
        program=checkpointed_step,
        peak_bytes=peak_bytes,
        time_s=least_s,
        stats={**solution.stats, "schedule": "checkpointed blocks"},
    )
    return found.bounded(bound_s, False)


class _CheckpointedSteps:
    """A graph's steps with checkpointed blocks, each made once."""

    def __init__(self, graph: Graph, device: Device | None) -> None:
        self.graph, self.device = graph, device
        self.blocks = forward_of_blocks(graph)
        self.room_bytes = largest_sent_bytes(graph)
        self.orders: tuple[_KeptOrder, ...] = ()
        if len(self.blocks) < 2:
            return
        self.none_kept = self._step(())
        orders: list[Sequence[Sequence[int]]] = [
            by_worth(graph, self.blocks, collectives) for collectives in (False, True)
        ]
        orders.append(list(self.blocks.values())[::-1])
        self.orders = tuple(
            _KeptOrder(graph, order, self._step, self.none_kept) for order in orders
        )

    def _step(self, kept: Sequence[Sequence[int]]) -> tuple[Program, int]:
        held = {op for group in kept for op in group}
        program = with_in_place(self.graph, checkpointed(self.graph, self.blocks, held))
        return program, replay(self.graph, program, self.device).peak_bytes


_STEPS = LastOf[_CheckpointedSteps]()


class _CheckpointSearch:
    """Looks for steps with checkpointed blocks that take less than `least_s`."""

    def __init__(self, steps: _CheckpointedSteps, budget_bytes: int, least_s: float) -> None:
        self.least_s = least_s
        self._steps, self._budget_bytes = steps, budget_bytes
        self._graph, self._device = steps.graph, steps.device
        self._best: tuple[Program, int] | None = None

    def best(self) -> tuple[Program, int] | None:
        """Return the fastest step and its peak bytes: with all blocks checkpointed, and room for
        one to prefetch; or, beside that prefetch or a quarter of it, with as many results kept in
        all blocks as fit, most time saved per byte first (selective checkpointing), or with as many
        of the last blocks not checkpointed as fit."""
        steps = self._steps
        if not steps.orders or steps.none_kept[1] > self._budget_bytes:
            return None
        before: tuple[_KeptOrder, int] | None = None
        for order in steps.orders:
            if before is None or not order.begins_as(*before):
                before = order, self._order(order)
        self._offer(
            steps.none_kept[0], min(self._budget_bytes, steps.none_kept[1] + steps.room_bytes)
        )
        return self._best

    def _order(self, order: _KeptOrder) -> int:
        """Offer the steps of an order; return the most groups that one of them keeps."""
        none_kept_s, most = _compute_s(self._graph, self._steps.none_kept[0]), 0
        for free_bytes in (self._steps.room_bytes // 4, self._steps.room_bytes):
            fewest = order.saving(none_kept_s - self.least_s)
            if fewest is None:
                break
            number = order.most(self._budget_bytes - free_bytes, fewest)
            most = max(most, number or 0)
            plain = None if number is None else order.step(number)[0]
            # Where the network is hidden, keeping less is slower.
            if self._offer(plain, self._budget_bytes):
                break
        return most

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


class _KeptOrder:
    """Finds how many leading groups of an order of operators a step can keep within a limit."""

    def __init__(
        self,
        graph: Graph,
        order: Sequence[Sequence[int]],
        made: Callable[[Sequence[Sequence[int]]], tuple[Program, int]],
        none_kept: tuple[Program, int],
    ) -> None:
        groups = [[graph.operators[op] for op in group] for group in order]
        sizes = [sum(graph.tensors[t].size_bytes for x in one for t in x.writes) for one in groups]
        times = [sum(x.time_s for x in one if x.collective is None) for one in groups]
        self._order, self._made = order, made
        self._held, self._saved_s = [0, *accumulate(sizes)], [0.0, *accumulate(times)]
        self._tried = {0: none_kept}

    def begins_as(self, other: _KeptOrder, kept: int) -> bool:
        """Whether this order keeps what another one was found to keep."""
        return self._order[: kept + 1] == other._order[: kept + 1]

    def saving(self, time_s: float) -> int | None:
        """Return how many kept groups save at least this time; None if all of them save less."""
        number = bisect_left(self._saved_s, time_s)
        return number if number < len(self._saved_s) else None

    def step(self, number: int) -> tuple[Program, int]:
        """Return the step that keeps so many groups, and its peak bytes."""
        if number not in self._tried:
            self._tried[number] = self._made(self._order[:number])
        return self._tried[number]

    def most(self, limit_bytes: int, fewest: int) -> int | None:
        """Return the most groups found to fit, by secants: memory is nearly affine in the bytes of
        the results that are kept. That leaves 1/500 of the limit, or less than the next group takes
        by a secant over 1/20 of it. None: not even the fewest fit."""
        held, tried = self._held, self._tried
        most_tried = max((n for n, (_, peak) in tried.items() if peak <= limit_bytes), default=-1)
        if most_tried < fewest and self.step(fewest)[1] > limit_bytes:
            return None
        for turn in count(1):
            least = max(one for one, (_, peak) in tried.items() if peak <= limit_bytes)
            above = min((one for one in tried if one > least), default=None)
            most = len(self._order) if above is None else above - 1
            if least >= most or held[most] - held[least] <= limit_bytes // 500:
                return least
            peak = tried[least][1]
            grown, by = peak - tried[0][1], held[least]
            if above is not None:
                grown, by = tried[above][1] - peak, held[above] - held[least]
            # Every third step halves: no order needs more than its logarithm.
            room = (limit_bytes - peak) * by // grown if grown > 0 and by else limit_bytes - peak
            near = above is not None and by <= limit_bytes // 20
            if near and room < held[least + 1] - held[least]:
                return least
            guess = bisect_right(held, held[least] + room) - 1 if turn % 3 else (least + most) // 2
            self.step(min(max(guess, least + 1), most))
        raise AssertionError
