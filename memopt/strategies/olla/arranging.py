"""`memopt.plan(..., order=True, place=True)`: both passes over another strategy's program."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from memopt.errors import InvalidProgramError
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.placed import arena_use
from memopt.models.program import Compute, Free, Instruction, Program, SwapIn
from memopt.models.replay import replay
from memopt.models.steps import ChainStep
from memopt.models.validate import validate
from memopt.strategies.base import Solution
from memopt.strategies.olla.buffers import Placement
from memopt.strategies.olla.passes import order_program, place_program, placing_figures
from memopt.strategies.olla.shorten import shortened

ENOUGH_GAP = 0.01
"""Of an arena to its bound: no reason to move transfers."""


def arrange(
    graph: Graph,
    program: Program,
    budget_bytes: int | None,
    device: Device,
    *,
    order: bool,
    place: bool,
    time_limit_s: float | None = None,
) -> tuple[Program, dict[str, object]]:
    """Reorder, then place, what a strategy planned (OLLA §1).

    Args:
        graph: the cost model of the program.
        program: valid, and within the budget.
        budget_bytes: kept: lifetimes whose addresses would need more, with all that lies outside
            the arena, are left to the allocator; stats say how much that is. None: everything
            that can be is placed.
        device: link rates; no order is taken that waits longer for transfers.
        order: look for an order of smaller peak.
        place: give every lifetime an address.
        time_limit_s: wall clock, for each of the two.

    Returns:
        The program, never worse in peak or time, and what the passes say about themselves.

    Raises:
        InvalidProgramError: a pass broke the program, which is a bug.
    """
    stats: dict[str, object] = {"pass_order": order, "pass_place": place}
    if order:
        before_bytes = replay(graph, program).peak_bytes
        program, ordering = order_program(graph, program, device=device, time_limit_s=time_limit_s)
        if ordering.stats["interrupted"]:
            time_limit_s = 0.0
        stats |= {
            "peak_before_order_bytes": before_bytes,
            "order_bound_bytes": ordering.bound,
            "order_gap": ordering.gap,
        }
        _check(graph, program, budget_bytes, "reordered")
    if place:
        program, placement, short = _placed(graph, program, budget_bytes, device, time_limit_s)
        _check(graph, program, budget_bytes, "placed")
        stats |= placing_figures(graph, program, placement)
        stats |= {
            "arena_gap": placement.gap,
            "placed": program.offsets is not None,
            "shortened": short,
        }
    return program, stats


def _placed(
    graph: Graph,
    program: Program,
    budget_bytes: int | None,
    device: Device,
    time_limit_s: float | None,
) -> tuple[Program, Placement, bool]:
    """The program at addresses, and whether its lifetimes were shortened for that: where addresses
    cost much or not all fit, if then more fits or the arena is smaller.

    A fetch that comes as late as the link allows has no time to spare if the link is slower than
    the device says. So the transfers stay where the strategy had them if that is good enough.
    """
    began_s = time.monotonic()
    placed, placement = place_program(
        graph, program, limit_bytes=budget_bytes, time_limit_s=time_limit_s
    )
    if budget_bytes is None:
        enough = placement.gap <= ENOUGH_GAP
    else:
        enough = placed.offsets is not None and not placed.apart
    if time_limit_s is not None:
        time_limit_s -= time.monotonic() - began_s
        enough = enough or time_limit_s <= 0
    if enough or placement.stats["interrupted"]:
        return placed, placement, False
    short = shortened(graph, program, device)
    if _moves(short) == _moves(program):
        return placed, placement, False
    other, its_placement = place_program(
        graph, short, limit_bytes=budget_bytes, time_limit_s=time_limit_s
    )
    own = _covered_bytes(graph, placed), -placement.peak
    if (_covered_bytes(graph, other), -its_placement.peak) > own:
        return other, its_placement, True
    return placed, placement, False


def _covered_bytes(graph: Graph, placed: Program) -> int:
    use = arena_use(graph, placed)
    return 0 if use is None else use.covered_bytes


def _moves(program: Program) -> list[tuple[int, Instruction]]:
    """Frees and fetches, each with how many computations come before it."""
    found: list[tuple[int, Instruction]] = []
    computed = 0
    for instruction in program:
        computed += isinstance(instruction, Compute)
        if isinstance(instruction, Free | SwapIn):
            found.append((computed, instruction))
    return found


def arranged(
    graph: Graph,
    solution: Solution,
    lower: Callable[[tuple[ChainStep, ...]], Program] | None,
    budget_bytes: int | None,
    device: Device,
    passes: Mapping[str, bool],
    time_limit_s: float | None,
) -> Solution:
    """A strategy's solution with its program (`lower` makes that of a chain's steps) arranged;
    `passes` are the `order` and `place` of `arrange`, which see."""
    program = solution.program
    if lower is not None and solution.steps is not None:
        program = lower(solution.steps)
    assert program is not None
    program, stats = arrange(
        graph,
        program,
        budget_bytes,
        device,
        order=passes["order"],
        place=passes["place"],
        time_limit_s=time_limit_s,
    )
    return replace(solution, program=program, stats={**solution.stats, **stats})


def _check(graph: Graph, program: Program, budget_bytes: int | None, what: str) -> None:
    violation = validate(graph, program, budget_bytes)
    if violation is not None:
        raise InvalidProgramError(f"the {what} program is invalid: {violation}")
