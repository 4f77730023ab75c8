"""DynProg against brute force over all sets, its monotonicity, and its rounding."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from memopt.strategies.offload.dynprog import solve_dynprog
from memopt.strategies.offload.ordered import fractional_optimum_s, makespan_s, searched_amounts
from memopt.strategies.offload.problem import OffloadProblem, offload_problem
from memopt.strategies.offload.rounding import recurrence_data
from tests.strategies.offload.oracle import TOLERANCE, paper_link, random_chain, subsets
from tests.strategies.offload.test_against_lp import random_link


def random_problem(rng: random.Random, stages: int) -> OffloadProblem:
    chain, device = random_chain(rng, stages), random_link(rng)
    problem = offload_problem(chain, None, device)
    return replace(problem, capacity_bytes=rng.randint(problem.floor_bytes, problem.peak_bytes))


def brute_force_s(
    problem: OffloadProblem, host: int | None = None, *, whole: bool = False
) -> float:
    movable = [int(j) for j in np.flatnonzero(problem.movable)]
    best = np.inf
    for chosen in subsets(movable):
        amounts = problem.amounts(list(chosen))
        if host is None or amounts.sum() <= host:
            best = min(best, makespan_s(problem, amounts, whole=whole))
    return best


def check_optimal(rng: random.Random, stages: int) -> None:
    problem = random_problem(rng, stages)
    result = solve_dynprog(problem, None)
    assert result.amounts is not None
    found = makespan_s(problem, result.amounts)
    assert found == pytest.approx(brute_force_s(problem), abs=TOLERANCE)
    # The recurrences themselves give the idle time of the replay.
    assert result.idle_s + problem.compute_time_s == pytest.approx(found, abs=TOLERANCE)
    assert result.cut == 0


def test_unrounded_equals_brute_force() -> None:
    rng = random.Random(11)
    for _ in range(400):
        check_optimal(rng, rng.randint(2, 8))


@pytest.mark.slow
def test_unrounded_equals_brute_force_on_thousands() -> None:
    rng = random.Random(12)
    for _ in range(5000):
        check_optimal(rng, rng.randint(2, 10))


def test_host_budget_is_kept() -> None:
    rng = random.Random(13)
    solved = 0
    for _ in range(150):
        problem = random_problem(rng, rng.randint(2, 7))
        host = rng.randint(problem.excess_bytes, int(problem.sizes.sum()))
        result = solve_dynprog(problem, None, host)
        best = brute_force_s(problem, host)
        if result.amounts is None:
            assert np.isinf(best)
            continue
        solved += 1
        assert result.amounts.sum() <= host
        assert makespan_s(problem, result.amounts) == pytest.approx(best, abs=TOLERANCE)
    assert solved > 100


def test_unrounded_and_fractional_never_get_slower_with_more_memory_or_bandwidth() -> None:
    rng = random.Random(14)
    for _ in range(40):
        chain = random_chain(rng, rng.randint(3, 7))
        problem = offload_problem(chain, None, paper_link(1.0))
        before = np.inf, np.inf
        for capacity in range(problem.floor_bytes, problem.peak_bytes + 1):
            now = _times(replace(problem, capacity_bytes=capacity))
            assert now[0] <= before[0] + TOLERANCE
            assert now[1] <= before[1] + TOLERANCE
            before = now
        capacity = (problem.floor_bytes + problem.peak_bytes) // 2
        before = np.inf, np.inf
        for rate in (0.25, 0.5, 0.7, 1.0, 1.5, 3.0, 10.0):
            faster = offload_problem(chain, chain.resident_bytes + capacity, paper_link(rate))
            now = _times(faster)
            assert now[0] <= before[0] + TOLERANCE
            assert now[1] <= before[1] + TOLERANCE
            before = now


def _times(problem: OffloadProblem) -> tuple[float, float]:
    amounts = solve_dynprog(problem, None).amounts
    assert amounts is not None
    return makespan_s(problem, amounts), fractional_optimum_s(problem)


def test_the_local_search_comes_close_to_the_best_ordered_set() -> None:
    """Whole transfers: against all sets; never better, seldom worse."""
    rng = random.Random(17)
    ratios = []
    for _ in range(150):
        problem = random_problem(rng, rng.randint(4, 9))
        best = brute_force_s(problem, whole=True)
        amounts, found = searched_amounts(problem, solve_dynprog(problem, 500).amounts)
        assert problem.fits(amounts)
        assert found == makespan_s(problem, amounts, whole=True)
        assert found >= best - TOLERANCE
        ratios.append(found / best)
    assert np.mean(ratios) < 1.001
    assert np.mean(np.array(ratios) > 1 + 1e-9) < 0.05


def test_slots_give_valid_sets_close_to_the_optimum() -> None:
    rng = random.Random(15)
    ratios = []
    for _ in range(100):
        problem = random_problem(rng, rng.randint(4, 9))
        best = brute_force_s(problem)
        result = solve_dynprog(problem, 50)
        if result.amounts is None:
            continue
        assert problem.fits(result.amounts)
        found = makespan_s(problem, result.amounts)
        assert found >= best - TOLERANCE
        ratios.append(found / best)
    assert len(ratios) > 80
    assert np.mean(ratios) < 1.02


def test_rounding_keeps_partial_sums() -> None:
    problem = random_problem(random.Random(16), 9)
    data = recurrence_data(problem, 7)
    n, unit = problem.stages, data.unit_bytes
    exact = np.cumsum(problem.sizes[:n]) / unit
    assert (np.cumsum(data.sizes) == np.ceil(exact)).all()
    moved = np.cumsum(problem.durations_s[:n]) * problem.to_host_bytes_per_s / unit
    assert (np.cumsum(data.moved_f) == np.floor(moved)).all()
    assert (data.movable <= (data.sizes > 0)).all()
