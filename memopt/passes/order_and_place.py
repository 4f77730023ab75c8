"""`memopt.plan(..., order=True, place=True)`: both passes over another strategy's program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from memopt.errors import InvalidProgramError
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.models.steps import ChainStep
from memopt.passes.cp_sat import TimedSearch
from memopt.passes.passes import order_program, place_program, placing_figures
from memopt.passes.place.buffers import Placement
from memopt.passes.tighten_lifetimes import tighten_lifetimes
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Free, Instruction, Program, SwapIn
from memopt.programs.placed import arena_use
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.programs.validate import validate

ENOUGH_GAP = 0.01
"""An arena at most this far above its bound does not make transfers move."""
ROOMS = (0.99, 0.97)
"""Shares of the peak: a computation that needs more memory waits for copies to the host."""
NO_SLOWER, MOST_SLOWER = 0.0005, 0.02
"""Waits up to the first share of the step's time are always tried, above the second never."""
ORDER_ONLY = {"order": True, "place": False}
SEEDS = (1, 2)
"""Further seeds of the search for addresses, for the program with most room, if none was good."""


def order_and_place(
    graph: Graph,
    program: Program,
    budget: Budget,
    device: Device,
    *,
    order: bool,
    place: bool,
    time_limit_s: float | None = None,
) -> tuple[Program, dict[str, object]]:
    """Reorder, then place, a strategy's program (OLLA §1).

    Args:
        graph: the cost model of the program.
        program: valid, and within the budget.
        budget: kept. Lifetimes whose addresses, with all memory outside the arena, would exceed it
            are left to the allocator; stats count their bytes. Without a limit on the device, every
            lifetime that can have an address gets one.
        device: link rates; no order is taken that waits longer for transfers.
        order: look for an order of smaller peak.
        place: give every lifetime an address.
        time_limit_s: wall clock, for each of the two.

    Returns:
        The program and the passes' stats. Its peak is never worse; its time only by `MOST_SLOWER`,
        and only where `place` needs room.

    Raises:
        InvalidProgramError: a pass broke the program, which is a bug.
    """
    stats: dict[str, object] = {}
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
        _check(graph, program, budget, "reordered")
    if place:
        own_s = replay(graph, program, device).time_s
        program, placement, short = _placed(
            graph, program, budget.device_bytes, device, time_limit_s
        )
        slower = _slowdown(replay(graph, program, device).time_s, own_s)
        _check(graph, program, budget, "placed")
        stats |= placing_figures(graph, program, placement)
        stats |= {
            "arena_gap": placement.gap,
            "placed": program.offsets is not None,
            "shortened": short,
            "slower": slower,
        }
    return program, stats


def _placed(
    graph: Graph,
    program: Program,
    budget_bytes: int | None,
    device: Device,
    time_limit_s: float | None,
) -> tuple[Program, Placement, bool]:
    """Place the program; tell whether its lifetimes were tightened for that. They are tightened if
    addresses cost much or not all lifetimes fit, and it helps: more fits, or the arena is smaller.

    A fetch that comes as late as the link allows has no slack if the link is slower than the device
    says. So transfers stay where the strategy had them if that is good enough.
    """
    search = TimedSearch(time_limit_s)
    best, found, short = program, None, False
    gap = 0.0
    for attempt, seed in _attempts(graph, program, device):
        # An arena hardly larger than its bound gains nothing from another search.
        if found is not None and (search.out_of_time() or (seed and gap <= ENOUGH_GAP)):
            break
        placed, placement = place_program(
            graph, attempt, limit_bytes=budget_bytes, time_limit_s=search.left_s(), seed=seed
        )
        if found is None or _merit(graph, placed, placement) > _merit(graph, best, found):
            best, found, short = placed, placement, attempt is not program
        gap = placement.gap
        enough = gap <= ENOUGH_GAP
        if budget_bytes is not None:
            enough = placed.offsets is not None and not placed.unplaced
        if enough or placement.stats["interrupted"]:
            break
    assert found is not None
    return best, found, short


def _attempts(graph: Graph, program: Program, device: Device) -> Iterator[tuple[Program, int]]:
    """Yield programs to place until one is good enough, with the search's seed."""
    yield program, 0
    last = program
    for last in _tightened(graph, program, device):
        yield last, 0
    for seed in SEEDS:
        yield last, seed


def _tightened(graph: Graph, program: Program, device: Device) -> Iterator[Program]:
    """Yield the program with lifetimes tightened and the most room that takes no longer, then those
    with more room that take a little longer. Yield none if transfer times are unknown."""
    if not device.is_linked:
        return
    base = replay(graph, program, device)
    made = [tighten_lifetimes(graph, program, device)]
    for share in ROOMS:
        room_bytes = int(share * base.peak_bytes)
        made.append(tighten_lifetimes(graph, program, device, room_bytes=room_bytes))
    slower = [_slowdown(replay(graph, one, device).time_s, base.time_s) for one in made]
    first = max(k for k, share in enumerate(slower) if k == 0 or share <= NO_SLOWER)
    before = _moves(program)
    for one, share in zip(made[first:], slower[first:], strict=True):
        if share <= MOST_SLOWER and _moves(one) != before:
            before = _moves(one)
            yield one


def _slowdown(time_s: float, own_s: float) -> float:
    """Return how much slower a step is, as a share of its own time; 0.0 if the difference may be
    rounding."""
    return (time_s - own_s) / own_s if time_s > own_s * (1 + 1e-9) else 0.0


def _merit(graph: Graph, placed: Program, placement: Placement) -> tuple[int, int]:
    """Rank a placement: more bytes at addresses are better, then a smaller arena."""
    use = arena_use(graph, placed)
    return (0 if use is None else use.covered_bytes), -placement.peak


def _moves(program: Program) -> list[tuple[int, Instruction]]:
    """Return frees and fetches, each with the number of computations before it."""
    found: list[tuple[int, Instruction]] = []
    computed = 0
    for instruction in program:
        computed += isinstance(instruction, Compute)
        if isinstance(instruction, Free | SwapIn):
            found.append((computed, instruction))
    return found


def ordered_and_placed(
    graph: Graph,
    solution: Solution,
    lower: Callable[[tuple[ChainStep, ...]], Program] | None,
    budget: Budget,
    device: Device,
    passes: Mapping[str, bool],
    time_limit_s: float | None,
) -> Solution:
    """Order and place a solution's program. If it has no plan, try the smallest that it names,
    which may fit once it is ordered.

    Args:
        graph: the cost model of the program.
        solution: with a program, or with the steps of a chain schedule; or without a plan.
        lower: makes the program of such steps; None: the solution has a program.
        budget, device, time_limit_s: see `order_and_place`.
        passes: the `order` and `place` of `order_and_place`.
    """
    if not solution.plans:
        least = solution.smallest
        if not passes["order"] or least is None or budget.device_bytes is None:
            return solution
        # As for "min": within the budget that is named, whose plan may compute in place.
        named = replace(budget, device_bytes=solution.smallest_budget_bytes)
        found = ordered_and_placed(graph, least, lower, named, device, ORDER_ONLY, time_limit_s)
        assert found.program is not None
        peak_bytes = replay(graph, found.program).peak_bytes
        if peak_bytes > budget.device_bytes:
            return replace(solution, smallest_budget_bytes=peak_bytes, smallest=found)
        solution = replace(found, status=Status.FEASIBLE)
    program = solution.program
    if program is None and lower is not None and solution.steps is not None:
        program = lower(solution.steps)
    assert program is not None
    if budget.device_bytes is not None and replay(graph, program).peak_bytes > budget.device_bytes:
        # The program met the budget with in-place outputs.
        program = with_in_place(graph, program)
    program, stats = order_and_place(
        graph,
        program,
        budget,
        device,
        order=passes["order"],
        place=passes["place"],
        time_limit_s=time_limit_s,
    )
    status = Status.FEASIBLE if stats.get("slower") else solution.status
    return replace(solution, status=status, program=program, stats={**solution.stats, **stats})


def _check(graph: Graph, program: Program, budget: Budget, what: str) -> None:
    violation = validate(graph, program, budget)
    if violation is not None:
        raise InvalidProgramError(f"the {what} program is invalid: {violation}")
