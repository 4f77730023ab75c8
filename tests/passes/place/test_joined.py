"""Placements by joined buffers: pieces are full rectangles, what is found fits, gaps are filled."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from memopt.models.status import Status
from memopt.passes.place.buffers import Layout
from memopt.passes.place.feasibility import solve_capacity
from memopt.passes.place.joined import JoinedBuffers, fillers, find_joined
from memopt.passes.place.search import Outcome, find_placement
from memopt.strategies.olla import Buffer, place
from tests.passes.oracles import FULL_SECTIONS, filled_up, overlap
from tests.passes.place.hard_placements import hard_placement

pytestmark = pytest.mark.xdist_group("address kernels")
"""In one worker: where nothing is compiled yet, two would take half a minute each for the same."""

EASY = (0, 1, 3, 5, 8, 14, 19)
"""Seeds of the benchmark whose placements are found soon."""
DENSE = (2004, 2024, 2132, 2134)
"""Seeds with dozens of buffers in every section, which joins alone did not solve in 3 s of CPU
time."""
HOLES = (3000, 3001, 3002, 3003, 3005, 3006, 3007, 3008, 3009, 3011)
"""Seeds of cut rectangles with holes that are solved soon; of twelve two are not."""
SPIRAL = [(0, 1, 3), (0, 2, 3), (1, 2, 2), (1, 3, 1), (2, 3, 5)]
"""Five buffers that no straight cut separates: (first section, end of sections, size)."""
SPLIT = [(0, 1, 1), (0, 1, 2), (0, 2, 1), (0, 2, 2), (1, 2, 2), (1, 3, 1), (2, 3, 1), (2, 3, 4)]
"""The same with stacks of two for three of them."""


def of_lives(lives: Sequence[tuple[int, int, int]]) -> list[Buffer]:
    return [Buffer(str(k), *life) for k, life in enumerate(lives)]


def with_holes(seed: int, kept: float) -> tuple[int, list[Buffer]]:
    """A cut rectangle without some of its pieces: its height, and the buffers that are left."""
    chosen, buffers = hard_placement(seed)
    rng = Random(seed)
    return chosen.units * chosen.unit_bytes, [b for b in buffers if rng.random() < kept]


def joined(layout: Layout, seed: int) -> JoinedBuffers:
    rng = np.random.default_rng(seed)
    return JoinedBuffers(layout.first, layout.last, layout.size, rng)


def assert_fits(layout: Layout, outcome: Outcome, capacity: int) -> None:
    assert outcome.offsets is not None
    assert bool((outcome.offsets % layout.alignment == 0).all())
    named = {b.id: int(x) for b, x in zip(layout.buffers, outcome.offsets, strict=True)}
    assert overlap(layout.buffers, named) is None
    assert max(named[b.id] + b.extent for b in layout.buffers) <= capacity


@pytest.mark.parametrize("seed", EASY)
def test_hard_placements_end_at_the_bound(seed: int) -> None:
    chosen, buffers = hard_placement(seed)
    placement = place(buffers)
    assert placement.status is Status.OPTIMAL
    assert placement.peak == chosen.units * chosen.unit_bytes
    assert placement.stats["method"] in ("search", "joined")
    assert overlap(buffers, dict(placement.offsets)) is None


@pytest.mark.parametrize("seed", DENSE)
def test_dense_ones_are_found_by_better_joins(seed: int) -> None:
    layout = Layout(hard_placement(seed)[1])
    outcome = find_joined(layout, layout.bound, work_limit=400_000_000)
    assert_fits(layout, outcome, layout.bound)


@pytest.mark.parametrize("seed", HOLES)
def test_a_rectangle_with_holes_fits_into_its_height(seed: int) -> None:
    height, buffers = with_holes(seed, 0.93)
    placement = place(buffers, height)
    assert placement.peak <= height
    assert overlap(buffers, dict(placement.offsets)) is None


@pytest.mark.parametrize("seed", range(20))
def test_fillers_leave_no_byte_free(seed: int) -> None:
    height, buffers = with_holes(seed, 0.8)
    layout = Layout(buffers)
    for rng in (None, np.random.default_rng(seed)):
        added = fillers(layout, height, rng)
        assert all(first < last and size > 0 for first, last, size in added)
        full = layout.section_bytes.copy()
        for first, last, size in added:
            full[first:last] += size
        assert (full == height).all()
    assert fillers(Layout(hard_placement(seed)[1]), height) == []


def test_a_single_hole_is_what_is_missing() -> None:
    rest = Layout(of_lives([life for life in SPIRAL if life != (1, 2, 2)]))
    assert fillers(rest, 6) == [(1, 2, 2)]


@pytest.mark.parametrize("seed", EASY)
def test_pieces_are_full_rectangles(seed: int) -> None:
    layout = Layout(hard_placement(seed)[1])
    found = joined(layout, seed)
    fewest = len(layout)
    for _ in range(4):
        pieces = found.pieces()
        assert len(pieces) <= fewest
        fewest = len(pieces)
        assert sorted(b for piece in pieces for b, _ in piece.parts) == list(range(len(layout)))
        for piece in pieces:
            inside = [layout.buffers[b] for b, _ in piece.parts]
            offsets = {layout.buffers[b].id: height for b, height in piece.parts}
            assert overlap(inside, offsets) is None
            area = sum(
                int(layout.size[b] * (layout.last - layout.first)[b]) for b, _ in piece.parts
            )
            assert area == piece.size * (piece.last - piece.first)
            assert max(offsets[b.id] + b.size for b in inside) == piece.size
        found.improve(5_000)


def test_the_search_for_joins_leaves_fewer_pieces() -> None:
    found = joined(Layout(hard_placement(2079)[1]), 0)
    before = len(found.pieces())
    found.improve(200_000)
    assert len(found.pieces()) < before // 2


@pytest.mark.parametrize("lives", [SPIRAL, SPLIT], ids=["spiral", "of stacks"])
@pytest.mark.parametrize("seed", range(3))
def test_a_spiral_is_one_piece(lives: list[tuple[int, int, int]], seed: int) -> None:
    layout = Layout(of_lives(lives))
    found = joined(layout, seed)
    found.improve(2_000)
    assert found.all_joined
    assert_fits(layout, find_joined(layout, 6, seed=seed, work_limit=10_000_000), 6)


def test_small_ones_agree_with_cp_sat() -> None:
    rng = Random(5)
    found = 0
    for seed in range(60):
        layout = Layout(filled_up(rng))
        there = solve_capacity(layout, layout.bound).status is Status.OPTIMAL
        assert find_placement(layout, layout.bound, seed=seed).infeasible != there
        outcome = find_joined(layout, layout.bound, seed=seed, work_limit=3_000_000)
        assert not outcome.infeasible
        if outcome.offsets is not None:
            found += 1
            assert there
            assert_fits(layout, outcome, layout.bound)
    assert found > 25


@pytest.mark.parametrize("unit", [1, 7, 512])
def test_six_full_sections_have_no_placement_without_a_gap(unit: int) -> None:
    for backwards in (False, True):
        lives = [(6 - b, 6 - a, x) if backwards else (a, b, x) for a, b, x in FULL_SECTIONS]
        buffers = of_lives([(a, b, x * unit) for a, b, x in lives])
        outcome = find_joined(Layout(buffers), 6 * unit, seed=unit, work_limit=20_000_000)
        assert outcome.offsets is None
        assert not outcome.infeasible
        placement = place(buffers)
        assert placement.bound == placement.peak == 7 * unit


def test_alignments_are_kept() -> None:
    rng = Random(9)
    for seed in range(20):
        lives = [(b.lower, b.upper, b.size) for b in filled_up(rng)]
        steps = [rng.choice((1, 2, 4)) for _ in lives]
        layout = Layout([Buffer(str(k), *life, steps[k]) for k, life in enumerate(lives)])
        outcome = find_joined(layout, 2 * layout.bound, seed=seed, work_limit=5_000_000)
        if outcome.offsets is not None:
            assert_fits(layout, outcome, 2 * layout.bound)


def test_the_same_seed_gives_the_same_placement() -> None:
    buffers = hard_placement(4)[1]
    assert place(buffers, seed=3).offsets == place(buffers, seed=3).offsets


def test_a_limit_decides_nothing() -> None:
    layout = Layout(hard_placement(1014)[1])
    for outcome in (
        find_joined(layout, layout.bound, work_limit=1),
        find_joined(layout, layout.bound, work_limit=10**9, stop=lambda: True),
    ):
        assert outcome.offsets is None
        assert not outcome.infeasible
