"""Collectives started early: the pass's laws, and all bounds against exhaustive search."""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise
from random import Random

import pytest

import memopt
from memopt.errors import InvalidProgramError, MemoptError
from memopt.models.bounds import (
    memory_lower_bound,
    needed_operators,
    overlapped_bound,
    time_lower_bound,
)
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.passes.early_collectives import with_early_collectives
from memopt.programs.instructions import Compute, Free
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.strategies import Strategy
from tests.brute_force.program_search import ProgramSearch, Rules
from tests.brute_force.sweep import strategies
from tests.network.search import graph_with_collectives, least_time
from tests.network.test_replay import GRAPH, W2
from tests.random_programs import random_program


def test_prefetched_where_the_budget_allows() -> None:
    program = store_all(GRAPH)
    timeline = replay(GRAPH, program)
    free = with_early_collectives(GRAPH, program, None)
    assert replay(GRAPH, free).time_s == 11.0
    started = list(free)
    assert started.index(Compute(2, (W2,))) < started.index(Compute(1, (4,)))
    # W1 and W2 at once do not fit: not even one byte less than that.
    both = replay(GRAPH, free).peak_bytes
    tight = with_early_collectives(GRAPH, program, both - 1)
    assert replay(GRAPH, tight).peak_bytes <= both - 1
    assert with_early_collectives(GRAPH, program, timeline.peak_bytes) == program


def test_a_gradients_memory_is_given_back_when_it_is_sent() -> None:
    """A Free that waits moves behind what can be computed meanwhile."""
    for seed in range(200):
        graph = graph_with_collectives(Random(seed), 3)
        program = store_all(graph)
        moved = with_early_collectives(graph, program, None)
        if moved != program and _frees(moved) != _frees(program):
            waits = replay(graph, program).stall_s, replay(graph, moved).stall_s
            assert sum(waits[1]) < sum(waits[0])
            return
    pytest.fail("no Free moved in any of 200 graphs")


def _frees(program: memopt.Program) -> list[int]:
    return [i for i, x in enumerate(program) if isinstance(x, Free)]


@pytest.mark.parametrize("seed", range(40))
def test_laws(seed: int) -> None:
    rng = Random(seed)
    graph = graph_with_collectives(rng, rng.randint(2, 8))
    device = Device(to_host_bytes_per_s=9.0)
    program = random_program(rng, graph, recomputations=3, swaps=2, reorder=False)
    before = replay(graph, program, device)
    for budget in (before.peak_bytes, before.peak_bytes + rng.randint(1, 30), None):
        moved = with_early_collectives(graph, program, budget, device)
        after = replay(graph, moved, device)
        host = Budget(budget, before.host_peak_bytes)
        assert validate(graph, moved, host) is None
        assert after.time_s <= before.time_s
        assert sorted(map(str, moved)) == sorted(map(str, program))
    assert with_early_collectives(graph, program, 1, device) is not None


def check_bounds(graph: Graph, asked: Iterable[Strategy]) -> int:
    """How many plans of the strategies were compared with the optimum."""
    compared = 0
    most, least = replay(graph, store_all(graph)).peak_bytes, memory_lower_bound(graph)
    for budget in sorted({most, (most + least) // 2, least}):
        optimum = least_time(graph, budget)
        if optimum < math.inf:
            serial = ProgramSearch(graph, Rules(in_order=False)).least_time(budget)
            assert overlapped_bound(graph, serial) <= optimum + 1e-9
            assert time_lower_bound(graph) <= optimum + 1e-9 <= serial + 2e-9
        for strategy in asked:
            try:
                plan = memopt.plan(graph, budget=budget, strategy=strategy, progress=False)
            except InvalidProgramError:
                raise
            except (MemoptError, ValueError):
                continue
            if plan.host_peak_bytes:
                continue  # The search moves nothing.
            compared += 1
            assert plan.lower_bound_s <= optimum + 1e-9 <= plan.step_time_s + 2e-9
            if plan.status == "optimal":
                assert plan.step_time_s <= optimum * (1 + 1e-6)
    return compared


def small(seed: int) -> Graph | None:
    """A graph small enough, whose operators all must run: chains' bounds are of such programs."""
    graph = graph_with_collectives(Random(seed), 2)
    whole = len(needed_operators(graph)) == len(graph.operators)
    return graph if whole and len(graph.operators) <= 6 else None


def test_no_bound_is_above_an_optimum() -> None:
    graph = small(next(seed for seed in range(100) if small(seed)))
    assert graph is not None
    quick = [x for x in strategies() if x.name in ("store-all", "rotor", "dynprog", "olla")]
    assert check_bounds(graph, quick) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 50))
def test_no_bound_is_above_an_optimum_at_random(first: int) -> None:
    graphs = [small(seed) for seed in range(first, first + 50)]
    found = [check_bounds(graph, strategies()) for graph in graphs if graph is not None]
    assert sum(found) > 200


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 1000, 250))
def test_never_faster_than_the_fastest(first: int) -> None:
    optimal = compared = 0
    for seed in range(first, first + 250):
        graph = graph_with_collectives(Random(seed), 2)
        if len(graph.operators) > 7:
            continue
        program = store_all(graph)
        peak = replay(graph, program).peak_bytes
        times = []
        for budget in (peak, peak + 10, peak + 1000):
            moved = with_early_collectives(graph, program, budget)
            times.append(replay(graph, moved).time_s)
            optimum = least_time(graph, budget)
            assert optimum <= times[-1] + 1e-9
            optimal += times[-1] <= optimum + 1e-9
            compared += 1
        assert all(later <= one + 1e-9 for one, later in pairwise([times[0], times[2]]))
    assert optimal > 0.7 * compared
