"""What to leave out of an arena so that a limit holds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest

import memopt
from memopt.models.budget import Budget
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.passes.place.arena_selection import select_buffers
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, Free, Program
from memopt.programs.replay import replay
from memopt.programs.serialize import dumps, loads
from memopt.programs.validate import memory_use, validate
from memopt.programs.violations import ViolationCode
from memopt.strategies.olla import Buffer, Olla, place_program, program_buffers
from tests.models.training_graphs import overwriting
from tests.random_programs import random_program


def cases(count: int, seed: int, most: int) -> list[tuple[Graph, Program]]:
    rng = Random(seed)
    found = []
    while len(found) < count:
        graph = overwriting(rng, random_graph(rng, rng.randint(2, most)))
        # Addresses of captured models are multiples of 64 bytes.
        tensors = [replace(x, size_bytes=64 * x.size_bytes) for x in graph.tensors]
        operators = [replace(x, workspace_bytes=64 * x.workspace_bytes) for x in graph.operators]
        outside = [t for op in graph.operators for t in op.writes if rng.random() < 0.3]
        graph = replace(
            graph,
            tensors=tuple(tensors),
            operators=tuple(operators),
            allocator_owned=tuple(sorted(set(outside))),
        )
        program = random_program(
            rng, graph, recomputations=rng.randint(0, 2), swaps=rng.randint(0, 2), reorder=True
        )
        found.append((graph, with_in_place(graph, program)))
    return found


def needed(graph: Graph, program: Program, buffers: Sequence[Buffer], chosen: set[str]) -> int:
    """Bytes of an arena of the chosen buffers at its bound, and all else, by summing up."""
    inside, outside = [], []
    for moment, total in enumerate(replay(graph, program).step_bytes):
        if isinstance(program.instructions[moment], Free):
            continue
        here = [b for b in buffers if b.id in chosen and b.lower <= moment < b.upper]
        inside.append(sum(b.extent for b in here))
        outside.append(total - sum(b.size for b in here))
    return max(inside) + max(outside)


def test_what_is_chosen_is_within_the_limit_and_nearly_the_most() -> None:
    rng = Random(1)
    shares = []
    for graph, program in cases(60, 2, 4):
        buffers = program_buffers(graph, program, alignment=rng.choice((1, 4)))
        if not 1 <= len(buffers) <= 9:
            continue
        everything = needed(graph, program, buffers, {b.id for b in buffers})
        peak = replay(graph, program).peak_bytes
        limit = rng.randint(peak, max(peak, everything))
        found = select_buffers(graph, program, buffers, limit)
        assert found is not None
        assert needed(graph, program, buffers, {b.id for b in found}) <= limit
        best = max(
            sum(b.extent for b in some)
            for k in range(len(buffers) + 1)
            for some in itertools.combinations(buffers, k)
            if needed(graph, program, buffers, {b.id for b in some}) <= limit
        )
        if best:
            shares.append(sum(b.extent for b in found) / best)
        assert select_buffers(graph, program, buffers, everything) == buffers
        assert select_buffers(graph, program, buffers, peak - 1) is None
    assert len(shares) > 20
    assert np.mean(shares) > 0.9


@pytest.mark.parametrize("slack", [0.0, 0.05])
def test_placed_programs_keep_their_limit(slack: float) -> None:
    apart = joined = 0
    for graph, program in cases(60, 3, 8):
        peak = replay(graph, program).peak_bytes
        limit = peak + int(slack * (peak - graph.resident_bytes))
        placed, _ = place_program(graph, program, limit_bytes=limit)
        assert validate(graph, placed, Budget(limit)) is None
        timeline = replay(graph, placed)
        if placed.offsets is None:
            assert placed == program
            continue
        assert timeline.placed_peak_bytes is not None
        assert timeline.placed_peak_bytes <= limit
        assert timeline.placed_peak_bytes - (timeline.arena_bytes or 0) == max(
            memory_use(graph, placed).outside
        )
        assert loads(dumps(placed)) == placed
        apart += bool(placed.unplaced)
        joined += any(
            isinstance(x, Compute)
            and x.in_place in graph.allocator_owned
            and x.outputs[0] not in graph.allocator_owned
            for x in placed
        )
    assert apart > 10
    assert joined > 0


def test_a_lifetime_is_placed_or_named_apart() -> None:
    seen = 0
    for graph, program in cases(40, 4, 8):
        placed, _ = place_program(graph, program, limit_bytes=replay(graph, program).peak_bytes)
        # Results may be without an offset in any case.
        named = [x for x in placed.unplaced if x[1] not in graph.kept]
        if placed.offsets is None or not named:
            continue
        seen += 1
        first = named[0]
        for apart, code in (
            ([x for x in placed.unplaced if x != first], ViolationCode.OFFSET_MISSING),
            ((*placed.unplaced, placed.offsets[0][:2]), ViolationCode.OFFSET_STRAY),
            ((*placed.unplaced, (len(placed), first[1])), ViolationCode.OFFSET_STRAY),
        ):
            violation = validate(graph, Program(placed.instructions, placed.offsets, apart))
            assert violation is not None
            assert violation.code is code
    assert seen > 5


def test_olla_places_within_its_cost_and_its_budget() -> None:
    left_out = partly = 0
    for graph, _ in cases(40, 5, 8):
        free = Olla(place=False).solve(graph, None)
        placed = Olla().solve(graph, None)
        whole = Olla(arena_cost=None).solve(graph, None)
        tight = Olla(arena_cost=None).solve(graph, free.peak_bytes)
        assert free.peak_bytes is not None
        moving = free.peak_bytes - graph.resident_bytes
        for solution, limit in (
            (placed, free.peak_bytes + 0.02 * moving),
            (tight, free.peak_bytes),
        ):
            assert solution.program is not None
            assert solution.peak_bytes is not None
            assert solution.peak_bytes <= limit
            assert validate(graph, solution.program, Budget(int(limit))) is None
        assert whole.program is not None
        assert whole.program.offsets
        assert whole.program.unplaced == ()
        assert tight.program is not None
        left_out += tight.program.offsets is None
        partly += bool(tight.program.unplaced)
    assert left_out > 0
    assert partly > 0


def test_the_summary_says_what_has_no_address() -> None:
    said = {"none": 0, "left": 0, "all": 0}
    for graph, _ in cases(40, 6, 8):
        plan = memopt.plan(graph, strategy=Olla(arena_cost=0.1), progress=False)
        assert plan.program is not None
        text = " ".join(plan.summary().split())
        if plan.program.offsets is None:
            said["none"] += 1
            assert "arena none: beside what lies outside" in text
        else:
            said["left" if plan.program.unplaced else "all"] += 1
            assert "with what lies outside" in text
            assert ("too dear to place" in text) == bool(plan.program.unplaced)
    assert min(said.values()) > 0


def test_a_negative_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="arena_cost"):
        Olla(arena_cost=-0.1)
