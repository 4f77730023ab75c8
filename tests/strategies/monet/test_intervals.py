"""The retention-interval program against a brute force over its own class."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest

from memopt.errors import InvalidProgramError
from memopt.models.budget import Budget
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.models.variants import variant
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies.monet.intervals import IntervalModel, program_of, runs_of
from tests.strategies.monet.graphs import training_graph, with_one_gradient_choices


def brute_force_s(graph: Graph, budget: int) -> float:
    """The least time over all choices of at most one more run per operator, scored by replay."""
    first = graph.first_backward
    stages = range(len(graph.operators) - first)
    options: list[list[tuple[tuple[int, int, str | None], ...]]] = []
    for i, operator in enumerate(graph.operators):
        names = [None, *(choice.name for choice in operator.implementations)]
        own = -1 if i < first else i - first
        parts = [n for n in names if set(variant(operator, n).writes) < set(operator.writes)]
        runs = [((own, i, name),) for name in names]
        if i >= first:
            runs += [((own, i, a), (own, i, b)) for a in parts for b in parts]
        if i < first and operator.recomputable:
            runs += [
                ((own, i, name), (k, i, other)) for name in names for k in stages for other in names
            ]
        options.append(runs)

    def seconds(picked: tuple[tuple[tuple[int, int, str | None], ...], ...]) -> float:
        return sum(
            variant(graph.operators[i], name).time_s for runs in picked for _, i, name in runs
        )

    for picked in sorted(product(*options), key=seconds):
        try:
            runs = sorted((run for runs in picked for run in runs), key=lambda run: run[:2])
            program = program_of(graph, tuple(runs))
            timeline = replay(graph, program)
        except InvalidProgramError:
            continue
        if timeline.peak_bytes <= budget:
            return timeline.time_s
    return float("inf")


def solved_as_brute_force(graph: Graph, budget: int) -> tuple[Program, float] | None:
    """The program found and its time, checked against brute force; None where neither has one."""
    status, runs, bound = IntervalModel(graph, budget).solve()
    best = brute_force_s(graph, budget)
    if status is Status.INFEASIBLE:
        assert best == float("inf")
        return None
    assert status is Status.OPTIMAL
    assert runs is not None
    assert bound == pytest.approx(best)
    program = program_of(graph, runs)
    violation, figures = validate_and_replay(graph, program, Budget(budget), None)
    assert violation is None
    assert figures.time_s == pytest.approx(best)
    assert runs_of(graph, program) == runs
    return program, best


@pytest.mark.parametrize("seed", range(30))
def test_the_optimum_is_brute_force_over_its_class(seed: int) -> None:
    rng = Random(seed)
    alternatives = seed % 3 == 0
    graph = training_graph(rng, 2 if alternatives else 4, alternatives)
    peak = replay(graph, store_all(graph)).peak_bytes
    solved_as_brute_force(graph, rng.randint(peak // 2, peak))


@pytest.mark.parametrize("seed", range(16))
def test_gradients_written_one_by_one_are_brute_force_too(seed: int) -> None:
    rng = Random(seed)
    graph = with_one_gradient_choices(training_graph(rng, rng.randint(1, 2), False), rng)
    peak = replay(graph, store_all(graph)).peak_bytes
    budget = rng.randint(2 * peak // 3, peak)
    solved = solved_as_brute_force(graph, budget)
    if solved is None:
        budget = peak
        solved = solved_as_brute_force(graph, budget)
    assert solved is not None
    program, best = solved
    built = IntervalModel(graph, budget)
    assert built.start(runs_of(graph, program), free=set())
    assert built.solve()[2] == pytest.approx(best)


@pytest.mark.parametrize("seed", range(8))
def test_it_starts_from_a_program_and_keeps_what_is_fixed(seed: int) -> None:
    rng = Random(seed)
    graph = random_graph(rng, 8) if seed % 2 else training_graph(rng, 6, True)
    peak = replay(graph, store_all(graph)).peak_bytes
    runs = runs_of(graph, store_all(graph))
    assert replay(graph, program_of(graph, runs)).peak_bytes == peak
    built = IntervalModel(graph, peak)
    assert built.start(runs, free=set())
    status, found, _ = built.solve()
    assert status is Status.OPTIMAL
    assert found is not None
    forward = {run for run in runs if run[0] < 0}
    assert forward <= set(found)
