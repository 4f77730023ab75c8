"""Placement: brute force, the outside instances, limits, interruption."""

from __future__ import annotations

import itertools
from pathlib import Path
from random import Random

import pytest
from typer.testing import CliRunner

from memopt.cli import app
from memopt.models.status import Status
from memopt.passes.cp_sat import CpSat
from memopt.passes.place import placement as placement_module
from memopt.passes.place.buffers import Layout
from memopt.passes.place.feasibility import solve_capacity
from memopt.passes.place.greedy import pyramid
from memopt.passes.place.repair import repaired_placement, stacked_results
from memopt.strategies.olla import (
    Buffer,
    Placement,
    lower_bound,
    place,
    read_buffers,
    write_buffers,
)
from tests.passes.oracles import FULL_SECTIONS, best_placement_bytes, overlap

pytestmark = pytest.mark.xdist_group("address kernels")
"""In one worker: where nothing is compiled yet, two would take half a minute each for the same."""

DATA = Path(__file__).parents[2] / "data" / "minimalloc"

# Instance → (lower bound, best peak published).
INSTANCES = {
    "A": (1048576, 1048576),
    "B": (1048576, 1048576),
    "C": (1039360, 1039360),
    "D": (986112, 1048576),
    "E": (1048576, 1048576),
    "F": (1048576, 1048576),
}


def random_buffers(
    rng: Random, count: int, *, aligned: bool = False, sparse: bool = False
) -> tuple[Buffer, ...]:
    horizon = rng.randint(2, 3 * count)
    buffers = []
    for index in range(count):
        lower = rng.randrange(horizon)
        upper = rng.randint(lower + 1, min(horizon, lower + (3 if sparse else horizon)))
        size = rng.choice([0, 1, 2, 3, 5, 8, 13, rng.randint(1, 30)])
        alignment = rng.choice([1, 2, 4]) if aligned else 1
        buffers.append(Buffer(f"b{index}", lower, upper, size, alignment))
    return tuple(buffers)


@pytest.mark.parametrize(
    ("aligned", "count"),
    [(False, 150), (True, 50), pytest.param(True, 150, marks=pytest.mark.slow)],
)
def test_equals_brute_force(aligned: bool, count: int) -> None:
    rng = Random(3)
    for _ in range(count):
        buffers = random_buffers(rng, rng.randint(1, 6), aligned=aligned)
        placement = place(buffers)
        best = best_placement_bytes(buffers)
        assert placement.peak == best
        assert placement.bound <= best
        assert placement.status is (Status.OPTIMAL if placement.bound == best else Status.FEASIBLE)
        assert overlap(buffers, dict(placement.offsets)) is None
        assert all(placement.offsets[b.id] % b.alignment == 0 for b in buffers)


def test_equals_brute_force_where_the_first_search_does_not_decide(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(placement_module, "ROUND_WORK", 1)
    rng = Random(4)
    for _ in range(60):
        buffers = random_buffers(rng, rng.randint(4, 7))
        placement = place(buffers, work_limit=10_000_000)
        assert placement.peak == best_placement_bytes(buffers)
        assert overlap(buffers, dict(placement.offsets)) is None


def test_proves_a_bound_above_the_live_bytes() -> None:
    # 6 bytes are live at every instant, yet no placement within 6 bytes exists.
    buffers = tuple(Buffer(str(i), *life) for i, life in enumerate(FULL_SECTIONS))
    assert lower_bound(buffers) == 6
    placement = place(buffers)
    assert (placement.peak, placement.bound, placement.status) == (7, 7, Status.OPTIMAL)
    assert solve_capacity(Layout(buffers), 6).status is Status.INFEASIBLE
    assert place(buffers, capacity=6).status is Status.INFEASIBLE


def test_figure_4_leaves_a_gap() -> None:
    # The shape of OLLA figure 4: first fit puts B on top of A, and C does not fit any more once A
    # is gone; a gap between them lets C in.
    buffers = (Buffer("A", 0, 2, 2), Buffer("B", 1, 4, 2), Buffer("C", 3, 5, 3))
    placement = place(buffers)
    assert placement.peak == placement.bound == 5
    placed_first_fit = {"A": 0, "B": 2, "C": 4}
    assert overlap(buffers, placed_first_fit) is None
    assert placed_first_fit["C"] + 3 > placement.peak


@pytest.mark.parametrize("name", sorted(INSTANCES))
def test_outside_instances_reach_the_best_known_peak(name: str) -> None:
    bound, best = INSTANCES[name]
    buffers, offsets = read_buffers(DATA / f"{name}.1048576.csv")
    assert offsets is None
    assert lower_bound(buffers) == bound
    placement = place(buffers, capacity=best)
    assert placement.peak <= best
    assert overlap(buffers, dict(placement.offsets)) is None


@pytest.mark.parametrize("name", sorted(INSTANCES))
def test_the_command_places_the_outside_instances(name: str, tmp_path: Path) -> None:
    source, out = DATA / f"{name}.1048576.csv", tmp_path / "placed.csv"
    best = INSTANCES[name][1]
    done = CliRunner().invoke(
        app, ["place", str(source), "--capacity", str(best), "--out", str(out)]
    )
    assert done.exit_code == 0, done.output
    buffers, offsets = read_buffers(out)
    assert buffers == read_buffers(source)[0]
    assert offsets is not None
    assert overlap(buffers, offsets) is None
    assert max(offsets[b.id] + b.size for b in buffers) <= best


@pytest.mark.parametrize("name", sorted(INSTANCES))
def test_minimising_reaches_the_best_published_peak(name: str) -> None:
    bound, best = INSTANCES[name]
    buffers, _ = read_buffers(DATA / f"{name}.1048576.csv")
    placement = place(buffers, work_limit=1_500_000_000)
    assert bound <= placement.bound <= placement.peak <= best
    assert placement.status is (Status.OPTIMAL if bound == best else Status.FEASIBLE)
    assert overlap(buffers, dict(placement.offsets)) is None


def test_a_capacity_that_is_not_met_names_a_peak_as_good_as_minimising() -> None:
    buffers, _ = read_buffers(DATA / "D.1048576.csv")
    capacity = lower_bound(buffers)
    placement = place(buffers, capacity, work_limit=1_500_000_000)
    assert placement.status is Status.UNKNOWN
    assert capacity < placement.peak <= 1048576


def test_a_time_limit_replaces_the_limit_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the work ends the search; with one, however long, the time does."""
    monkeypatch.setattr(placement_module, "DEFAULT_WORK_LIMIT", 1)
    buffers, _ = read_buffers(DATA / "A.1048576.csv")
    assert place(buffers).peak > 1048576
    assert place(buffers, time_limit_s=600).peak == 1048576
    assert place(buffers, time_limit_s=600, work_limit=1).peak > 1048576


def test_capacity_decides_the_status() -> None:
    buffers = tuple(Buffer(str(i), 0, 2, 4) for i in range(3))
    assert place(buffers, capacity=12).status is Status.OPTIMAL
    below = place(buffers, capacity=11)
    assert below.status is Status.INFEASIBLE
    assert below.peak == 12
    loose = place((Buffer("a", 0, 1, 1), Buffer("b", 1, 2, 3)), capacity=100)
    assert loose.status is Status.OPTIMAL


def test_zero_sizes_and_nothing_at_all() -> None:
    assert place(()).peak == 0
    placement = place((Buffer("a", 0, 1, 0), Buffer("b", 0, 1, 0)))
    assert (placement.peak, placement.gap, placement.status) == (0, 0.0, Status.OPTIMAL)


def test_same_seed_same_placement() -> None:
    rng = Random(11)
    for _ in range(20):
        buffers = random_buffers(rng, 40)
        assert place(buffers, seed=5).offsets == place(buffers, seed=5).offsets


def test_limits_return_the_best_so_far() -> None:
    buffers, _ = read_buffers(DATA / "E.1048576.csv")
    placement = place(buffers, work_limit=1)
    assert placement.status is Status.FEASIBLE
    assert placement.bound == 1048576 < placement.peak
    assert overlap(buffers, dict(placement.offsets)) is None
    assert place(buffers, time_limit_s=0.0).status is Status.FEASIBLE


def test_interruption_returns_the_best_so_far() -> None:
    buffers, _ = read_buffers(DATA / "E.1048576.csv")
    seen: list[int] = []

    def stop(_seconds: float, peak: int, _bound: int) -> None:
        seen.append(peak)
        raise KeyboardInterrupt

    placement = place(buffers, on_improvement=stop)
    assert placement.stats["interrupted"]
    assert placement.peak == seen[-1]
    assert overlap(buffers, dict(placement.offsets)) is None


def test_cp_sat_agrees_with_the_search() -> None:
    rng = Random(8)
    for aligned in (False, True):
        for _ in range(25):
            buffers = [b for b in random_buffers(rng, 8, aligned=aligned) if b.size]
            if not buffers:
                continue
            layout, best = Layout(buffers), place(buffers).peak
            some = solve_capacity(layout, best)
            least = solve_capacity(layout, layout.size.sum(), least=0)
            for found in (some, least):
                assert found.status is Status.OPTIMAL
                assert found.offsets is not None
                named = {b.id: int(x) for b, x in zip(buffers, found.offsets, strict=True)}
                assert overlap(buffers, named) is None
                assert max(named[b.id] + b.extent for b in buffers) <= best
            assert layout.bound <= least.bound <= best
            under = solve_capacity(layout, best - 1)
            assert under.status is Status.INFEASIBLE
            assert best - 1 < under.bound <= best


@pytest.mark.parametrize("aligned", [False, True])
def test_local_search_finds_the_optimum_of_small_problems(aligned: bool) -> None:
    rng = Random(11)
    for seed in range(30):
        buffers = [b for b in random_buffers(rng, 7, aligned=aligned) if b.size]
        layout = Layout(buffers)
        least = best_placement_bytes(buffers)
        found = repaired_placement(layout, least, seed=seed, turn=seed, work_limit=20_000_000)
        assert found.offsets is not None
        offsets = dict(zip((b.id for b in buffers), found.offsets.tolist(), strict=True))
        assert max(offsets[b.id] + b.extent for b in buffers) <= least
        assert all(offsets[b.id] % b.alignment == 0 for b in buffers)
        assert not overlap(buffers, offsets)
        if least > layout.bound:
            none = repaired_placement(layout, least - 1, seed=seed, work_limit=1_000_000)
            assert none.offsets is None
            assert not none.infeasible


@pytest.mark.parametrize("aligned", [False, True])
def test_local_search_stacks_results_in_the_order_of_their_birth(aligned: bool) -> None:
    """What lives to the end is placed from 0 up, one birth after another, before anything else;
    placements found around it are as good as the rest."""
    rng = Random(12)
    stacked = 0
    for seed in range(10):
        end, step = 140, 8 if aligned else 1
        results = [Buffer(f"r{k}", k, end, 1 + rng.randint(0, 2), step) for k in range(120)]
        short = [(rng.randint(0, end - 8), 8 * rng.randint(1, 9)) for _ in range(200)]
        buffers = [
            *results,
            Buffer("at the end", end - 1, end, 8, step),
            *(Buffer(f"t{k}", t, t + 2, x, step) for k, (t, x) in enumerate(short)),
        ]
        rng.shuffle(buffers)
        layout = Layout(buffers)
        offset = stacked_results(layout)
        if offset is None:
            continue
        stacked += 1
        of_results = {b.id: int(x) for b, x in zip(buffers, offset, strict=True) if x >= 0}
        assert set(of_results) == {result.id for result in results}
        expected = 0
        for result in results:
            assert of_results[result.id] == expected
            expected += result.extent
        found = repaired_placement(layout, layout.bound * 2, seed=seed, turn=1)
        assert found.offsets is not None
        offsets = dict(zip((b.id for b in buffers), found.offsets.tolist(), strict=True))
        assert not overlap(buffers, offsets)
        assert all(offsets[name] == least for name, least in of_results.items())
    assert stacked > 5


def test_pyramid_is_nested() -> None:
    rng = Random(2)
    for _ in range(50):
        buffers = random_buffers(rng, 20)
        chosen = [buffers[i] for i in pyramid(Layout(buffers))]
        for outer, inner in itertools.pairwise(chosen):
            assert outer.lower <= inner.lower < inner.upper <= outer.upper


def by_cp_sat(buffers: tuple[Buffer, ...], how: CpSat) -> Placement:
    """All that CP-SAT can do from the worst placement there is."""
    run = placement_module._PlacementSearch(buffers, None, None, None)
    run.stack()
    run.cp_sat(how)
    return run.result()


def test_cp_sat_minimises_the_peak() -> None:
    rng = Random(5)
    left_open = 0
    for _ in range(25):
        buffers = random_buffers(rng, 15)
        best = place(buffers).peak
        found = by_cp_sat(buffers, CpSat())
        assert found.bound <= best == found.peak
        assert found.status is Status.OPTIMAL
        assert overlap(buffers, dict(found.offsets)) is None
        short = by_cp_sat(buffers, CpSat(effort=1e-7))
        assert short.bound <= best <= short.peak
        assert overlap(buffers, dict(short.offsets)) is None
        left_open += short.peak > best
    assert left_open > 3
    full = by_cp_sat(tuple(Buffer(str(k), *x) for k, x in enumerate(FULL_SECTIONS)), CpSat())
    assert (full.peak, full.bound, full.stats["method"]) == (7, 7, "CP-SAT")


@pytest.mark.parametrize("aligned", [False, True])
def test_csv_round_trip(tmp_path: Path, aligned: bool) -> None:
    buffers = tuple(b for b in random_buffers(Random(4), 30, aligned=aligned))
    placement = place(buffers)
    write_buffers(tmp_path / "x.csv", buffers, placement.offsets)
    assert read_buffers(tmp_path / "x.csv") == (buffers, dict(placement.offsets))
    write_buffers(tmp_path / "y.csv", buffers)
    assert read_buffers(tmp_path / "y.csv") == (buffers, None)


def test_csv_round_trips_the_outside_files(tmp_path: Path) -> None:
    for name in INSTANCES:
        source = DATA / f"{name}.1048576.csv"
        write_buffers(tmp_path / "copy.csv", read_buffers(source)[0])
        assert (tmp_path / "copy.csv").read_text().split() == source.read_text().split()


def test_csv_errors_name_the_place(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text("id,lower,upper\na,0,1\n")
    with pytest.raises(ValueError, match="no column 'size'"):
        read_buffers(path)
    path.write_text("id,lower,upper,size\na,0,1,x\n")
    with pytest.raises(ValueError, match="line 2"):
        read_buffers(path)


def test_bad_buffers_are_refused() -> None:
    with pytest.raises(ValueError, match="upper"):
        Buffer("a", 1, 1, 1)
    with pytest.raises(ValueError, match="size"):
        Buffer("a", 0, 1, -1)
    with pytest.raises(ValueError, match="same id"):
        place((Buffer("a", 0, 1, 1), Buffer("a", 0, 1, 1)))


@pytest.mark.slow
def test_random_sweep_is_valid_and_proved() -> None:
    rng = Random(77)
    for _ in range(1500):
        buffers = random_buffers(rng, rng.randint(1, 7), aligned=rng.random() < 0.3)
        placement = place(buffers)
        assert placement.peak == best_placement_bytes(buffers)
    proved = 0
    for _ in range(200):
        buffers = random_buffers(rng, 60, sparse=True)
        placement = place(buffers, work_limit=50_000_000)
        assert overlap(buffers, dict(placement.offsets)) is None
        proved += placement.status is Status.OPTIMAL
    assert proved >= 180
