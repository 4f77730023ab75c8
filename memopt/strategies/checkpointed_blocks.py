"""A candidate for steps with collectives: every block checkpointed, its collectives prefetched.

Strategies plan as if each collective were waited for, so gathering a weight again seems to cost its
whole time. Where the network is hidden behind computation it costs none, and FSDP2's schedule with
checkpointed blocks may be faster than theirs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate
from itertools import count as numbers
from operator import itemgetter

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


def or_checkpointed(
    graph: Graph,
    solution: Solution,
    program: Callable[[Solution], Program | None],
    budget_bytes: int,
    device: Device | None,
) -> Solution:
    """Return a strategy's solution, or the step with checkpointed blocks if that is faster.

    Args:
        graph: with collectives.
        solution: of a strategy that recomputes, within the budget.
        program: makes the program of a solution as it runs.
        budget_bytes: of the device, total.
        device: link rates.
    """
    own = program(solution)
    if own is None or graph.movable:
        return solution
    least_s = replay(graph, own, device).time_s
    best: tuple[Program, int] | None = None
    found = (
        (_compute_s(graph, plain), plain, limit)
        for plain, limit in _candidates(graph, budget_bytes, device)
    )
    for compute_s, plain, limit_bytes in sorted(found, key=itemgetter(0)):
        if compute_s >= least_s:
            break
        candidate = with_early_collectives(graph, plain, limit_bytes, device)
        timeline = replay(graph, candidate, device)
        if timeline.peak_bytes <= budget_bytes and timeline.time_s < least_s:
            best, least_s = (candidate, timeline.peak_bytes), timeline.time_s
    if best is None:
        return solution
    checkpointed_step, peak_bytes = best
    bound_s = solution.lower_bound_s
    bound_s = min(least_s, time_lower_bound(graph) if bound_s is None else bound_s)
    return replace(
        solution,
        status=Status.FEASIBLE,
        steps=None,
        program=checkpointed_step,
        peak_bytes=peak_bytes,
        time_s=least_s,
        lower_bound_s=bound_s,
        gap=relative_gap(least_s, bound_s),
        stats={**solution.stats, "schedule": "checkpointed blocks"},
    )


def _compute_s(graph: Graph, program: Program) -> float:
    """Return the seconds that the compute stream is busy: the least that a program takes."""
    operators = graph.operators
    runs = (operators[run.op] for _, run in program.computes)
    return sum(operator.time_s for operator in runs if operator.collective is None)


def _candidates(
    graph: Graph, budget_bytes: int, device: Device | None
) -> Iterator[tuple[Program, int]]:
    """Yield steps, and the bytes that they may take once collectives are prefetched: the step with
    all blocks checkpointed, and room for one to prefetch. Then, beside that prefetch or a quarter
    of it: with as many of the last blocks not checkpointed as fit; and with as many results kept
    in all blocks as fit, most time saved per byte first (selective checkpointing)."""
    blocks = forward_of_blocks(graph)
    if len(blocks) < 2:
        return
    room_bytes = largest_sent_bytes(graph)

    def made(kept: Collection[int]) -> tuple[Program, int]:
        program = with_in_place(graph, checkpointed(graph, blocks, kept))
        return program, replay(graph, program, device).peak_bytes

    program, peak_bytes = made(())
    if peak_bytes > budget_bytes:
        return
    yield program, min(budget_bytes, peak_bytes + room_bytes)
    orders: list[Sequence[Sequence[int]]] = [list(blocks.values())[::-1]]
    orders += [by_worth(graph, blocks, collectives) for collectives in (False, True)]
    before: _Kept | None = None
    for order in orders:
        kept = _Kept(graph, order, made, (program, peak_bytes))
        if before is not None and kept.begins_as(before):
            break
        before = kept
        for free_bytes in (room_bytes, room_bytes // 4):
            count = kept.count
            best = kept.most(budget_bytes - free_bytes)
            if kept.count > count:
                yield best, budget_bytes


class _Kept:
    """How many groups of an order can be kept in a limit; `count` were in the last one."""

    def __init__(
        self,
        graph: Graph,
        order: Sequence[Sequence[int]],
        made: Callable[[Collection[int]], tuple[Program, int]],
        none_kept: tuple[Program, int],
    ) -> None:
        sizes = [
            sum(graph.tensors[t].size_bytes for op in group for t in graph.operators[op].writes)
            for group in order
        ]
        self._order, self._made = order, made
        self._held = [0, *accumulate(sizes)]
        self._best, self._none_bytes, self.count = none_kept, none_kept[1], 0

    def begins_as(self, other: _Kept) -> bool:
        """Whether this order keeps what another one was found to keep."""
        return self._order[: other.count + 1] == other._order[: other.count + 1]

    def most(self, limit_bytes: int) -> Program:
        """Return the step that keeps the most groups found to fit, by secants: memory is nearly
        affine in the bytes of the results that are kept. It leaves 1/500 of the limit."""
        held, least, most = self._held, self.count, len(self._order)
        above: int | None = None
        for turn in numbers(1):
            if least == most or held[most] - held[least] <= limit_bytes // 500:
                break
            peak = self._best[1]
            grown, by = peak - self._none_bytes, held[least]
            if above is not None:
                grown, by = above - peak, held[most + 1] - held[least]
            # Every third step halves: no order needs more than its logarithm.
            room = (limit_bytes - peak) * by // grown if grown > 0 and by else limit_bytes - peak
            guess = bisect_right(held, held[least] + room) - 1 if turn % 3 else (least + most) // 2
            guess = min(max(guess, least + 1), most)
            found = self._made({op for group in self._order[:guess] for op in group})
            if found[1] <= limit_bytes:
                least, self._best = guess, found
            else:
                most, above = guess - 1, found[1]
        self.count = least
        return self._best[0]
