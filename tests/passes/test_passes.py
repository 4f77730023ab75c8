"""Order and placement of arbitrary programs: recomputed, swapped, with implementations."""

from __future__ import annotations

from random import Random

import pytest

from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.models.variants import variant
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, LossBoundary, Program, SwapIn, SwapOut
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import memory_use, validate
from memopt.strategies.olla import Olla, order_program, place_program, program_buffers
from tests.models.training_graphs import drawing, overwriting
from tests.random_programs import random_program


def programs(count: int, seed: int) -> list[tuple[Graph, Program]]:
    rng = Random(seed)
    found = []
    for _ in range(count):
        graph = random_graph(
            rng, rng.randint(1, 7), updates=rng.random() < 0.5, implementations=True
        )
        program = random_program(
            rng,
            graph,
            recomputations=rng.randint(0, 4),
            swaps=rng.randint(0, 3),
            reorder=rng.random() < 0.5,
        )
        assert validate(graph, program) is None
        found.append((graph, program))
    return found


def sources(graph: Graph, program: Program) -> list[tuple[object, ...]]:
    """What each instruction reads: for every Compute and transfer, which instance (the how-many-th
    appearance) of which tensor. Independent of the order of instructions."""
    appearances: dict[int, int] = {}
    listed: list[tuple[object, ...]] = []
    for instruction in program:
        if isinstance(instruction, Compute):
            operator = graph.operators[instruction.op]
            chosen = variant(operator, instruction.implementation)
            reads = tuple((t, appearances.get(t, 0)) for t in chosen.reads)
            for tensor in instruction.outputs:
                appearances[tensor] = appearances.get(tensor, 0) + 1
            writes = tuple((t, appearances[t]) for t in instruction.outputs)
            listed.append((instruction, reads, writes))
        elif isinstance(instruction, LossBoundary):
            appearances |= dict.fromkeys(graph.tangents, 1)
        elif isinstance(instruction, SwapIn):
            appearances[instruction.tensor] = appearances.get(instruction.tensor, 0) + 1
            listed.append((instruction, appearances[instruction.tensor]))
        elif isinstance(instruction, SwapOut):
            listed.append((instruction, appearances[instruction.tensor]))
    return sorted(listed, key=repr)


def check_order(graph: Graph, program: Program) -> bool:
    ordered, ordering = order_program(graph, program)
    assert validate(graph, ordered) is None
    assert replay(graph, ordered).peak_bytes == ordering.peak
    assert ordering.bound <= ordering.peak <= replay(graph, program).peak_bytes
    assert sources(graph, ordered) == sources(graph, program)
    return ordering.status is Status.OPTIMAL


def test_reordering_keeps_what_feeds_what() -> None:
    proved = [check_order(graph, program) for graph, program in programs(120, 1)]
    assert sum(proved) >= 110


def test_first_draws_stay_in_order() -> None:
    """Also where the first run keeps nothing, so that no tensor ties it to the later ones."""
    rng = Random(7)
    moved = 0
    for _ in range(120):
        graph = drawing(rng, random_graph(rng, rng.randint(2, 7), updates=rng.random() < 0.5))
        program = random_program(rng, graph, recomputations=rng.randint(0, 6), reorder=True)
        check_order(graph, program)
        ordered, _ = order_program(graph, program)
        moved += [x for x in ordered if isinstance(x, Compute)] != [
            x for x in program if isinstance(x, Compute)
        ]
    assert moved > 30


def test_what_is_computed_in_place_stays_so_in_a_better_order() -> None:
    rng = Random(8)
    proved = overwritten = 0
    for _ in range(120):
        graph = overwriting(rng, random_graph(rng, rng.randint(3, 8), updates=rng.random() < 0.5))
        program = with_in_place(
            graph,
            random_program(
                rng, graph, recomputations=rng.randint(0, 3), swaps=rng.randint(0, 2), reorder=True
            ),
        )
        proved += check_order(graph, program)
        overwritten += any(isinstance(x, Compute) and x.in_place is not None for x in program)
    assert proved >= 110
    assert overwritten > 30


def test_reordering_never_waits_longer_for_transfers() -> None:
    device = Device(to_host_bytes_per_s=2.0, transfer_latency_s=0.1)
    for graph, program in programs(60, 2):
        ordered, _ = order_program(graph, program, device=device)
        before, after = replay(graph, program, device), replay(graph, ordered, device)
        assert after.time_s <= before.time_s * (1 + 1e-9)
        assert after.peak_bytes <= before.peak_bytes


@pytest.mark.parametrize("alignment", [1, 4])
def test_placed_programs_are_valid(alignment: int) -> None:
    for graph, program in programs(80, 3):
        placed, placement = place_program(graph, program, alignment=alignment)
        assert validate(graph, placed) is None
        timeline = replay(graph, placed)
        assert timeline.arena_bytes is not None
        assert placement.bound <= placement.peak
        assert timeline.arena_bytes <= placement.peak
        assert all(offset % alignment == 0 for _, _, offset in placed.offsets or ())
        kept_out, _ = place_program(graph, program, place_results=False)
        assert validate(graph, kept_out) is None


def test_the_arena_is_what_is_live() -> None:
    for graph, program in programs(60, 4):
        # Everything but tangents and workspace is placed: the arena's bound is what those leave.
        placed, placement = place_program(graph, program)
        use = memory_use(graph, placed)
        inside = [a - b for a, b in zip(use.during, use.outside, strict=True)]
        assert placement.bound >= max(inside, default=0)
        assert placement.status in (Status.OPTIMAL, Status.FEASIBLE)


def test_lifetimes_of_recomputed_tensors_are_buffers_of_their_own() -> None:
    split = 0
    for graph, program in programs(60, 5):
        buffers = program_buffers(graph, program)
        tensors = [buffer.id.split(":")[1] for buffer in buffers]
        split += len(tensors) > len(set(tensors))
        assert len({buffer.id for buffer in buffers}) == len(buffers)
    assert split > 10


@pytest.mark.parametrize("order", [True, False])
@pytest.mark.parametrize("place", [True, False])
def test_strategy(order: bool, place: bool) -> None:
    rng = Random(6)
    for _ in range(25):
        graph = random_graph(rng, rng.randint(1, 6), updates=rng.random() < 0.5)
        solution = Olla(order=order, place=place).solve(graph, None)
        assert solution.program is not None
        assert solution.peak_bytes is not None
        assert validate(graph, solution.program, Budget(solution.peak_bytes)) is None
        timeline = replay(graph, solution.program)
        expected = timeline.placed_peak_bytes if place else timeline.peak_bytes
        assert solution.peak_bytes == expected
        assert timeline.peak_bytes <= replay(graph, store_all(graph)).peak_bytes
        assert solution.time_s == solution.lower_bound_s
        again = Olla(order=order, place=place).solve(graph, None)
        assert again.program == solution.program
        tight = Olla(order=order, place=place).solve(graph, timeline.peak_bytes - 1)
        assert tight.program is None
        assert tight.status in (Status.INFEASIBLE, Status.UNKNOWN)
        assert tight.smallest_budget_bytes is not None
        exact = Olla(order=order, place=place).solve(graph, tight.smallest_budget_bytes)
        assert exact.program is not None
        assert validate(graph, exact.program, Budget(tight.smallest_budget_bytes)) is None


def test_progress_may_interrupt() -> None:
    graph = random_graph(Random(8), 12, updates=True)

    def stop(_fraction: float, _what: str) -> None:
        raise KeyboardInterrupt

    solution = Olla().solve(graph, None, progress=stop)
    assert solution.program is not None
    assert validate(graph, solution.program, Budget(solution.peak_bytes)) is None


def test_bad_parameters_are_refused() -> None:
    with pytest.raises(ValueError, match="alignment"):
        Olla(alignment=0)
    with pytest.raises(ValueError, match="num_workers"):
        Olla(num_workers=0)


@pytest.mark.slow
def test_many_programs() -> None:
    gaps = []
    for graph, program in programs(1500, 99):
        check_order(graph, program)
        placed, placement = place_program(graph, program)
        assert validate(graph, placed) is None
        gaps.append(placement.gap)
    assert sum(gap == 0 for gap in gaps) >= 0.99 * len(gaps)
