"""Every program against the exhaustive search of its class, at every budget, on random chains."""

from __future__ import annotations

import itertools
import random

import pytest

from memopt.models.chain import Chain, Stage
from memopt.models.steps import ChainStep, Move
from memopt.reductions.chain_replay import ChainState, replay_chain
from memopt.strategies.rotor import Revolve, Rotor, RotorFree, RotorOptimal, Sequential
from memopt.strategies.rotor.schedules import MOVES, steps_of
from tests.strategies.rotor import brute_force as search
from tests.strategies.rotor.chains import figure_4_chain, random_chain, toy_chain

CLASSES = (
    (Rotor(), search.PERSISTENT),
    (Revolve(), search.REVOLVE),
    (RotorOptimal(), search.OPTIMAL),
    (RotorFree(), search.LAZY),
)
DEFAULT_CHAINS = 300
ALL_CHAINS = 6000
PER_CASE = 50


def chain_cases(begin: int, end: int) -> list[range]:
    return [range(seed, seed + PER_CASE) for seed in range(begin, end, PER_CASE)]


def check_chain(chain):
    """Each strategy's whole trade-off is its class's, and its schedules replay to it."""
    fronts = []
    for strategy, kind in CLASSES:
        plans = strategy.plan_set(chain)
        points = [(point.peak_bytes, point.time_s) for point in plans.points]
        assert points == search.brute_force(chain, kind), strategy.name
        for point, codes in zip(plans.points, plans.codes, strict=True):
            timeline = replay_chain(chain, steps_of(codes))
            assert (timeline.peak_bytes, timeline.time_s) == (point.peak_bytes, point.time_s)
        fronts.append(points)
    persistent, revolve, optimal, free = fronts
    sequential = [
        (point.peak_bytes, point.time_s)
        for count in range(1, len(chain) + 1)
        for point in Sequential(count).curve(chain)
    ]
    assert below(optimal, persistent)
    assert below(free, optimal)
    assert below(persistent, revolve)
    assert below(persistent, sequential)
    assert all(time_s >= chain.compute_time_s for _, time_s in free)


def below(better, worse):
    """Whether at the peak of every point of `worse`, `better` has one at least as fast."""
    return all(any(p <= peak and t <= time for p, t in better) for peak, time in worse)


@pytest.mark.parametrize("seeds", chain_cases(0, DEFAULT_CHAINS), ids=str)
def test_programs_equal_the_search(seeds):
    for seed in seeds:
        check_chain(random_chain(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seeds", chain_cases(DEFAULT_CHAINS, ALL_CHAINS), ids=str)
def test_programs_equal_the_search_on_thousands(seeds):
    for seed in seeds:
        check_chain(random_chain(seed))


@pytest.mark.parametrize("seeds", chain_cases(0, 100), ids=str)
def test_time_never_rises_and_peak_never_passes_the_budget(seeds):
    for seed, slots in itertools.product(seeds, (None, 7, 50)):
        chain = random_chain(seed)
        for kind in (Rotor, Revolve, RotorOptimal, RotorFree):
            strategy = kind(slots=slots, exact_stages=0)
            least = strategy.smallest_budget(chain)
            last = float("inf")
            for budget in range(least, least + 40, 3):
                solution = strategy.solve(chain, budget)
                timeline = replay_chain(chain, solution.steps)
                assert timeline.peak_bytes == solution.peak_bytes <= budget
                assert timeline.time_s == solution.time_s <= last
                assert solution.lower_bound_s <= solution.time_s
                last = solution.time_s
            refused = strategy.solve(chain, least - 1)
            assert refused.steps is None
            assert refused.smallest_budget_bytes == least


def test_slots_find_the_exact_smallest_budget():
    for seed in range(100):
        chain = random_chain(seed)
        for kind in (Rotor, Revolve, RotorOptimal, RotorFree):
            exact = kind(slots=None).smallest_budget(chain)
            assert kind(slots=3, exact_stages=0).smallest_budget(chain) == exact


def test_the_search_charges_what_the_replay_charges():
    draw = random.Random(0)
    for seed in range(100):
        chain = random_chain(seed)
        n = len(chain)
        sizes, times = search.arrays(chain)
        state, reference = search.start_state(n), ChainState(chain)
        for _ in range(40):
            choices = []
            for move, stage in itertools.product(range(6), range(1, n + 1)):
                new, during = search.successor(n, sizes, state, move, stage, search.FREE)
                if new >= 0:
                    choices.append((move, stage, new, during))
            if not choices:
                break
            move, stage, state, during = draw.choice(choices)
            charged, seconds = reference.apply(ChainStep(MOVES[move], stage))
            assert charged == during + chain.resident_bytes
            expected = 0 if move > search.BACKWARD else times[stage, int(move == search.BACKWARD)]
            assert seconds == expected


def test_where_recomputing_early_saves_memory():
    """Lemma 4.4 fails: B^2 leaves a δ^1 that is larger than what it frees, so that F_all^1 needs
    less memory before it. The class of Definition 4.3 has no such schedule."""
    chain = Chain(
        1,
        (
            Stage(1, 1, 1, 8, 20, 100, 0),
            Stage(50, 1, 0, 2, 0, 2, 2),
            Stage(0, 0, 8, 1, 8, 100, 100),
        ),
    )
    moves = (("Fck", 1), ("Fall", 2), ("Fall", 3), ("B", 3), ("Fall", 1), ("B", 2), ("B", 1))
    early = replay_chain(chain, tuple(ChainStep(Move(move), stage) for move, stage in moves))
    check_chain(chain)
    points = RotorOptimal().plan_set(chain).points
    assert not any(p.peak_bytes <= early.peak_bytes and p.time_s <= early.time_s for p in points)
    assert any(p.time_s <= early.time_s for p in points)


FIGURE_4 = pytest.mark.parametrize(
    ("n", "persistent", "optimal", "free"),
    [(4, 10, 10, 8), (5, 13, 12, 10), (6, 16, 14, 12), (8, 22, 18, 16)],
)
"""Makespans of figure 4's chain at M = 15: 3n - 2, 2n + 2 (at most 3n - 2), 2n."""


@FIGURE_4
def test_figure_4(n, persistent, optimal, free):
    chain = figure_4_chain(n)
    wanted = zip((Rotor(), RotorOptimal(), RotorFree()), (persistent, optimal, free), strict=True)
    for strategy, makespan in wanted:
        solution = strategy.solve(chain, 15)
        timeline = replay_chain(chain, solution.steps)
        assert timeline.time_s == solution.time_s == makespan
        assert timeline.peak_bytes <= 15


@FIGURE_4
def test_figure_4_by_the_search(n, persistent, optimal, free):
    chain = figure_4_chain(n)
    sizes, times = search.arrays(chain)
    wanted = {search.PERSISTENT: persistent, search.OPTIMAL: optimal, search.FREE: free}
    for kind, makespan in wanted.items():
        assert search.fastest(len(chain), sizes, times, kind, 15)[0] == makespan


def test_the_toy_chain_in_the_larger_classes_by_the_search():
    for strategy, kind in ((RotorOptimal(), search.OPTIMAL), (RotorFree(), search.FREE)):
        found = strategy.curve(toy_chain())
        wanted = search.brute_force(toy_chain(), kind)
        assert [point.peak_bytes for point in found] == [peak for peak, _ in wanted]
        assert [point.time_s for point in found] == pytest.approx([time for _, time in wanted])
