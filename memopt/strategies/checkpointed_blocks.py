"""A candidate for steps with collectives: every block checkpointed, its collectives prefetched.

Strategies plan as if each collective were waited for, so gathering a weight again seems to cost its
whole time. Where the network is hidden behind computation it costs none, and FSDP2's schedule with
checkpointed blocks may be faster than theirs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

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
    least_s = math.inf if own is None else replay(graph, own, device).time_s
    best: tuple[Program, int] | None = None
    for candidate in _candidates(graph, budget_bytes, device):
        timeline = replay(graph, candidate, device)
        if timeline.peak_bytes <= budget_bytes and timeline.time_s < least_s:
            best, least_s = (candidate, timeline.peak_bytes), timeline.time_s
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


def _candidates(graph: Graph, budget_bytes: int, device: Device | None) -> Iterator[Program]:
    """Yield the step with all blocks checkpointed and prefetched by one. Then, beside that prefetch
    or a quarter of it: with as many of the last blocks not checkpointed as fit; and with as many
    results kept in all blocks as fit, most time saved per byte first (selective checkpointing)."""
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
    limit_bytes = min(budget_bytes, peak_bytes + room_bytes)
    yield with_early_collectives(graph, program, limit_bytes, device)
    orders: list[Sequence[Sequence[int]]] = [list(blocks.values())[::-1]]
    orders += [by_worth(graph, blocks, collectives) for collectives in (False, True)]
    for order in orders:
        tried = {0}
        for free_bytes in (room_bytes, room_bytes // 4):
            least, most, best = 0, len(order), program
            while least < most:
                middle = (least + most + 1) // 2
                found, peak_bytes = made({op for group in order[:middle] for op in group})
                if peak_bytes + free_bytes <= budget_bytes:
                    least, best = middle, found
                else:
                    most = middle - 1
            if least not in tried:
                tried.add(least)
                yield with_early_collectives(graph, best, budget_bytes, device)
