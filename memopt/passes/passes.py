"""Order and placement as passes over any program (OLLA §1: orthogonal to other methods)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from math import lcm

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.passes.cp_sat import CpSat, Improvement
from memopt.passes.order.ordering import DEFAULT_STATES, Ordering, order_tasks
from memopt.passes.order.program_tasks import in_any_place, tasks_of
from memopt.passes.place.arena_selection import select_buffers
from memopt.passes.place.buffers import Buffer, Placement
from memopt.passes.place.placement import DEFAULT_WORK_LIMIT, place
from memopt.programs.in_place import with_in_place, without_in_place
from memopt.programs.instructions import Compute, Program
from memopt.programs.lifetimes import Storage, lifetimes, storages
from memopt.programs.placed import ALIGNMENT_BYTES
from memopt.programs.replay import replay

ATTEMPTS = 5
"""How many placements within a limit are tried, each with a smaller limit."""


def order_program(
    graph: Graph,
    program: Program,
    *,
    device: Device | None = None,
    time_limit_s: float | None = None,
    max_states: int = DEFAULT_STATES,
    cp_sat: CpSat | None = None,
    on_improvement: Improvement | None = None,
) -> tuple[Program, Ordering]:
    """Reorder a valid program for a smaller peak; every instruction runs exactly as often.

    Each Compute keeps reading the same instances of its inputs (see `tasks_of`). The result is
    never worse than the program given: in peak, and where `device` is given, in time.

    Args:
        graph: the cost model of the program.
        program: valid; its placement, if any, is dropped when the order changes.
        device: link rates, to make sure that no transfer takes longer to wait for.
        time_limit_s: wall clock.
        max_states, cp_sat, on_improvement: see `order_tasks`.

    Returns:
        The program, and the ordering with its bound over all such orders.
    """
    problem = tasks_of(graph, program)
    ordering = order_tasks(
        problem.tasks,
        time_limit_s=time_limit_s,
        max_states=max_states,
        cp_sat=cp_sat,
        on_improvement=on_improvement,
    )
    own = replay(graph, program, device)
    if ordering.peak < own.peak_bytes:
        ordered = problem.program(ordering.order)
        if device is None or replay(graph, ordered, device).time_s <= own.time_s * (1 + 1e-9):
            return ordered, ordering
    unchanged = tuple(range(len(problem.tasks)))
    return program, dataclasses.replace(ordering, order=unchanged, peak=own.peak_bytes)


def order_in_any_place(
    graph: Graph,
    program: Program,
    *,
    good_enough: int,
    time_limit_s: float | None = None,
    max_states: int = DEFAULT_STATES,
) -> tuple[Program, int]:
    """Order a program that has no in-place outputs for the smallest peak that it can have once
    outputs are computed in place wherever the order allows it.

    Returns:
        The ordered program, with the in-place outputs that its order allows, and a bound over all
        orders and all choices of in-place outputs, bytes.
    """
    problem = in_any_place(tasks_of(graph, program))
    ordering = order_tasks(
        problem.tasks, good_enough=good_enough, time_limit_s=time_limit_s, max_states=max_states
    )
    return with_in_place(graph, problem.program(ordering.order)), ordering.bound


def program_buffers(
    graph: Graph, program: Program, *, alignment: int = 1, place_results: bool = True
) -> tuple[Buffer, ...]:
    """Return one buffer for each lifetime that begins at a Compute or SwapIn, transient outputs
    too; an in-place output prolongs the buffer of the tensor that it overwrites.

    Times are instruction indices; ids are "instruction:tensor". Not placed are tangents, which come
    from outside (even if swapped), workspace, which is the kernel's own, and tensors that the graph
    lists as `allocator_owned` or that share a storage with those.

    Args:
        graph: the cost model of the program.
        program: valid.
        alignment: of every offset, bytes.
        place_results: whether outputs and gradients, which the user holds beyond the step, are
            placed too.
    """
    placeable = _placeable_storages(graph, program, never_placed(graph, place_results))
    return _buffers(graph, placeable, alignment)


def never_placed(graph: Graph, place_results: bool) -> set[int]:
    """Return the tensors that get no address."""
    return {*graph.tangents, *graph.allocator_owned, *(() if place_results else graph.kept)}


def _placeable_storages(graph: Graph, program: Program, never: set[int]) -> tuple[Storage, ...]:
    """Return the storages without tensors that get no address."""
    return tuple(
        storage
        for storage in storages(lifetimes(graph, program).device)
        if never.isdisjoint(lifetime.tensor for lifetime in storage.lifetimes)
    )


def _buffers(graph: Graph, placeable: Sequence[Storage], alignment: int) -> tuple[Buffer, ...]:
    return tuple(
        Buffer(
            storage.id,
            storage.first.begin,
            storage.end,
            graph.tensors[storage.first.tensor].size_bytes,
            alignment,
        )
        for storage in placeable
    )


def place_program(
    graph: Graph,
    program: Program,
    *,
    alignment: int = 1,
    place_results: bool = True,
    limit_bytes: int | None = None,
    time_limit_s: float | None = None,
    work_limit: int | None = DEFAULT_WORK_LIMIT,
    seed: int = 0,
    cp_sat: CpSat | None = None,
    on_improvement: Improvement | None = None,
) -> tuple[Program, Placement]:
    """Give every lifetime of a valid program an offset in one small arena.

    A graph that lists `allocator_owned` tensors comes from a captured model, which will run at the
    addresses: they are multiples of ALIGNMENT_BYTES, too.

    Args:
        graph, program, alignment, place_results: see `program_buffers`.
        limit_bytes: the most that the arena and all memory outside it may need, resident included.
            Lifetimes that would exceed it are left to the allocator (`Program.unplaced`), as few
            bytes as `select_buffers` finds. If no arena is within the limit, no offsets are
            returned. None: no limit, every lifetime gets an address.
        time_limit_s, work_limit, seed, cp_sat, on_improvement: see `place`.

    Returns:
        The program with its offsets, and the placement with its bound (of the arena alone).
    """
    alignment = alignment_of(graph, alignment)
    never = never_placed(graph, place_results)
    aim_bytes = limit_bytes
    for _ in range(ATTEMPTS):
        made, chosen = _selected(graph, program, alignment, never, aim_bytes)
        placement = place(
            _buffers(graph, chosen, alignment),
            time_limit_s=time_limit_s,
            work_limit=work_limit,
            seed=seed,
            cp_sat=cp_sat,
            on_improvement=on_improvement,
        )
        placed = with_offsets(graph, made, chosen, placement, never)
        if aim_bytes is None or limit_bytes is None:
            return placed, placement
        total_bytes = replay(graph, placed).placed_peak_bytes
        assert total_bytes is not None
        if not placed.offsets:
            break
        if total_bytes <= limit_bytes:
            return placed, placement
        # Fragmentation, which `select_buffers` does not foresee.
        aim_bytes -= total_bytes - limit_bytes
    return Program(program.instructions), placement


def alignment_of(graph: Graph, alignment: int) -> int:
    """Return the alignment of a program's addresses: of captured models a kernel's, too."""
    return lcm(alignment, ALIGNMENT_BYTES) if graph.allocator_owned else alignment


def placing_figures(graph: Graph, placed: Program, placement: Placement) -> dict[str, object]:
    """Return a plan's stats on addresses: the arena, its bound and its fragmentation, the peak with
    the memory outside, and the bytes written to lifetimes left to the allocator."""
    if placed.offsets is None:
        return {}
    return {
        "arena_bytes": placement.peak,
        "arena_bound_bytes": placement.bound,
        "fragmentation": placement.fragmentation,
        "placed_peak_bytes": replay(graph, placed).placed_peak_bytes,
        "apart_bytes": sum(graph.tensors[tensor].size_bytes for _, tensor in placed.unplaced),
    }


def _selected(
    graph: Graph, program: Program, alignment: int, never: set[int], limit_bytes: int | None
) -> tuple[Program, tuple[Storage, ...]]:
    """Return the program with the in-place outputs that placement allows, and the buffers to place.

    An in-place output that gets an address must be the one result of the operator's own kernel, and
    be kept; and the tensor that it overwrites needs an address, too. Otherwise both get storages of
    their own, which costs the output's size once more. If that exceeds the limit, the two stay
    outside the arena.
    """

    def is_odd(one: Compute) -> bool:
        own = one.outputs == graph.operators[one.op].writes[:1]
        return not own or one.implementation is not None

    def is_split(one: Compute) -> bool:
        return is_odd(one) or (one.in_place in never) != (one.outputs[0] in never)

    separate = without_in_place(program, is_split)
    if limit_bytes is None:
        return separate, _placeable_storages(graph, separate, never)
    best: tuple[Program, tuple[Storage, ...]] = program, ()
    best_bytes = 0
    for one in (separate, without_in_place(program, is_odd)):
        placeable = _placeable_storages(graph, one, never)
        found = select_buffers(graph, one, _buffers(graph, placeable, alignment), limit_bytes) or ()
        found_bytes = sum(buffer.extent for buffer in found)
        if found_bytes > best_bytes:
            ids = {buffer.id for buffer in found}
            best = one, tuple(storage for storage in placeable if storage.id in ids)
            best_bytes = found_bytes
    return best


def with_offsets(
    graph: Graph,
    program: Program,
    chosen: Sequence[Storage],
    placement: Placement,
    never: set[int],
) -> Program:
    """Return the program with the offsets of every placed lifetime; a lifetime that could be placed
    and has no offset is left to the allocator."""
    offset_of = {
        lifetime.key: placement.offsets[storage.id]
        for storage in chosen
        for lifetime in storage.lifetimes
    }
    unplaced = [
        lifetime.key
        for lifetime in lifetimes(graph, program).device
        if not lifetime.transient and lifetime.tensor not in never and lifetime.key not in offset_of
    ]
    return Program(
        program.instructions, sorted((*key, offset) for key, offset in offset_of.items()), unplaced
    )
