"""offload-graph on random training graphs: valid, within the budget, above its bound, and beside
an exhaustive search of programs that keep the graph's order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest

import memopt
from memopt.errors import InfeasibleBudgetError
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Instruction,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.liveness import store_all, with_frees
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.programs.validate import validate
from memopt.reductions.linearize import has_updates, linearize
from memopt.solvers import running
from memopt.strategies.budget_search import best_that_fits
from memopt.strategies.offload import graph as module
from memopt.strategies.offload.dynprog import DynProg, Greedy
from memopt.strategies.offload.graph import OffloadGraph
from memopt.strategies.offload.graph_schedule import Scheduled, schedule
from memopt.strategies.shared.graph_problem import Absence, GraphProblem, graph_problem
from tests.models.training_graphs import writing_back
from tests.strategies.monet.graphs import in_place_graph

SHARES = (0.0, 0.3, 0.7)


def random_device(rng: Random) -> Device:
    return Device(
        to_host_bytes_per_s=rng.choice([0.5, 1.0, 2.0, 5.0]),
        from_host_bytes_per_s=rng.choice([None, 1.0, 3.0]),
        duplex=rng.random() < 0.5,
        transfer_latency_s=rng.choice([0.0, 0.0, 0.5]),
    )


def budgets(problem: GraphProblem) -> Iterator[int]:
    for share in SHARES:
        yield problem.floor_bytes + int(share * (problem.peak_bytes - problem.floor_bytes))


@pytest.mark.parametrize("seed", range(60))
def test_valid_within_the_budget_and_above_the_bound(seed: int) -> None:
    rng = Random(seed)
    graph, device = random_graph(rng, rng.randint(3, 14), updates=seed % 3 == 0), random_device(rng)
    problem = graph_problem(graph, device)
    for budget in budgets(problem):
        solution = OffloadGraph(moves=20).solve(graph, budget, device=device)
        assert solution.program is not None
        assert validate(graph, solution.program, Budget(budget)) is None
        timeline = replay(graph, solution.program, device)
        assert solution.time_s == pytest.approx(timeline.time_s)
        assert solution.peak_bytes == timeline.peak_bytes <= budget
        assert solution.lower_bound_s is not None
        assert solution.lower_bound_s <= timeline.time_s * (1 + 1e-9)
        for chain in () if has_updates(graph) else (DynProg(), Greedy()):
            time_s = lowered_s(graph, chain, budget, device)
            assert timeline.time_s <= time_s * (1 + 1e-9)


def lowered_s(graph: Graph, strategy: DynProg | Greedy, budget: int, device: Device) -> float:
    """Time of a chain offloader's plan as the planner would lower it; infinite without one."""
    view = linearize(graph)

    def attempt(budget_bytes: int | None) -> Solution:
        return strategy.solve(view.chain, budget_bytes, device=device)

    found = best_that_fits(view, attempt, budget, 0)
    if found.steps is None:
        return math.inf
    program = view.lower(found.steps)
    if validate(graph, program, Budget(budget)) is not None:
        return math.inf
    return replay(graph, program, device).time_s


def test_below_the_floor_names_it() -> None:
    graph, device = random_graph(Random(3), 8), Device(to_host_bytes_per_s=1.0)
    floor = graph_problem(graph, device).floor_bytes
    assert floor < graph_problem(graph, device).peak_bytes
    solution = OffloadGraph().solve(graph, floor - 1, device=device)
    assert (solution.status, solution.smallest_budget_bytes) == (Status.INFEASIBLE, floor)


def test_host_budget() -> None:
    graph, device = random_graph(Random(3), 8), Device(to_host_bytes_per_s=1.0)
    problem = graph_problem(graph, device)
    with pytest.raises(InfeasibleBudgetError, match="host_budget_bytes=0 is too small"):
        OffloadGraph(host_budget_bytes=0).solve(graph, problem.floor_bytes, device=device)
    free = OffloadGraph().solve(graph, problem.floor_bytes, device=device)
    assert free.program is not None
    host = replay(graph, free.program, device).host_peak_bytes
    same = OffloadGraph(host_budget_bytes=host).solve(graph, problem.floor_bytes, device=device)
    assert same.program is not None
    assert replay(graph, same.program, device).host_peak_bytes <= host


def test_same_graph_same_plan() -> None:
    graph, device = random_graph(Random(5), 12), Device(to_host_bytes_per_s=1.0)
    budget = next(budgets(graph_problem(graph, device)))
    plans = [OffloadGraph().solve(graph, budget, device=device).program for _ in range(2)]
    assert plans[0] == plans[1]


def test_a_device_is_needed() -> None:
    with pytest.raises(ValueError, match="pass device="):
        OffloadGraph().solve(random_graph(Random(0), 4), 10)


@pytest.mark.parametrize("limit_s", [0.5, 3.5, 8.5, 30.5])
def test_the_time_limit_is_kept_to_one_schedule(
    limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that only schedules move, one second each."""
    clock = [0.0]

    def slow(*given: Any) -> Scheduled:
        clock[0] += 1.0
        return schedule(*given)

    for reader in (module, running):
        monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(module, "schedule", slow)
    graph, device = random_graph(Random(5), 12), Device(to_host_bytes_per_s=0.5)
    problem = graph_problem(graph, device)
    told: list[float] = []
    strategy = OffloadGraph()
    solution = strategy.solve(
        graph,
        problem.floor_bytes,
        device=device,
        time_limit_s=limit_s,
        progress=lambda fraction, _: told.append(fraction),
    )
    assert clock[0] <= limit_s + 1.0
    assert solution.program is not None
    assert validate(graph, solution.program, Budget(problem.floor_bytes)) is None
    assert told == sorted(told)
    assert all(0 <= fraction <= 1 for fraction in told)
    clock[0] = 0.0
    strategy.solve(graph, problem.floor_bytes, device=device)
    assert clock[0] > 32, "the limits above must be shorter than the search"


def test_an_interrupt_returns_the_best_plan_so_far() -> None:
    graph, device = random_graph(Random(5), 12), Device(to_host_bytes_per_s=0.5)
    problem = graph_problem(graph, device)

    def interrupt(fraction: float, _: str) -> None:
        if fraction > 0.1:
            raise KeyboardInterrupt

    solution = OffloadGraph().solve(graph, problem.floor_bytes, device=device, progress=interrupt)
    assert solution.program is not None
    assert validate(graph, solution.program, Budget(problem.floor_bytes)) is None


Choice = tuple[int, int, int]
"""Time points: copied out after the first, freed before the second, fetched before the third."""


def choices(problem: GraphProblem, absence: Absence) -> list[Choice | None]:
    found: list[Choice | None] = [None]
    for out in range(problem.produced[absence.tensor], absence.before - 1):
        for free in range(max(out, absence.after) + 1, absence.before):
            found += [(out, free, back) for back in range(free + 1, absence.before + 1)]
    return found


def program_of(problem: GraphProblem, chosen: dict[Absence, Choice]) -> Program:
    instructions: list[Instruction] = []
    for point, operator in enumerate(problem.operators):
        for absence, (_, free, _) in sorted(chosen.items(), key=lambda item: item[1][0]):
            if free == point:
                instructions.append(Free(absence.tensor))
        for absence, (_, _, back) in sorted(chosen.items(), key=lambda item: item[0].before):
            if back == point:
                instructions.append(SwapIn(absence.tensor))
        instructions.append(LossBoundary() if operator is None else Compute(operator, ()))
        instructions += [
            DropHost(absence.tensor) for absence in sorted(chosen) if absence.before == point
        ]
        leaving = [absence for absence in sorted(chosen) if chosen[absence][0] == point]
        leaving.sort(key=lambda absence: chosen[absence][1])
        instructions += [SwapOut(absence.tensor) for absence in leaving]
    return Program(with_frees(problem.graph, instructions))


def exhaustive_s(problem: GraphProblem, budget: int) -> float:
    """The least time of all choices, one fixed order among instructions of one point."""
    best = math.inf
    for combination in itertools.product(
        *(choices(problem, absence) for absence in problem.absences)
    ):
        chosen = {g: c for g, c in zip(problem.absences, combination, strict=True) if c is not None}
        program = program_of(problem, chosen)
        timeline = replay(problem.graph, program, problem.device)
        if timeline.peak_bytes <= budget:
            best = min(best, timeline.time_s)
    return best


def tiny(seed: int) -> GraphProblem | None:
    """A problem small enough for the exhaustive search, one absence to a tensor."""
    rng = Random(seed)
    problem = graph_problem(random_graph(rng, rng.randint(2, 4)), random_device(rng))
    size = math.prod(len(choices(problem, absence)) for absence in problem.absences)
    single = len({absence.tensor for absence in problem.absences}) == len(problem.absences)
    if not single or not 1 < size <= 4000 or problem.floor_bytes == problem.peak_bytes:
        return None
    return problem


def test_against_exhaustive_search() -> None:
    """The bound holds for the optimum, and the strategy is close to it."""
    ratios = []
    for problem in filter(None, map(tiny, range(400))):
        budget = next(budgets(problem))
        found = OffloadGraph().solve(problem.graph, budget, device=problem.device)
        optimum_s = exhaustive_s(problem, budget)
        assert found.time_s is not None
        assert found.lower_bound_s is not None
        assert math.isfinite(optimum_s)
        assert found.lower_bound_s <= optimum_s * (1 + 1e-9)
        ratios.append(found.time_s / optimum_s if optimum_s > 0 else 1.0)
    assert len(ratios) >= 50
    assert min(ratios) >= 1 - 1e-9
    assert sum(ratios) / len(ratios) <= 1.01
    assert max(ratios) <= 1.1


def test_computing_in_place_is_not_faster_than_the_bound() -> None:
    slow = Device(to_host_bytes_per_s=1e-3)
    larger = 0
    for seed in range(200):
        graph = in_place_graph(Random(seed), 4)
        plain = store_all(graph)
        program = with_in_place(graph, plain)
        figures = replay(graph, program, slow)
        larger += figures.peak_bytes < replay(graph, plain, slow).peak_bytes
        assert graph_problem(graph, slow).lower_bound_s(figures.peak_bytes) <= figures.time_s
    assert larger > 20


@pytest.mark.parametrize("seed", range(4))
def test_what_is_fetched_for_the_boundary_comes_beside_what_it_writes_back(seed: int) -> None:
    graph = writing_back(random_graph(Random(seed), 6 + seed), 300)
    device = random_device(Random(seed))
    asked: dict[str, Any] = {"strategy": "offload-graph", "device": device, "progress": False}
    for share in ("min", 0.6, 0.8):
        budget: Any = share
        try:
            plan = memopt.plan(graph, budget=budget, **asked)
        except InfeasibleBudgetError as error:
            plan = memopt.plan(graph, budget=error.smallest_budget_bytes, **asked)
        assert plan.budget is not None
        assert validate(graph, plan.program, Budget(plan.budget)) is None
