"""The bound and the plans against exhaustive search: recomputing x moving x implementations."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

import pytest

from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.solvers.binary_program import BinaryProgram
from memopt.solvers.running import Solver, SolverOptions
from memopt.strategies import Joint
from tests.fuzz.instances import with_figures
from tests.strategies.joint.exhaustive import TooLargeError, least_time

SAME = 1e-6
RATE = 1.0
LINK = Device(to_host_bytes_per_s=RATE)
MOST_OPERATORS = 7


@dataclass
class Compared:
    """What comparing with the optimum gave.

    Attributes:
        cells: budgets of graphs that were searched.
        optimal: in how many the strategy's plan is as fast as the optimum.
        too_large: budgets whose search was given up, which are no cells.
        slower: the others, in words.
        wrong: bounds above the optimum, plans below it, in words.
    """

    cells: int = 0
    optimal: int = 0
    too_large: int = 0
    slower: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def small_graph(seed: int) -> Graph | None:
    """A training step of few operators; None where it has too many."""
    rng = Random(seed)
    graph = random_graph(
        rng, rng.randint(2, 4), max_bytes=4, max_time_s=4, implementations=rng.random() < 0.6
    )
    return graph if len(graph.operators) <= MOST_OPERATORS else None


def compare(seeds: range) -> Compared:
    """Budgets from the smallest that the strategy names, below what the step takes as it is."""
    found = Compared()
    for seed in seeds:
        graph = small_graph(seed)
        if graph is None:
            continue
        strategy = Joint(changes=500)
        peak = replay(graph, store_all(graph)).peak_bytes
        least = strategy.solve(graph, 1, device=LINK).smallest_budget_bytes or peak
        thirds = {least + part * (peak - least) // 3 for part in range(3)}
        for budget in sorted(thirds - {peak}):
            try:
                optimum = least_time(graph, budget, RATE)
            except TooLargeError:
                found.too_large += 1
                continue
            solution = strategy.solve(graph, budget, device=LINK)
            label = f"graph {seed} within {budget}: optimum {optimum}, {solution.time_s}"
            found.cells += 1
            assert solution.time_s is not None, label
            if (solution.lower_bound_s or 0.0) > optimum * (1 + SAME):
                found.wrong.append(f"{label}, bound {solution.lower_bound_s}")
            if solution.time_s < optimum * (1 - SAME):
                found.wrong.append(f"{label}: faster")
            if solution.time_s <= optimum * (1 + SAME):
                found.optimal += 1
            else:
                found.slower.append(label)
    return found


def test_bounds_hold_and_plans_are_optimal_on_some() -> None:
    found = compare(range(20, 32))
    assert found.wrong == []
    assert found.cells >= 8
    assert found.optimal >= 0.95 * found.cells, found.slower


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_bounds_hold_and_plans_are_optimal_on_many(first: int) -> None:
    found = compare(range(first, first + 50))
    assert found.wrong == []
    assert found.optimal >= 0.95 * found.cells, found.slower


def test_figures_above_the_largest_of_the_solver(caplog: pytest.LogCaptureFixture) -> None:
    """HiGHS takes no number like a transfer of 1e21 s."""
    graph = with_figures(random_graph(Random(6), 3, max_bytes=4), size=lambda s: s * 2**38)
    slowest = Device(to_host_bytes_per_s=1e-9)
    peak = replay(graph, store_all(graph)).peak_bytes
    found = Joint(changes=50).solve(graph, peak - 2**38, device=slowest)
    assert found.plans
    assert found.stats["relaxation_rounds"]
    assert not caplog.records


def test_a_program_that_the_solver_refuses(caplog: pytest.LogCaptureFixture) -> None:
    program = BinaryProgram()
    program.add([(-1e16, program.amount(1.0))], -1.0)
    answer = program.solve(1, SolverOptions(Solver.HIGHS))
    assert answer.status is Status.UNKNOWN
    # The solver's words, not those of OR-Tools' failure to pass them on.
    assert "refuses the program, so there is no answer of it: HighsStatus" in caplog.text
