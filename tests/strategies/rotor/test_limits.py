"""Sizes, deadlines, interruption, grouping: what happens to chains that are too long."""

from __future__ import annotations

import numpy as np
import pytest

from memopt.models.status import Status
from memopt.reductions.chain_replay import replay_chain
from memopt.solvers.running import Deadline, Stopped
from memopt.strategies.rotor import (
    Revolve,
    Rotor,
    RotorFree,
    RotorOptimal,
    Sequential,
    persistent_kernels,
    tables,
)
from memopt.strategies.rotor.grouping import expand, group_ends, grouped
from memopt.strategies.rotor.model import ChainArrays, bytes_of_slot
from memopt.strategies.rotor.persistent_kernels import Rows, fill_block, memory_bounds, row_offsets
from memopt.strategies.rotor.persistent_kernels import need_table as need_table_of
from memopt.strategies.rotor.schedules import steps_of
from memopt.strategies.store_all import store_all_bytes
from tests.strategies.rotor.chains import long_chain, random_chain, toy_chain


def test_store_all_bytes_is_the_replayed_peak():
    for seed in range(200):
        chain = random_chain(seed)
        beside = chain.resident_bytes + chain.input_bytes
        assert store_all_bytes(chain) + beside == Sequential(1).smallest_budget(chain)


def test_sizes_go_up_and_budgets_go_down():
    assert bytes_of_slot(1234, 10) == 124
    with pytest.raises(ValueError, match="at least 1"):
        bytes_of_slot(1234, 0)
    chain = long_chain(5)
    c = ChainArrays.of(chain, 7)
    for slots, size in ((c.output, c.output_bytes), (c.saved, c.saved_bytes)):
        assert (7 * slots >= size).all()
        assert (7 * (slots - 1) < size).all()


def test_rows_past_two_to_the_31_are_filled_like_any_other(tmp_path):
    chain = long_chain(12)
    c = ChainArrays.of(chain, bytes_of_slot(store_all_bytes(chain), 60))
    n = c.length
    low, high = memory_bounds(c, c.slot, True)
    offset, total = row_offsets(n, low, high)
    far = 2**31 + 5
    # A sparse file: only the pages that are written exist.
    values = np.memmap(tmp_path / "table", np.float64, "w+", shape=(far + total,))
    none = np.empty(0, np.int64)
    near = Rows(np.empty(total), offset, low, high, none, low)
    moved = Rows(np.asarray(values), offset + far, low, high, none, low)
    for table in (near, moved):
        fill_block(c, table, need_table_of(c), 1, 1, n, True)
    assert np.array_equal(near.values, moved.values[far:])


def test_the_length_of_a_table_past_two_to_the_31_is_right():
    n = 100
    low = np.zeros((n + 2, n + 2), np.int64)
    high = np.full((n + 2, n + 2), 10**6 - 1, np.int64)
    offset, total = row_offsets(n, low, high)
    assert total == n * (n + 1) // 2 * 10**6 > 2**31
    assert offset.max() == total - 10**6


def test_a_table_that_is_too_large_gets_fewer_slots_and_says_so(monkeypatch):
    chain = long_chain(60)
    sizes = []
    empty = np.empty
    monkeypatch.setattr(
        tables.np,
        "empty",
        lambda shape, *rest: sizes.append(np.prod(shape)) or empty(shape, *rest),
    )
    plans = Rotor(exact_stages=0, table_bytes=500_000).plan_set(chain)
    assert plans.stats["slots"] < 500
    assert "fewer slots" in plans.stats["note"]
    assert 8 * max(sizes) <= 500_000


def test_an_exact_table_past_its_cap_falls_back_to_slots_and_says_so():
    plans = Rotor(slots=None, table_bytes=100_000).plan_set(long_chain(40))
    assert plans.stats["mode"] == "slots"
    assert "exact" in plans.stats["note"] or "slots" in plans.stats["note"]


def test_a_chain_no_table_can_hold_is_a_clear_error():
    with pytest.raises(MemoryError, match="raise table_bytes"):
        RotorOptimal(table_bytes=1000).plan_set(long_chain(30))


def test_revolve_says_at_once_that_a_chain_takes_longer_than_it_may():
    with pytest.raises(MemoryError, match=r"some 16 seconds, of \d.* allowed: raise time_limit_s"):
        Revolve().solve(long_chain(4000), None, time_limit_s=5.0)


@pytest.mark.parametrize("kind", [Rotor, Revolve, RotorOptimal, RotorFree])
@pytest.mark.parametrize("exact_stages", [0, 100])
def test_a_time_limit_still_gives_a_schedule(kind, exact_stages):
    chain = long_chain(45)
    strategy = kind(exact_stages=exact_stages)
    solution = strategy.solve(chain, None, time_limit_s=0.0)
    assert solution.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert solution.lower_bound_s <= solution.time_s
    least = strategy.smallest_budget(chain)
    stopped = strategy.solve(chain, Rotor().smallest_budget(chain), time_limit_s=0.0)
    assert stopped.steps is not None or kind is Revolve
    assert strategy.solve(chain, least).steps is not None


def test_an_interrupt_still_gives_a_schedule_and_is_not_remembered():
    chain = long_chain(44)

    def interrupt(fraction, what):
        raise KeyboardInterrupt

    strategy = Rotor(exact_stages=0)
    assert strategy.solve(chain, None, progress=interrupt).steps is not None
    least = strategy.smallest_budget(chain)
    assert strategy.solve(chain, least).time_s <= max(
        point.time_s for point in strategy.curve(chain)
    )


def test_progress_rises_to_the_end():
    seen = []
    Rotor(exact_stages=0).plan_set(
        long_chain(50), Deadline(progress=lambda fraction, what: seen.append(fraction))
    )
    assert seen == sorted(seen)
    assert 0 <= seen[0] <= seen[-1] <= 1


def test_schedules_of_a_grouped_chain_are_the_chains_own():
    for seed in range(300):
        chain = random_chain(seed)
        ends = group_ends(chain, 3)
        coarse = grouped(chain, ends)
        assert coarse.compute_time_s == chain.compute_time_s
        plans = RotorFree().plan_set(coarse)
        for point, codes in zip(plans.points, plans.codes, strict=True):
            timeline = replay_chain(chain, steps_of(expand(codes, ends)))
            assert timeline.time_s == pytest.approx(point.time_s)
            assert timeline.peak_bytes <= point.peak_bytes


def test_long_chains_are_grouped_and_never_worse_than_rotor():
    chain = long_chain(70)
    free = RotorFree(most_stages=20)
    for point in Rotor().curve(chain):
        assert free.solve(chain, point.peak_bytes).time_s <= point.time_s
    assert free.solve(chain, None).stats["groups"] == 20


def test_slots_come_close_to_the_exact_program():
    chain = long_chain(60)
    exact, slotted = Rotor(slots=None), Rotor(exact_stages=0)
    least, most = exact.smallest_budget(chain), Sequential(1).smallest_budget(chain)
    for share in (0, 0.25, 0.5, 0.75, 1):
        budget = int(least + share * (most - least))
        best = exact.solve(chain, budget).time_s
        assert best <= slotted.solve(chain, budget).time_s <= 1.02 * best


def test_sequential_counts():
    assert Sequential().counts(100) == (10,)
    assert Sequential(7).counts(3) == (3,)
    best = Sequential("best").counts(100)
    assert (best[0], best[-1], len(best)) == (2, 20, 10)
    with pytest.raises(ValueError, match="a count from 1"):
        Sequential(0)
    assert Rotor(persistent=False).curve(toy_chain()) == RotorOptimal().curve(toy_chain())


@pytest.mark.parametrize("split_saving", [True, False])
def test_bounds_are_the_same_however_many_stages_between_two_looks_at_the_clock(
    split_saving, monkeypatch
):
    for seed in range(20):
        c = ChainArrays.of(random_chain(seed, 12), 3)
        once = memory_bounds(c, c.slot, split_saving)
        with monkeypatch.context() as patch:
            patch.setattr(persistent_kernels, "BOUNDS_AT_ONCE", 1)
            each = memory_bounds(c, c.slot, split_saving)
            if c.length > 1:
                with pytest.raises(Stopped):
                    memory_bounds(c, c.slot, split_saving, Deadline(-1.0))
        assert all(map(np.array_equal, once, each))
