"""The search over windows: valid, within the budget, never slower; whole windows are exact."""

from __future__ import annotations

import time
from random import Random

import pytest

from memopt.models.budget import Budget
from memopt.models.status import Status
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.solvers.running import Deadline
from memopt.strategies.monet.intervals import IntervalModel, search_windows
from memopt.strategies.shared.chain_programs import rotor_programs
from memopt.strategies.shared.incumbent import Incumbent
from tests.strategies.monet.graphs import training_graph

SEEDS = (2, 3, 4, 5, 6, 8, 9, 11)
"""Steps for which Rotor has a plan below the peak."""


@pytest.mark.parametrize("seed", SEEDS)
def test_windows_keep_the_budget_and_reach_the_optimum_of_the_whole(seed: int) -> None:
    rng = Random(seed)
    graph = training_graph(rng, 6, seed % 2 == 0)
    peak = replay(graph, store_all(graph)).peak_bytes
    budgets = [int(share * peak) for share in (0.8, 0.85, 0.9)]
    plans = [(budget, rotor_programs(graph, budget)[0]) for budget in budgets]
    budget, program = next((budget, plan) for budget, plan in plans if plan is not None)
    best = Incumbent(graph, budget)
    best.offer(program)
    search_windows(best, None, budget, Deadline().within(20.0))
    found = best.program
    violation, figures = validate_and_replay(graph, found, Budget(budget), None)
    assert violation is None
    assert figures.time_s <= replay(graph, program).time_s
    status, _, bound = IntervalModel(graph, budget, None, 3).solve(20.0)
    # One window holds all operators.
    if status is Status.OPTIMAL:
        assert figures.time_s >= bound * (1 - 1e-9)
        assert figures.time_s <= max(bound, IntervalModel(graph, budget).solve(20.0)[2]) * (
            1 + 1e-6
        )


def test_no_time_and_an_interrupt_leave_the_program() -> None:
    def interrupt(fraction: float, what: str) -> None:
        raise KeyboardInterrupt

    graph = training_graph(Random(1), 6, True)
    program = store_all(graph)
    budget = replay(graph, program).peak_bytes
    for deadline in (Deadline().within(-1.0), Deadline(time.monotonic() + 9.0, interrupt)):
        best = Incumbent(graph, budget)
        best.offer(program)
        search_windows(best, None, budget, deadline)
        assert best.program == program
