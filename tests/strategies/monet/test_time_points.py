"""The relaxation with time points against the exact programs, and the solvers against each
other."""

from __future__ import annotations

from random import Random

import pytest

from memopt.models.budget import Budget
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.models.status import Status
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.solvers.running import Solver, SolverOptions
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.monet.strategy import Monet
from memopt.strategies.shared.time_points import TimePointModel
from tests.strategies.monet.graphs import training_graph


def drawn(seed: int, alternatives: bool) -> tuple[Graph, int, Random]:
    rng = Random(seed)
    graph = training_graph(rng, rng.randint(2, 5), alternatives)
    peak = replay(graph, store_all(graph)).peak_bytes
    return graph, rng.randint(peak // 2, peak), rng


@pytest.mark.parametrize("seed", range(40))
def test_the_relaxation_is_a_bound_whatever_the_time_points(seed: int) -> None:
    graph, budget, rng = drawn(seed, seed % 2 == 0)
    limit = budget - graph.resident_bytes
    exact = [MonetModel(graph).model.solve(limit)]
    if seed % 2:
        exact.append(CheckmateModel(graph).model.solve(limit))
    backward = range(graph.first_backward, len(graph.operators))
    last = 0.0
    for points in ((), tuple(sorted(rng.sample(list(backward), 2))), tuple(backward)):
        built = TimePointModel(graph, None, points)
        answer = built.model.solve(limit)
        for other in exact:
            if other.status is Status.OPTIMAL:
                assert answer.status is Status.OPTIMAL
                assert answer.bound <= other.objective
        if answer.status is Status.OPTIMAL and points != ():
            assert answer.objective >= last or len(points) == 2
        if answer.values:
            program = built.program(answer.values)
            peak = replay(graph, program).peak_bytes
            violation, figures = validate_and_replay(graph, program, Budget(peak), None)
            assert violation is None
            assert figures.time_s <= answer.objective
            last = answer.objective if not points else last


@pytest.mark.parametrize("seed", range(8))
def test_the_solvers_agree(seed: int) -> None:
    graph, budget, _ = drawn(seed, True)
    limit = budget - graph.resident_bytes
    for built in (MonetModel(graph), TimePointModel(graph)):
        for limit_bytes in (limit, None):
            answers = [built.model.solve(limit_bytes, SolverOptions(solver)) for solver in Solver]
            assert len({answer.status for answer in answers}) == 1
            for answer in answers:
                assert answer.objective == pytest.approx(answers[0].objective)
                assert answer.bound <= answer.objective * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(6))
def test_monet_on_a_large_graph_has_a_bound_and_a_plan_within_the_budget(seed: int) -> None:
    rng = Random(seed)
    graph = training_graph(rng, 20, seed % 2 == 0)
    peak = replay(graph, store_all(graph)).peak_bytes
    budget = int(0.8 * peak)
    solution = Monet(max_operators=12).solve(graph, budget, time_limit_s=4.0)
    assert solution.program is not None
    assert solution.time_s is not None
    assert solution.lower_bound_s is not None
    violation, figures = validate_and_replay(graph, solution.program, Budget(budget), None)
    assert violation is None
    assert solution.lower_bound_s <= figures.time_s == solution.time_s


def test_interrupted_it_keeps_the_plan_it_starts_from() -> None:
    def interrupt(fraction: float, what: str) -> None:
        raise KeyboardInterrupt

    graph = training_graph(Random(3), 20, False)
    budget = int(0.9 * replay(graph, store_all(graph)).peak_bytes)
    stopped = Monet(max_operators=12).solve(graph, budget, progress=interrupt)
    assert stopped.program is not None


def test_what_reads_a_tensor_that_nothing_may_write_is_not_chosen():
    """A packed index whose writer is left out: its reader must be, too."""
    x, y, packed, z = (
        Tensor("x", 1, TensorKind.INPUT),
        Tensor("y", 9),
        Tensor("p", 1),
        Tensor("z", 1),
    )
    write = Implementation("packed", 0.0, writes=(1, 2))
    read = Implementation("read", 0.0, reads=(2,))
    operators = (
        Operator("f", (0,), (1,), 1.0, implementations=(write,)),
        Operator("b", (1,), (3,), 1.0, phase=Phase.BACKWARD, implementations=(read,)),
    )
    graph = Graph((x, y, packed, z), operators, gradients=(3,))
    for names, time_s in (({"packed", "read"}, 0.0), ({"read"}, 2.0)):
        built = TimePointModel(graph, lambda _, name, names=names: name in names)
        answer = built.model.solve(100, SolverOptions(time_limit_s=5))
        assert replay(graph, built.program(answer.values)).time_s == time_s


def test_an_operator_that_an_implementation_makes_useless_bounds_nothing():
    """A time point at its run, and the exact program, which runs each operator once."""
    x, a, dy, wide, z = (
        Tensor("x", 1, TensorKind.INPUT),
        Tensor("a", 2),
        Tensor("dy", 1, TensorKind.GRADIENT),
        Tensor("wide", 50, TensorKind.GRADIENT),
        Tensor("z", 1, TensorKind.GRADIENT),
    )
    direct = Implementation("direct", 3.0, reads=(1, 2))
    operators = (
        Operator("f", (0,), (1,), 1.0),
        Operator("b", (1, 2), (3,), 1.0, phase=Phase.BACKWARD),
        Operator("c", (3,), (4,), 1.0, phase=Phase.BACKWARD, implementations=(direct,)),
    )
    graph = Graph((x, a, dy, wide, z), operators, gradients=(4,), tangents=(2,))
    answer = TimePointModel(graph, None, (1,)).model.solve(10, SolverOptions(time_limit_s=5))
    assert answer.objective == 4.0
    solution = Monet().solve(graph, 10 + graph.resident_bytes, time_limit_s=5)
    assert solution.time_s == solution.lower_bound_s == 4.0
