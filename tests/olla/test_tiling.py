"""Placements without a byte free: found, proved not to be there, and the same each time."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from benchmarks.hard_placements import hard_placement
from memopt.strategies.base import Status
from memopt.strategies.olla import Buffer, place
from memopt.strategies.olla.buffers import Layout
from memopt.strategies.olla.feasibility import solve_capacity
from memopt.strategies.olla.joined_buffers import JoinedBuffers
from memopt.strategies.olla.tiling import find_tiling, is_tiling
from tests.olla.oracles import FULL_SECTIONS, overlap

EASY = (0, 1, 3, 5, 8, 14, 19)
"""Seeds of the benchmark whose tilings are found soon."""
LONGER = (0, 1, 3, 8)
"""Those of them that take ten seconds or more."""


DENSE = (2004, 2024, 2132, 2134)
"""Seeds with dozens of buffers in every section, which joins without repair did not solve in 3 s
of CPU time."""


@pytest.mark.parametrize(
    "seed", [pytest.param(s, marks=pytest.mark.slow) if s in LONGER else s for s in EASY]
)
def test_hard_placements_end_at_the_bound(seed: int) -> None:
    chosen, buffers = hard_placement(seed)
    placement = place(buffers)
    assert placement.status is Status.OPTIMAL
    assert placement.peak == chosen.units * chosen.unit_bytes
    assert placement.stats["method"] == "tiling"
    assert overlap(buffers, dict(placement.offsets)) is None


@pytest.mark.parametrize("seed", DENSE)
def test_dense_ones_are_joined_within_few_nodes(seed: int) -> None:
    layout = Layout(hard_placement(seed)[1])
    outcome = find_tiling(layout, seed=0, node_limit=60_000)
    assert outcome.offsets is not None
    named = {b.id: int(x) for b, x in zip(layout.buffers, outcome.offsets, strict=True)}
    assert overlap(layout.buffers, named) is None
    assert max(named[b.id] + b.size for b in layout.buffers) == layout.bound


def test_search_for_joins_leaves_fewer_pieces() -> None:
    layout = Layout(hard_placement(2079)[1])
    joined = JoinedBuffers(layout.size, layout.first, layout.last, np.random.default_rng(0))
    before = len(joined.pieces())
    joined.improve(200_000)
    assert len(joined.pieces()) < before // 2


def filled_up(rng: Random) -> list[Buffer]:
    """Random buffers of few sections, the first that fit, until all sections are full."""
    sections, full = 6, 6
    room = [full] * sections
    lives: list[tuple[int, int, int]] = []
    while any(room):
        first = rng.choice([k for k, free in enumerate(room) if free])
        last = min(sections, first + rng.choice((1, 2, 2, 3, 4)))
        size = min(rng.randint(1, 3), room[first])
        while min(room[first:last]) < size:
            last -= 1
        lives.append((first, last, size))
        room[first:last] = [free - size for free in room[first:last]]
    return [Buffer(str(k), *life) for k, life in enumerate(lives)]


def test_agrees_with_cp_sat_on_small_ones() -> None:
    rng = Random(5)
    found = 0
    for _ in range(60):
        buffers = filled_up(rng)
        layout = Layout(buffers)
        if not is_tiling(layout):
            continue
        outcome = find_tiling(layout, seed=1, node_limit=100_000)
        there = solve_capacity(layout, layout.bound)[0] is Status.OPTIMAL
        found += there
        assert outcome.infeasible != there
        assert (outcome.offsets is not None) == there
        if outcome.offsets is not None:
            named = {b.id: int(x) for b, x in zip(buffers, outcome.offsets, strict=True)}
            assert overlap(buffers, named) is None
            assert max(named[b.id] + b.size for b in buffers) == layout.bound
    assert found > 30


def test_proves_that_six_full_sections_have_no_tiling() -> None:
    lives = [*FULL_SECTIONS]
    rng = Random(6)
    for unit in (1, 7, 512):
        for backwards in (False, True):
            rng.shuffle(lives)
            spans = [(6 - b, 6 - a, x) if backwards else (a, b, x) for a, b, x in lives]
            buffers = [Buffer(str(k), a, b, x * unit) for k, (a, b, x) in enumerate(spans)]
            layout = Layout(buffers)
            assert is_tiling(layout)
            assert find_tiling(layout, seed=unit, node_limit=100_000).infeasible
            placement = place(buffers)
            assert placement.bound == placement.peak == 7 * unit


def test_the_same_seed_gives_the_same_placement() -> None:
    buffers = hard_placement(4)[1]
    assert place(buffers, seed=3).offsets == place(buffers, seed=3).offsets


def test_a_node_limit_ends_it() -> None:
    outcome = find_tiling(Layout(hard_placement(10)[1]), seed=0, node_limit=2000)
    assert outcome.offsets is None
    assert not outcome.infeasible
    assert outcome.nodes <= 2000


def test_joined_pieces_are_full_rectangles() -> None:
    for seed in EASY:
        layout = Layout(hard_placement(seed)[1])
        columns = layout.size, layout.first, layout.last
        joined = JoinedBuffers(*columns, np.random.default_rng(seed))
        joined.improve(20_000)
        pieces = joined.pieces()
        assert len(pieces) < len(layout)
        assert sorted(b for piece in pieces for b, _ in piece.parts) == list(range(len(layout)))
        for piece in pieces:
            inside = [layout.buffers[b] for b, _ in piece.parts]
            offsets = {layout.buffers[b].id: offset for b, offset in piece.parts}
            assert overlap(inside, offsets) is None
            area = sum(
                int(layout.size[b] * (layout.last - layout.first)[b]) for b, _ in piece.parts
            )
            assert area == piece.size * (piece.last - piece.first)
            assert max(offsets[b.id] + b.size for b in inside) == piece.size
