"""Order and placement as passes over any program (OLLA §1: orthogonal to other methods)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from math import lcm

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.variants import variant
from memopt.programs.in_place import with_in_place, without_in_place
from memopt.programs.instructions import Compute, Free, Program, SwapIn
from memopt.programs.placed import ALIGNMENT_BYTES
from memopt.programs.replay import replay
from memopt.strategies.olla.arena_selection import select_buffers
from memopt.strategies.olla.buffers import Buffer, Placement
from memopt.strategies.olla.ordering import DEFAULT_STATES, Ordering, order_tasks
from memopt.strategies.olla.placement import DEFAULT_WORK_LIMIT, place
from memopt.strategies.olla.program_tasks import in_any_place, tasks_of

ATTEMPTS = 5
"""At a placement with a limit, each for a smaller one."""

Improvement = Callable[[float, int, int], None]
"""Called with (seconds since the start, peak bytes, bound bytes)."""


def order_program(
    graph: Graph,
    program: Program,
    *,
    device: Device | None = None,
    time_limit_s: float | None = None,
    max_states: int = DEFAULT_STATES,
    on_improvement: Improvement | None = None,
) -> tuple[Program, Ordering]:
    """Reorder a valid program for a smaller peak; every instruction runs exactly as often.

    Each Compute keeps reading the same instances of its inputs (see `tasks_of`). The result is
    never worse than the program given: in peak, and where `device` is given, in time.

    Args:
        graph: the cost model of the program.
        program: valid; its placement, if any, is dropped when the order changes.
        device: link rates, to make sure that no transfer is waited for longer.
        time_limit_s: wall clock.
        max_states: see `order_tasks`.
        on_improvement: see `order_tasks`.

    Returns:
        The program, and the ordering with its bound over all such orders.
    """
    problem = tasks_of(graph, program)
    ordering = order_tasks(
        problem.tasks,
        time_limit_s=time_limit_s,
        max_states=max_states,
        on_improvement=on_improvement,
    )
    own = replay(graph, program, device)
    if ordering.peak >= own.peak_bytes:
        return program, _unchanged(ordering, own.peak_bytes, len(problem.tasks))
    ordered = problem.program(ordering.order)
    if device is not None and replay(graph, ordered, device).time_s > own.time_s * (1 + 1e-9):
        return program, _unchanged(ordering, own.peak_bytes, len(problem.tasks))
    return ordered, ordering


def order_in_any_place(
    graph: Graph,
    program: Program,
    *,
    good_enough: int,
    time_limit_s: float | None = None,
    max_states: int = DEFAULT_STATES,
) -> tuple[Program, int]:
    """Order a program that computes nothing in place with a view to what another order lets it.

    Args:
        graph: the cost model of the program.
        program: valid, every output in a storage of its own.
        good_enough: bytes; an order of at most this peak ends the search.
        time_limit_s: wall clock.
        max_states: see `order_tasks`.

    Returns:
        The program in its order, in place where that allows it, and a bound over all orders and
        all choices of what is computed in place, bytes.
    """
    problem = in_any_place(tasks_of(graph, program))
    ordering = order_tasks(
        problem.tasks, good_enough=good_enough, time_limit_s=time_limit_s, max_states=max_states
    )
    return with_in_place(graph, problem.program(ordering.order)), ordering.bound


def _unchanged(ordering: Ordering, peak: int, count: int) -> Ordering:
    gap = (peak - ordering.bound) / ordering.bound if ordering.bound else 0.0
    return dataclasses.replace(ordering, order=tuple(range(count)), peak=peak, gap=gap)


def program_buffers(
    graph: Graph, program: Program, *, alignment: int = 1, place_results: bool = True
) -> tuple[Buffer, ...]:
    """One buffer for each lifetime that begins at a Compute or SwapIn, transient outputs too; what
    is computed in place prolongs the buffer of the tensor that it overwrites.

    Times are instruction indices; ids are "instruction:tensor". Tangents come from outside, and
    workspace is the kernel's own: neither is placed (nor are tangents that were swapped), nor is
    what the graph lists as `outside`, or shares a storage with that.

    Args:
        graph: the cost model of the program.
        program: valid.
        alignment: of every offset, bytes.
        place_results: whether outputs and gradients, which the user holds beyond the step, are
            placed too.
    """
    buffers: list[Buffer] = []
    open_: dict[int, tuple[int, int]] = {}
    """Live tensor → where its storage began, and as which tensor."""
    unplaced = _unplaced(graph, place_results)
    outside: set[tuple[int, int]] = set()
    """Storages that another tensor takes over which has no address."""

    def add(tensor: int, begin: int, end: int) -> None:
        if tensor not in unplaced and (begin, tensor) not in outside:
            size = graph.tensors[tensor].size_bytes
            buffers.append(Buffer(f"{begin}:{tensor}", begin, end, size, alignment))

    for position, instruction in enumerate(program):
        if isinstance(instruction, Compute):
            chosen = variant(graph.operators[instruction.op], instruction.implementation)
            for tensor in chosen.writes:
                if instruction.in_place is not None and tensor == chosen.writes[0]:
                    open_[tensor] = open_.pop(instruction.in_place)
                    if tensor in unplaced:
                        outside.add(open_[tensor])
                elif tensor in instruction.outputs:
                    open_[tensor] = (position, tensor)
                else:
                    add(tensor, position, position + 1)
        elif isinstance(instruction, SwapIn):
            open_[instruction.tensor] = (position, instruction.tensor)
        elif isinstance(instruction, Free) and instruction.tensor in open_:
            begin, first = open_.pop(instruction.tensor)
            add(first, begin, position)
    for begin, first in open_.values():
        add(first, begin, len(program))
    return tuple(sorted(buffers, key=lambda buffer: (buffer.lower, int(buffer.id.split(":")[1]))))


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
    cp_sat: bool = False,
    num_workers: int = 1,
    on_improvement: Improvement | None = None,
) -> tuple[Program, Placement]:
    """Give every lifetime of a valid program an offset in one arena, of a small extent.

    Arguments as in `program_buffers` and `place`. Where the graph lists what lies `outside`, it is
    of a captured model and will run at the addresses: they are multiples of ALIGNMENT_BYTES, too.

    Args:
        graph, program, alignment, place_results: see `program_buffers`.
        limit_bytes: the most that the arena and all that lies outside it may need, resident bytes
            included: lifetimes that would need more are left to the allocator (`Program.apart`),
            as few bytes as `select_buffers` finds. No offsets come back where no arena is within
            the limit. None: no limit, everything has an address.
        time_limit_s, work_limit, seed, cp_sat, num_workers, on_improvement: see `place`.

    Returns:
        The program with its offsets, and the placement with its bound (of the arena alone).
    """
    if graph.outside:
        alignment = lcm(alignment, ALIGNMENT_BYTES)

    def place_(limit_bytes: int | None) -> tuple[Program, Placement]:
        made, buffers = _chosen(graph, program, alignment, place_results, limit_bytes)
        placement = place(
            buffers,
            time_limit_s=time_limit_s,
            work_limit=work_limit,
            seed=seed,
            cp_sat=cp_sat,
            num_workers=num_workers,
            on_improvement=on_improvement,
        )
        offsets = _offsets(made, placement.offsets)
        apart = _apart(made, offsets, _unplaced(graph, place_results))
        return Program(made.instructions, offsets, apart), placement

    if limit_bytes is None:
        return place_(None)
    aim_bytes = limit_bytes
    for _ in range(ATTEMPTS):
        placed, placement = place_(aim_bytes)
        total_bytes = replay(graph, placed).placed_peak_bytes
        assert total_bytes is not None
        if not placed.offsets:
            break
        if total_bytes <= limit_bytes:
            return placed, placement
        # Fragmentation, which the choice does not foresee.
        aim_bytes -= total_bytes - limit_bytes
    return Program(program.instructions), placement


def placing_figures(graph: Graph, placed: Program, placement: Placement) -> dict[str, object]:
    """What a plan's stats say about its addresses: the arena, its bound and its fragmentation,
    the peak with what lies outside, and the bytes written to lifetimes left to the allocator."""
    if placed.offsets is None:
        return {}
    return {
        "arena_bytes": placement.peak,
        "arena_bound_bytes": placement.bound,
        "fragmentation": placement.fragmentation,
        "placed_peak_bytes": replay(graph, placed).placed_peak_bytes,
        "apart_bytes": sum(graph.tensors[tensor].size_bytes for _, tensor in placed.apart),
    }


def _chosen(
    graph: Graph,
    program: Program,
    alignment: int,
    place_results: bool,
    limit_bytes: int | None,
) -> tuple[Program, tuple[Buffer, ...]]:
    """The program with in-place outputs where the placement takes them, and what to place."""
    unplaced = _unplaced(graph, place_results)

    def buffers_of(one: Program) -> tuple[Buffer, ...]:
        return program_buffers(graph, one, alignment=alignment, place_results=place_results)

    separate = _placeable(graph, program, unplaced)
    if limit_bytes is None:
        return separate, buffers_of(separate)
    best: tuple[Program, tuple[Buffer, ...]] = program, ()
    # With an address for the output, a kernel works in place on nothing that has none: that
    # costs the output's size once more, which may be over the limit.
    for one in (separate, _kept(graph, program)):
        found = select_buffers(graph, one, buffers_of(one), limit_bytes) or ()
        if sum(b.extent for b in found) > sum(b.extent for b in best[1]):
            best = one, found
    return best


def _unplaced(graph: Graph, place_results: bool) -> set[int]:
    """Tensors that get no address."""
    return {*graph.tangents, *graph.outside, *(() if place_results else graph.kept)}


def _kept(graph: Graph, program: Program) -> Program:
    """The program with in-place outputs only where the operator's own kernel has that output
    alone, which is kept."""
    return without_in_place(program, lambda one: _is_odd(graph, one))


def _is_odd(graph: Graph, instruction: Compute) -> bool:
    own = instruction.outputs == graph.operators[instruction.op].writes[:1]
    return not own or instruction.implementation is not None


def _placeable(graph: Graph, program: Program, unplaced: set[int]) -> Program:
    """`_kept`, and only where both tensors are placed, or neither."""

    def apart(instruction: Compute) -> bool:
        if _is_odd(graph, instruction):
            return True
        return (instruction.in_place in unplaced) != (instruction.outputs[0] in unplaced)

    return without_in_place(program, apart)


def _apart(
    program: Program, offsets: list[tuple[int, int, int]], unplaced: set[int]
) -> list[tuple[int, int]]:
    """The lifetimes that could have an offset and have none."""
    placed = {(position, tensor) for position, tensor, _ in offsets}
    found = []
    for position, instruction in enumerate(program):
        begun = instruction.outputs if isinstance(instruction, Compute) else ()
        begun = (instruction.tensor,) if isinstance(instruction, SwapIn) else begun
        found += [(position, t) for t in begun if t not in unplaced and (position, t) not in placed]
    return found


def _offsets(program: Program, of_buffers: Mapping[str, int]) -> list[tuple[int, int, int]]:
    """(instruction, tensor, offset) of every lifetime, given those of the buffers."""
    found: dict[tuple[int, int], int] = {}
    for name, offset in of_buffers.items():
        position, tensor = map(int, name.split(":"))
        found[position, tensor] = offset
    here: dict[int, int] = {}
    for position, instruction in enumerate(program):
        if isinstance(instruction, Compute) and instruction.in_place in here:
            found[position, instruction.outputs[0]] = here.pop(instruction.in_place)
        elif isinstance(instruction, Free):
            here.pop(instruction.tensor, None)
        begun = instruction.outputs if isinstance(instruction, Compute) else ()
        begun = (instruction.tensor,) if isinstance(instruction, SwapIn) else begun
        here |= {t: found[position, t] for t in begun if (position, t) in found}
    return sorted((position, tensor, offset) for (position, tensor), offset in found.items())
