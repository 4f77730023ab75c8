"""The search over windows: valid, within the budget, never slower; whole windows are exact."""

from __future__ import annotations

import time
from random import Random

import pytest

from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.validate_and_replay import judge
from memopt.strategies.base import Status
from memopt.strategies.monet.incumbent import rotor_program
from memopt.strategies.monet.intervals import IntervalModel
from memopt.strategies.monet.window_search import improved
from tests.monet.graphs import training_graph


@pytest.mark.parametrize("seed", range(8))
def test_windows_keep_the_budget_and_reach_the_optimum_of_the_whole(seed: int) -> None:
    rng = Random(seed)
    graph = training_graph(rng, 6, seed % 2 == 0)
    peak = replay(graph, store_all(graph)).peak_bytes
    budget = int(0.8 * peak)
    program = rotor_program(graph, budget)[0]
    if program is None:
        return
    found, _ = improved(graph, None, program, budget, time.monotonic() + 20.0)
    violation, figures = judge(graph, None, found, budget, None)
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
    late = time.monotonic() - 1.0
    assert improved(graph, None, program, budget, late)[0] == program
    soon = time.monotonic() + 9.0
    assert improved(graph, None, program, budget, soon, progress=interrupt)[0] == program
