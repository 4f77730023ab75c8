"""Order and addresses of a program together (OLLA eq. 9), starting from one after the other."""

from __future__ import annotations

from dataclasses import replace

from memopt.models.graph import Graph
from memopt.passes.cp_sat import CpSat
from memopt.passes.joint_model import solve_jointly, storage_tasks
from memopt.passes.order.program_tasks import tasks_of
from memopt.passes.passes import alignment_of, never_placed, place_program, with_offsets
from memopt.passes.place.buffers import Placement
from memopt.passes.place.placement import DEFAULT_WORK_LIMIT
from memopt.passes.timed_search import Improvement, TimedSearch
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import Storage, lifetimes, storages
from memopt.programs.replay import replay


def order_and_place_together(
    graph: Graph,
    program: Program,
    how: CpSat,
    *,
    bound_bytes: int = 0,
    alignment: int = 1,
    place_results: bool = True,
    time_limit_s: float | None = None,
    work_limit: int = DEFAULT_WORK_LIMIT,
    on_improvement: Improvement | None = None,
) -> tuple[Program, int, dict[str, object]]:
    """Give every lifetime an address, and reorder the program where that makes it smaller.

    Args:
        graph: the cost model of the program.
        program: valid, without transfers; its order is the first, and its in-place outputs stay.
        how: options of CP-SAT. Without a warm start the search for the first addresses is short.
        bound_bytes: known of every order's peak, resident included.
        alignment, place_results: see `place_program`.
        time_limit_s: wall clock, seconds.
        work_limit: of the search for the first addresses.
        on_improvement: called with (seconds, peak, bound) at each better one.

    Returns:
        The program with its offsets; a bound on arena and memory outside it of every order, with
        these in-place outputs, bytes; and stats: "rows" of the program, "too_large" where it was
        not made, "interrupted", "time_s".
    """
    search = TimedSearch(time_limit_s, on_improvement)
    first, placement = place_program(
        graph,
        program,
        alignment=alignment,
        place_results=place_results,
        time_limit_s=search.left_s(),
        work_limit=work_limit if how.warm_start else 0,
        seed=how.seed,
    )
    timeline = replay(graph, first)
    peak = timeline.placed_peak_bytes
    if peak is None or timeline.arena_bytes is None or peak <= bound_bytes:
        return first, min(bound_bytes, peak or bound_bytes), {}
    aligned, never = alignment_of(graph, alignment), never_placed(graph, place_results)
    problem, keyed = tasks_of(graph, first), _keyed(graph, first)
    numbers = {key: number for number, key in enumerate(keyed)}
    extents = {
        numbers[key]: -(-graph.tensors[storage.first.tensor].size_bytes // aligned) * aligned
        for key, storage in keyed.items()
        if storage.id in placement.offsets and graph.tensors[storage.first.tensor].size_bytes
    }
    start = {numbers[key]: placement.offsets.get(x.id, 0) for key, x in keyed.items()}
    known = placement.peak + peak - timeline.arena_bytes
    answer = solve_jointly(
        storage_tasks(problem, first),
        extents,
        start,
        range(bound_bytes, known),
        how,
        search,
    )
    stats: dict[str, object] = {"rows": answer.rows, "interrupted": answer.interrupted}
    stats |= {"too_large": answer.too_large, "time_s": search.elapsed_s()}
    if not answer.order:
        return first, min(answer.bound, peak), stats
    ordered = problem.program(answer.order)
    offsets = {
        storage.id: answer.addresses.get(numbers[key], 0)
        for key, storage in _keyed(graph, ordered).items()
        if keyed[key].id in placement.offsets
    }
    best = _with_addresses(graph, ordered, offsets, placement, never)
    best_bytes = replay(graph, best).placed_peak_bytes
    assert best_bytes is not None
    if best_bytes >= peak:
        best, best_bytes = first, peak
    return best, min(answer.bound, best_bytes), stats


def _with_addresses(
    graph: Graph,
    program: Program,
    offsets: dict[str, int],
    placement: Placement,
    never: set[int],
) -> Program:
    """Return the program with the offsets of its storages, by their id."""
    chosen = [x for x in storages(lifetimes(graph, program).device) if x.id in offsets]
    return with_offsets(graph, program, chosen, replace(placement, offsets=offsets), never)


def _keyed(graph: Graph, program: Program) -> dict[tuple[int, int], Storage]:
    """Return a program's storages by their first tensor and how many of that tensor's lifetimes
    begin before, which is the same in every order."""
    count: dict[int, int] = {}
    found = {}
    listed = lifetimes(graph, program).device
    firsts = {id(storage.first): storage for storage in storages(listed)}
    for lifetime in listed:
        at = count.get(lifetime.tensor, 0)
        count[lifetime.tensor] = at + 1
        if id(lifetime) in firsts:
            found[lifetime.tensor, at] = firsts[id(lifetime)]
    return dict(sorted(found.items(), key=lambda entry: entry[1].first.key))
