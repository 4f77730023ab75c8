"""The replay of ordered schedules and the bounds against linear programs over event times."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from memopt.models.device import Device
from memopt.strategies.offload.ordered import (
    fractional_optimum_s,
    makespan_s,
    ordered_schedule,
    per_operation_s,
)
from memopt.strategies.offload.problem import OffloadProblem, offload_problem
from tests.strategies.offload.oracle import (
    TOLERANCE,
    lp_makespan,
    ordered_lp_makespan,
    paper_link,
    random_chain,
)


def random_link(rng: random.Random) -> Device:
    if rng.random() < 0.6:
        return paper_link(rng.choice([0.5, 1, 2, 5]))
    rates = rng.choice([0.5, 1, 3]), rng.choice([0.5, 1, 2])
    return Device(to_host_bytes_per_s=rates[0], from_host_bytes_per_s=rates[1], duplex=False)


def check_ordered(rng: random.Random, stages: int) -> bool:
    """One random set of offloads; returns whether it fits."""
    chain, device = random_chain(rng, stages), random_link(rng)
    open_problem = offload_problem(chain, None, device)
    low, high = open_problem.floor_bytes, open_problem.peak_bytes
    budget = chain.resident_bytes + rng.randint(max(0, low - 2), high)
    problem = offload_problem(chain, budget, device)
    movable = np.flatnonzero(problem.movable)
    amounts = problem.amounts([j for j in movable if rng.random() < 0.7])
    if rng.random() < 0.3 and amounts.any():
        last = int(np.flatnonzero(amounts)[-1])
        amounts[last] = rng.randint(1, int(amounts[last]))
    expected = ordered_lp_makespan(
        chain, budget, device, {int(j): int(amounts[j]) for j in movable}
    )
    found = makespan_s(problem, amounts)
    assert (expected is None) == math.isinf(found)
    if expected is None:
        return False
    assert found == pytest.approx(expected, abs=TOLERANCE)
    whole = ordered_schedule(problem, amounts, whole=True)
    assert whole.makespan_s >= found - TOLERANCE
    check_whole(problem, amounts, whole)
    assert per_operation_s(problem) <= found + TOLERANCE
    return True


def check_whole(problem: OffloadProblem, amounts: np.ndarray, schedule) -> None:
    """Memory of the whole-transfer schedule at every start, from its times alone."""
    n = problem.stages
    ends = schedule.starts_s + problem.durations_s
    moved = np.flatnonzero(amounts)
    for k in range(2 * n):
        i = k if k < n else 2 * n - 1 - k
        away = 0
        for j in moved:
            left = max(schedule.offloads_s[j, 1], ends[j]) <= schedule.starts_s[k]
            still = schedule.prefetches_s[j, 0] >= ends[k] - 1e-12
            away += int(amounts[j]) if left and still and j != i else 0
        assert problem.need_bytes[k] <= away
        if k >= n:
            for j in (i, i + 1):
                assert schedule.prefetches_s[j, 1] <= schedule.starts_s[k]
    transfers = [schedule.offloads_s[j] for j in moved] + [schedule.prefetches_s[j] for j in moved]
    transfers = sorted(tuple(t) for t in transfers)
    for (_, end), (start, _) in itertools.pairwise(transfers):
        assert start >= end - 1e-9


def check_fractional(rng: random.Random, stages: int) -> bool:
    """Theorem 2 against a program that may move any data in any parts at any time."""
    chain, device = random_chain(rng, stages), random_link(rng)
    open_problem = offload_problem(chain, None, device)
    budget = chain.resident_bytes + rng.randint(
        max(0, open_problem.floor_bytes - 2), open_problem.peak_bytes
    )
    problem = offload_problem(chain, budget, device)
    movable = [int(j) for j in np.flatnonzero(problem.movable)]
    expected = lp_makespan(chain, budget, device, None, movable)
    found = fractional_optimum_s(problem)
    assert (expected is None) == math.isinf(found)
    if expected is not None:
        assert found == pytest.approx(expected, abs=TOLERANCE)
    return expected is not None


def test_ordered_replay_equals_the_lp() -> None:
    rng = random.Random(1)
    fitting = sum(check_ordered(rng, rng.randint(2, 7)) for _ in range(300))
    assert fitting >= 100


def test_fractional_greedy_equals_the_lp() -> None:
    rng = random.Random(2)
    assert sum(check_fractional(rng, rng.randint(2, 7)) for _ in range(200)) >= 100


@pytest.mark.slow
def test_ordered_replay_equals_the_lp_on_thousands() -> None:
    rng = random.Random(3)
    assert sum(check_ordered(rng, rng.randint(2, 8)) for _ in range(4000)) >= 1500


@pytest.mark.slow
def test_fractional_greedy_equals_the_lp_on_thousands() -> None:
    rng = random.Random(4)
    assert sum(check_fractional(rng, rng.randint(2, 8)) for _ in range(2000)) >= 1000
