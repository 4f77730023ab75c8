"""offload-exact against an exhaustive search over event times."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.status import Status
from memopt.strategies.offload import DynProg, OffloadExact
from memopt.strategies.offload.problem import offload_problem
from tests.strategies.offload.oracle import TOLERANCE, paper_link, random_chain
from tests.strategies.offload.search import least_makespan
from tests.strategies.offload.validate_offload import validate_offload


def check(rng: random.Random, stages: int, device: Device) -> None:
    chain = random_chain(rng, stages)
    open_problem = offload_problem(chain, None, device)
    budget = chain.resident_bytes + rng.randint(open_problem.floor_bytes, open_problem.peak_bytes)
    movable = [int(j) for j in np.flatnonzero(open_problem.movable)]
    solution = OffloadExact().solve(chain, budget, device=device)
    expected = least_makespan(chain, budget, device, movable)
    assert expected is not None
    if solution.stats.get("proved", True):
        found = solution.stats.get("exact_time_s", solution.time_s)
        assert found == pytest.approx(expected, abs=TOLERANCE)
    assert solution.stats.get("proved", True)
    assert solution.lower_bound_s is not None
    assert solution.time_s is not None
    assert solution.lower_bound_s <= expected + TOLERANCE
    assert solution.time_s >= expected - TOLERANCE


def test_equals_the_search() -> None:
    rng = random.Random(21)
    for _ in range(60):
        check(rng, rng.randint(2, 5), paper_link(rng.choice([0.5, 1, 2])))


def test_equals_the_search_with_both_directions_at_once_and_latency() -> None:
    rng = random.Random(22)
    device = Device(to_host_bytes_per_s=1.0, from_host_bytes_per_s=2.0, transfer_latency_s=0.5)
    for _ in range(25):
        check(rng, rng.randint(2, 4), device)
    half = dataclasses.replace(device, duplex=False)
    for _ in range(25):
        check(rng, rng.randint(2, 4), half)


@pytest.mark.slow
def test_equals_the_search_on_hundreds() -> None:
    rng = random.Random(23)
    for _ in range(600):
        check(rng, rng.randint(2, 6), paper_link(rng.choice([0.5, 1, 2, 5])))


def test_never_slower_with_more_memory_or_bandwidth() -> None:
    rng = random.Random(24)
    for _ in range(5):
        chain = random_chain(rng, 5)
        problem = offload_problem(chain, None, paper_link(1))
        before = np.inf
        for capacity in range(problem.floor_bytes, problem.peak_bytes + 1):
            solution = OffloadExact().solve(
                chain, chain.resident_bytes + capacity, device=paper_link(1)
            )
            now = solution.stats.get("exact_time_s", solution.time_s)
            assert now <= before + TOLERANCE
            before = now
        budget = chain.resident_bytes + (problem.floor_bytes + problem.peak_bytes) // 2
        before = np.inf
        for rate in (0.5, 1.0, 2.0, 4.0):
            solution = OffloadExact().solve(chain, budget, device=paper_link(rate))
            now = solution.stats.get("exact_time_s", solution.time_s)
            assert now <= before + TOLERANCE
            before = now


def test_same_plan_twice() -> None:
    chain = random_chain(random.Random(25), 7)
    problem = offload_problem(chain, None, paper_link(1))
    budget = chain.resident_bytes + (problem.floor_bytes + problem.peak_bytes) // 2
    first, second = (
        OffloadExact().solve(chain, budget, device=paper_link(1)).steps for _ in range(2)
    )
    assert first == second


def test_refuses_long_chains() -> None:
    chain = random_chain(random.Random(26), 80)
    assert "dynprog" in (OffloadExact().why_not(chain) or "")
    with pytest.raises(ValueError, match="max_stages=64"):
        OffloadExact().solve(chain, 10, device=paper_link(1))
    assert OffloadExact(max_stages=100).why_not(chain) is None


def test_stops_in_time_with_a_plan_and_a_bound() -> None:
    chain = random_chain(random.Random(27), 40)
    problem = offload_problem(chain, None, paper_link(2.3))
    budget = chain.resident_bytes + (problem.floor_bytes + problem.peak_bytes) // 2
    solution = OffloadExact(effort=0.01).solve(chain, budget, device=paper_link(2.3))
    assert solution.status in (Status.FEASIBLE, Status.OPTIMAL)
    assert solution.lower_bound_s is not None
    assert solution.time_s is not None
    assert solution.lower_bound_s <= solution.time_s


def test_sixty_stages() -> None:
    """As a strategy: a plan within the budget, no slower than DynProg's, and a bound."""
    chain, device = random_chain(random.Random(28), 60), paper_link(1.0)
    problem = offload_problem(chain, None, device)
    budget = chain.resident_bytes + (2 * problem.floor_bytes + problem.peak_bytes) // 3
    solution = OffloadExact(effort=0.3).solve(chain, budget, device=device)
    other = DynProg().solve(chain, budget, device=device)
    assert solution.steps is not None
    assert validate_offload(chain, solution.steps, Budget(budget)) is None
    assert solution.time_s is not None
    assert other.time_s is not None
    assert solution.lower_bound_s is not None
    assert solution.lower_bound_s <= solution.time_s <= other.time_s * (1 + 1e-9)
