"""The dynamic program of offloading against its parts: every set's idle time is the replay's, and
what it finds is the least of them."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from memopt.strategies.offload import dynprog_kernels as kernels
from memopt.strategies.offload.ordered import makespan_s
from memopt.strategies.offload.ordered_kernels import improve, makespan, tflms_table
from memopt.strategies.offload.problem import OffloadProblem
from memopt.strategies.offload.rounding import RecurrenceData, recurrence_data
from tests.strategies.offload.oracle import TOLERANCE, subsets
from tests.strategies.offload.test_dynprog import random_problem

WIDE = 10**6
GO = np.zeros(1, np.bool_)


def idle_s(problem: OffloadProblem, data: RecurrenceData, chosen: np.ndarray) -> float:
    units = float(kernels.evaluate(data, chosen))
    return units * data.unit_bytes / problem.to_host_bytes_per_s


def every_set(data: RecurrenceData) -> list[np.ndarray]:
    movable = [int(j) for j in np.flatnonzero(data.movable)]
    sets = []
    for chosen in subsets(movable):
        sets.append(np.zeros(len(data.sizes), np.bool_))
        sets[-1][list(chosen)] = True
    return sets


def test_the_idle_time_of_every_set_is_the_replays() -> None:
    rng, fitting = Random(31), 0
    for _ in range(50):
        problem = random_problem(rng, rng.randint(2, 6))
        data = recurrence_data(problem, None)
        for chosen in every_set(data):
            found = idle_s(problem, data, chosen)
            amounts = problem.amounts(np.flatnonzero(chosen))
            expected = makespan_s(problem, amounts) - problem.compute_time_s
            assert found == pytest.approx(expected, abs=TOLERANCE)
            fitting += bool(np.isfinite(found))
    assert fitting > 200


@pytest.mark.parametrize("limited", [False, True])
def test_the_least_of_all_sets_is_found(limited: bool) -> None:
    """Also within a known idle time, and with a budget of the host."""
    rng, some = Random(32), 0
    for number in range(120):
        problem = random_problem(rng, rng.randint(2, 7))
        data = recurrence_data(problem, None)
        host = float(rng.randint(0, int(data.sizes.sum()))) if number % 3 == 0 else np.inf
        idle = [
            kernels.evaluate(data, one) if data.sizes[one].sum() <= host else np.inf
            for one in every_set(data)
        ]
        best = min(idle)
        limit = best + 1e-9 if limited else np.inf
        chosen, found, labels, cut = kernels.solve(data, limit, host, WIDE, True, GO)
        assert found == pytest.approx(best, abs=TOLERANCE)
        if np.isfinite(best):
            some += 1
            assert labels >= len(data.sizes)
            assert kernels.evaluate(data, chosen) == pytest.approx(best, abs=TOLERANCE)
            assert data.sizes[chosen].sum() <= host
        assert cut == 0
    assert some > 80


def test_bounds_and_dominance_by_hand() -> None:
    """Labels of kept data, what is to leave, what is to come back, idle time; 4 s are left, and a
    byte takes twice as long back."""
    excess, left = np.array([3.0, -5.0]), np.array([4.0, 4.0])
    for state, i, bound in (
        ((5.0, 2.0, 1.0, 9.0), 0, 10 + 2 * 9 - 4),
        ((5.0, -2.0, -1.0, 9.0), 0, 8 + 2 * 8 - 4),
        ((1.0, -3.0, 7.0, 0.0), 1, -3 + 2 * 7 - 4),
        ((1.0, -3.0, 3.0, 0.0), 1, 0),
    ):
        assert kernels.remaining(np.array(state), i, excess, left, 2.0) == bound
    one, other = np.array([1.0, 4.0, 3.0, 2.0]), np.array([1.0, 2.0, 1.0, 8.0])
    none = kernels.NO_LAST
    for a, last_a, b, last_b, exact, tolerance, expected in (
        (one, none, other, none, True, 0.0, True),  # follows in 2 + 2 · 2 = 6 s of 6
        (one, none, other, 3, True, 0.0, True),
        (one, 2, other, 3, True, 0.0, False),
        (one, 3, other, 3, True, 0.0, True),
        (one, 2, other, 3, False, 0.0, True),
        (other, none, one, none, True, 9.0, False),
        (one, none, other - np.array([0, 0, 0, 1.0]), none, True, 0.5, False),
        (one, none, other - np.array([0, 0, 0, 1.0]), none, True, 1.0, True),
        (one, none, one - np.array([0, 0, 0, 0.5]), none, False, 1.0, False),
    ):
        found = kernels.dominates(a, last_a, b, last_b, 2.0, exact, tolerance)
        assert found is expected


def test_slots_are_nearly_the_least() -> None:
    """Where not all labels are compared, and few are kept, what is found is a set's idle time or
    above the least."""
    rng, equal, lost = Random(33), 0, 0
    for _ in range(100):
        problem = random_problem(rng, rng.randint(3, 7))
        data = recurrence_data(problem, 40)
        best = min(kernels.evaluate(data, one) for one in every_set(data))
        for width in (1, WIDE):
            chosen, found, _, cut = kernels.solve(data, np.inf, np.inf, width, False, GO)
            lost += cut
            assert (cut > 0) <= (width == 1)
            if not np.isfinite(best):
                assert np.isinf(found)
                continue
            again = kernels.evaluate(data, chosen)
            assert again >= best - TOLERANCE
            equal += bool(again <= best + TOLERANCE)
    assert lost > 20
    assert equal > 180


def large_model_support(
    problem: OffloadProblem, chosen: list[int], distance: int
) -> tuple[int, float]:
    """TFLMS by hand: x_j leaves once it is made; it comes back, the last first, as soon as
    B_{j + distance} may start. (peak, makespan)"""
    n, lasts = problem.stages, problem.durations_s.tolist()
    ends = [0.0, *np.cumsum(lasts[:n]).tolist()]
    gone, link = {}, 0.0
    for j in chosen:
        start = max(link, ends[j])
        gone[j] = link = start + problem.latency_s + problem.sizes[j] / problem.to_host_bytes_per_s
    starts, begins, arrives = ends[:n], {}, dict.fromkeys(range(n + 1), 0.0)
    now, waiting = ends[n], sorted(chosen)
    for k in range(n, 2 * n):
        i = 2 * n - 1 - k
        while waiting and waiting[-1] + distance >= i:
            j = waiting.pop()
            begins[j] = max(now, link)
            seconds = problem.latency_s + problem.sizes[j] / problem.from_host_bytes_per_s
            arrives[j] = link = begins[j] + seconds
        now = max(now, arrives[i], arrives[i + 1])
        starts.append(now)
        now += lasts[k]
    peak = 0
    for k in range(2 * n):
        i = min(k, 2 * n - 1 - k)
        away = [
            j
            for j in chosen
            if j < i and gone[j] <= starts[k] and begins.get(j, np.inf) >= starts[k] + lasts[k]
        ]
        peak = max(peak, int(problem.used_bytes[k]) - sum(int(problem.sizes[j]) for j in away))
    return peak, now


def test_large_model_support_by_hand() -> None:
    rng, different = Random(34), set()
    for _ in range(40):
        problem = random_problem(rng, rng.randint(2, 6))
        problem = replace(problem, latency_s=rng.choice((0.0, 0.25)))
        peaks, times = tflms_table(problem.arrays)
        movable = np.flatnonzero(problem.movable).tolist()
        assert peaks.shape == (len(movable) + 1, problem.stages)
        for count in range(len(movable) + 1):
            for distance in range(problem.stages):
                found = int(peaks[count, distance]), float(times[count, distance])
                expected = large_model_support(problem, movable[:count], distance)
                assert found == (expected[0], pytest.approx(expected[1]))
                different.add(found)
    assert len(different) > 150


def test_no_exchange_improves_what_the_local_search_returns() -> None:
    rng, moved_on = Random(35), 0
    for number in range(60):
        problem = random_problem(rng, rng.randint(3, 7))
        data, sizes = problem.arrays, problem.sizes
        host = float(problem.excess_bytes + rng.randint(0, 3))
        host = np.inf if number % 2 else host
        begin = np.zeros(len(sizes), np.bool_)
        begin[problem.movable & (np.cumsum(sizes) <= host)] = True
        chosen, seconds = improve(data, begin, host, 10**6, GO)

        def score(one: np.ndarray, problem: OffloadProblem = problem) -> tuple[float, int]:
            amounts = np.where(one, problem.sizes, 0)
            return float(makespan(problem.arrays, amounts, True)), int(amounts.sum())

        best = score(chosen)
        assert best[0] == seconds
        assert best[1] <= host
        moved_on += bool((chosen != begin).any())
        for i in np.flatnonzero(problem.movable):
            for j in np.flatnonzero(problem.movable[: i + 1]):
                trial = chosen.copy()
                trial[[i, j]] = ~trial[[i, j]]
                exchanged = i == j or chosen[i] != chosen[j]
                if exchanged and score(trial)[1] <= host:
                    assert score(trial) >= best
    assert moved_on > 20
