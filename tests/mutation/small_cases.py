"""The dynamic programs against exhaustive search on a few dozen tiny instances: mutants of them are
run against these, with the kernels as plain Python. The checks are the larger tests' own, so
the suite does not collect this file."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from memopt.reductions.chain_replay import replay_chain
from memopt.strategies.offload.dynprog import solve_dynprog
from memopt.strategies.offload.ordered import makespan_s, searched_amounts
from memopt.strategies.rotor import Revolve, Rotor, RotorFree, RotorOptimal
from tests.strategies.offload.oracle import TOLERANCE
from tests.strategies.offload.test_against_lp import check_ordered
from tests.strategies.offload.test_dynprog import brute_force_s, check_optimal, random_problem
from tests.strategies.rotor.chains import random_chain
from tests.strategies.rotor.test_brute_force import check_chain


@pytest.mark.parametrize("block", range(6))
def test_rotor(block: int) -> None:
    for seed in range(1000 + 5 * block, 1005 + 5 * block):
        check_chain(random_chain(seed))


def test_rotor_slots() -> None:
    """Tables by slots: plans within the budget, at their own figures, from the exact least."""
    for seed in range(6):
        chain = random_chain(seed)
        for kind in (Rotor, Revolve, RotorOptimal, RotorFree):
            strategy = kind(slots=7, exact_stages=0)
            least = strategy.smallest_budget(chain)
            assert least == kind(slots=None).smallest_budget(chain)
            last = float("inf")
            for budget in range(least, least + 24, 4):
                found = strategy.solve(chain, budget)
                timeline = replay_chain(chain, found.steps)
                assert timeline.peak_bytes == found.peak_bytes <= budget
                assert timeline.time_s == found.time_s <= last
                last = found.time_s


def test_dynprog() -> None:
    rng = random.Random(21)
    for _ in range(40):
        check_optimal(rng, rng.randint(2, 7))
    for _ in range(20):
        problem = random_problem(rng, rng.randint(2, 6))
        host = rng.randint(problem.excess_bytes, int(problem.sizes.sum()))
        amounts = solve_dynprog(problem, None, host).amounts
        best = brute_force_s(problem, host)
        if amounts is None:
            assert best == float("inf")
        else:
            assert amounts.sum() <= host
            assert makespan_s(problem, amounts) == pytest.approx(best, abs=TOLERANCE)


def test_ordered() -> None:
    """No-wait schedules equal the linear program's, and the search over sets is a search."""
    rng = random.Random(22)
    assert sum(check_ordered(rng, rng.randint(2, 6)) for _ in range(25)) > 10
    near = 0
    for _ in range(20):
        problem = random_problem(rng, rng.randint(4, 7))
        best = brute_force_s(problem, whole=True)
        amounts, found = searched_amounts(problem, solve_dynprog(problem, 500).amounts)
        assert problem.fits(amounts)
        assert found == makespan_s(problem, amounts, whole=True) >= best - TOLERANCE
        near += found <= best + TOLERANCE
        again, slower = searched_amounts(replace(problem), None, 0)
        assert not again.any()
        assert slower >= found - TOLERANCE
    assert near >= 17
