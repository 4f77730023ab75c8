"""Graphs without a backward: planned, within the budget, with a bound that exhaustive search
confirms."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from benchmarks.forward_graphs import row_of
from memopt import plan
from memopt.errors import MemoptError
from memopt.models.bounds import time_lower_bound
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.solvers.running import Deadline
from memopt.strategies import Auto, Checkmate, CheckmateRounding, Monet
from memopt.strategies.base import Strategy
from memopt.strategies.monet.forward import ForwardSearch
from memopt.strategies.monet.forward_bound import ForwardBound
from memopt.strategies.shared.incumbent import Incumbent
from tests.brute_force.program_search import ProgramSearch, Rules
from tests.strategies.monet.forward_graphs import forward_graph
from tests.strategies.monet.layered_graphs import layered_graph

SHARES = (0.9, 0.75, 0.6)


def peak_of(graph: Graph) -> int:
    return replay(graph, store_all(graph)).peak_bytes


def solved(graph: Graph, strategy: Strategy, budget: int, limit_s: float = 20.0) -> Solution:
    """A solution, its plan validated and its figures replayed."""
    found = strategy.solve(graph, budget, time_limit_s=limit_s)
    if found.program is not None:
        violation, figures = validate_and_replay(graph, found.program, Budget(budget), Device())
        assert violation is None
        assert figures.time_s == found.time_s
        assert found.lower_bound_s is not None
        assert found.lower_bound_s <= figures.time_s
    return found


@pytest.mark.parametrize("seed", range(24))
def test_bound_below_the_optimum_below_what_is_found(seed: int) -> None:
    rng = Random(seed)
    graph = forward_graph(rng, rng.randint(6, 9))
    search = ProgramSearch(graph)
    budget = int(rng.choice(SHARES) * (peak_of(graph) - graph.resident_bytes))
    budget += graph.resident_bytes
    least_s = search.least_time(budget)
    forward, best = ForwardSearch(graph), Incumbent(graph, budget)
    bound = forward.bound(best, Deadline().within(30.0))
    assert not bound.infeasible or least_s == inf
    assert bound.bound_s <= least_s * (1 + 1e-6) or bound.infeasible
    forward.search(best, 0.0, range(1), Deadline().within(30.0))
    assert best.time_s >= least_s * (1 - 1e-9)


def test_all_time_points_and_watched_runs_together_are_a_bound() -> None:
    for seed in range(12):
        rng = Random(100 + seed)
        graph = forward_graph(rng, 8)
        budget = graph.resident_bytes + int(0.7 * (peak_of(graph) - graph.resident_bytes))
        least_s = ProgramSearch(graph).least_time(budget)
        forward = ForwardSearch(graph)
        every = set(forward.order)
        bound = ForwardBound(
            graph,
            budget,
            lambda s: [10**9] * len(s),
            Deadline().within(30.0),
            at=every,
            watched={(k, i) for k in every for i in every if i < k},
        )
        bound.solved()
        assert bound.infeasible <= (least_s == inf)
        assert bound.infeasible or bound.bound_s <= least_s * (1 + 1e-6)


@pytest.mark.parametrize("strategy", [Monet(), Checkmate()], ids=lambda s: s.name)
def test_most_tiny_graphs_end_at_the_proved_optimum(strategy: Strategy) -> None:
    optimal = again = 0
    for seed in range(14):
        graph = forward_graph(Random(seed), 8, plain=True)
        search = ProgramSearch(graph, Rules(drops=False))
        budget = (search.smallest_peak() + 2 * peak_of(graph)) // 3
        found, least_s = solved(graph, strategy, budget), search.least_time(budget)
        if found.status is Status.INFEASIBLE:
            assert least_s == inf
            continue
        assert found.lower_bound_s is not None
        assert found.time_s is not None
        assert found.lower_bound_s * (1 - 1e-6) <= least_s <= found.time_s * (1 + 1e-9)
        optimal += found.status is Status.OPTIMAL and found.time_s == pytest.approx(least_s)
        again += least_s > time_lower_bound(graph)
    assert again >= 4
    assert optimal >= 12


@pytest.mark.parametrize("strategy", [Monet(), CheckmateRounding()], ids=lambda s: s.name)
def test_the_smallest_budget_that_is_named_has_a_plan(strategy: Strategy) -> None:
    graph = layered_graph(14, 3)
    found = solved(graph, strategy, peak_of(graph) // 4, 5.0)
    named = found.smallest_budget_bytes
    assert not found.plans
    assert named is not None
    assert found.smallest is not None
    assert solved(graph, strategy, named, 5.0).plans


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.8])
def test_large_layered_graphs_have_a_plan_near_the_bound(share: float) -> None:
    _, found = row_of("", layered_graph(250, 0), share, 60.0)
    assert found.gap is not None
    assert found.gap < 0.04
    assert found.lower_bound_s is not None
    assert found.lower_bound_s > time_lower_bound(layered_graph(250, 0))


def test_a_hundred_operators_end_with_a_plan_and_a_bound() -> None:
    graph = layered_graph(100, 10)
    found = solved(graph, Checkmate(), int(0.8 * peak_of(graph)), 40.0)
    assert found.status is Status.OPTIMAL
    assert found.time_s is not None
    assert found.time_s > time_lower_bound(graph)


def test_auto_asks_those_that_run_operators_again_where_there_is_no_backward() -> None:
    graph = layered_graph(40, 3)
    found = solved(graph, Auto(), int(0.9 * peak_of(graph)), 8.0)
    asked = [name for name, *_ in found.stats["tried"]]
    assert asked[:2] == ["store-all", "monet"]
    assert found.plans
    assert any("rotor lowers no memory" in reason for reason in found.stats["refused"])


@pytest.mark.parametrize("strategy", ["rotor", "olla", "rotor-menus"])
def test_strategies_that_run_nothing_again_say_what_to_use(strategy: str) -> None:
    graph = layered_graph(20, 0)
    with pytest.raises(MemoptError, match='use strategy="monet"'):
        plan(graph, budget=peak_of(graph) // 2, strategy=strategy, progress=False)
