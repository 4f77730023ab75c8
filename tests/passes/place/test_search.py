"""The depth-first search for offsets by itself: what it finds fits, what it excludes is not there,
and where it was stopped it goes on."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import numpy as np
import pytest

from memopt.passes.place import search as search_module
from memopt.passes.place import search_kernels
from memopt.passes.place.buffers import Layout
from memopt.passes.place.search import _fresh, find_placement
from memopt.strategies.olla import Buffer
from tests.passes.oracles import FULL_SECTIONS, best_placement_bytes, filled_up, overlap
from tests.passes.place.test_placement import random_buffers


def some_buffers(rng: Random, most: int, aligned: bool) -> list[Buffer]:
    found = random_buffers(rng, rng.randint(3, most), aligned=aligned)
    return [one for one in found if one.size] or [Buffer("alone", 0, 1, 1)]


def assert_fits(buffers: Sequence[Buffer], offsets: np.ndarray, capacity: int) -> None:
    named = {b.id: int(x) for b, x in zip(Layout(buffers).buffers, offsets, strict=True)}
    assert overlap(buffers, named) is None
    assert all(named[b.id] % b.alignment == 0 for b in buffers)
    assert max(named[b.id] + b.extent for b in buffers) <= capacity


@pytest.mark.parametrize("aligned", [False, True])
def test_every_capacity_is_decided(aligned: bool) -> None:
    rng = Random(31)
    for seed in range(60):
        buffers = some_buffers(rng, 6, aligned)
        layout, best = Layout(buffers), best_placement_bytes(buffers)
        for capacity in {layout.bound - 1, layout.bound, best - 1, best, best + 3}:
            outcome = find_placement(layout, capacity, seed=seed)
            assert outcome.infeasible == (capacity < best)
            if outcome.offsets is not None:
                assert_fits(buffers, outcome.offsets, capacity)
            else:
                assert outcome.infeasible


def test_full_sections_with_and_without_a_placement() -> None:
    """Six bytes are live at every instant, and no placement within six bytes exists."""
    rng = Random(32)
    for seed in range(10):
        unit = rng.choice((1, 7, 512))
        lives = [(a, b, x * unit) for a, b, x in rng.sample(FULL_SECTIONS, len(FULL_SECTIONS))]
        buffers = [Buffer(str(k), *life) for k, life in enumerate(lives)]
        layout = Layout(buffers)
        assert layout.bound == 6 * unit
        assert find_placement(layout, layout.bound, seed=seed).infeasible
        found = find_placement(layout, 7 * unit, seed=seed)
        assert found.offsets is not None
        assert_fits(buffers, found.offsets, 7 * unit)
    for seed in range(20):
        buffers = filled_up(rng)
        layout = Layout(buffers)
        found = find_placement(layout, layout.bound, seed=seed)
        if found.offsets is not None:
            assert_fits(buffers, found.offsets, layout.bound)
        else:
            assert found.infeasible


def test_it_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = Random(33)
    cases = [Layout(filled_up(rng)) for _ in range(15)]
    whole = [find_placement(layout, layout.bound, seed=3) for layout in cases]
    monkeypatch.setattr(search_module, "CHUNK_WORK", 20)
    for layout, before in zip(cases, whole, strict=True):
        again = find_placement(layout, layout.bound, seed=3)
        assert (again.infeasible, again.nodes, again.work) == (
            before.infeasible,
            before.nodes,
            before.work,
        )
        assert (again.offsets is None) == (before.offsets is None)
        assert again.offsets is None or (again.offsets == before.offsets).all()


def test_a_trail_that_is_full_is_lengthened() -> None:
    rng = Random(34)
    full = 0
    for _ in range(15):
        layout = Layout(filled_up(rng))
        order = np.arange(len(layout))
        codes = []
        for rows in (6 * len(layout) + 8, 10_000):
            instance, state = _fresh(layout, order)
            trail = np.zeros((rows, 3), dtype=np.int64)
            code = search_kernels.FULL
            while code == search_kernels.FULL:
                code = search_kernels.search(instance, state, trail, layout.bound, 2, 10**7, 10**5)
                if code == search_kernels.FULL:
                    full += 1
                    trail = np.concatenate((trail, np.zeros_like(trail)))
            codes.append((code, state.offset.tolist()))
        assert codes[0] == codes[1]
    assert full > 0


def test_limits_decide_nothing() -> None:
    layout = Layout(filled_up(Random(35)))
    for outcome in (
        find_placement(layout, layout.bound, work_limit=1),
        find_placement(layout, layout.bound, stop=lambda: True),
    ):
        assert outcome.offsets is None
        assert not outcome.infeasible
