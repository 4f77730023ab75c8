"""What the 0-1 programs count otherwise than replay proves nothing."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

import memopt
from memopt.models.bounds import time_lower_bound
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.models.status import Status
from memopt.programs.instructions import Compute, LossBoundary
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.lower import without_unread_reruns
from memopt.strategies.monet.checkmate import CheckmateModel
from memopt.strategies.monet.checkmate_strategies import Checkmate, CheckmateRounding
from memopt.strategies.monet.graph_strategy import counted_exactly
from memopt.strategies.monet.ilp import MonetModel
from memopt.strategies.monet.rotor_menus import RotorMenus
from memopt.strategies.monet.strategy import Monet
from memopt.strategies.shared.time_points import TimePointModel
from tests.brute_force.program_search import ProgramSearch, Rules
from tests.strategies.monet.graphs import in_place_graph, training_graph, with_one_gradient_choices


def two_outputs() -> Graph:
    """A backward operator needs p, made of a, and q, made of b; one operator makes a and b. With
    neither held over the loss, a is best made and used before b is made."""
    tensors = [
        Tensor("x", 1, TensorKind.INPUT),
        Tensor("a", 6),
        Tensor("b", 6),
        Tensor("p", 3),
        Tensor("q", 3),
        Tensor("y", 1),
        Tensor("dy", 1, TensorKind.GRADIENT),
        Tensor("dx", 1, TensorKind.GRADIENT),
    ]
    operators = [
        Operator("make", (0,), (1, 2), 1.0),
        Operator("p", (1,), (3,), 1.0, 6),
        Operator("q", (2,), (4,), 1.0, 6),
        Operator("y", (3, 4), (5,), 1.0),
        Operator("dx", (3, 4, 6), (7,), 1.0, phase=Phase.BACKWARD),
    ]
    return Graph(tensors, operators, (5,), (7,), (6,), tangents_held=False, boundary_bytes=18)


def test_an_operator_with_two_outputs_may_run_once_for_each() -> None:
    graph = two_outputs()
    search = ProgramSearch(graph, Rules(drops=False))
    budget = search.smallest_peak()
    # The 0-1 program runs an operator at most once before each other.
    built = CheckmateModel(graph)
    assert built.model.solve(budget - graph.resident_bytes).status is Status.INFEASIBLE
    assert not counted_exactly(graph)
    assert Checkmate().solve(graph, budget, time_limit_s=10.0).status is not Status.INFEASIBLE


@pytest.mark.parametrize("kind", [Checkmate, CheckmateRounding])
def test_checkmate_bounds_the_whole_of_a_merged_graph(
    kind: type[Checkmate | CheckmateRounding],
) -> None:
    graph = training_graph(Random(3), 14, False)
    budget = int(0.8 * replay(graph, store_all(graph)).peak_bytes)
    best_s = Monet().solve(graph, budget, time_limit_s=20.0).time_s
    found = kind(max_operators=8).solve(graph, budget, time_limit_s=20.0)
    assert best_s is not None
    assert found.lower_bound_s is not None
    assert time_lower_bound(graph) < found.lower_bound_s <= best_s * (1 + 1e-6)


def test_what_counts_is_as_the_papers_have_it() -> None:
    plain = training_graph(Random(4), 4, False)
    assert counted_exactly(plain)
    assert not counted_exactly(in_place_graph(Random(4), 4))
    assert not counted_exactly(with_one_gradient_choices(plain, Random(4)))
    assert not counted_exactly(replace(plain, gradients=()))


@pytest.mark.parametrize("strategy", [Monet(), Checkmate()])
def test_no_bound_is_above_plans_in_place(strategy: Monet | Checkmate) -> None:
    bounded = 0
    for seed in range(10):
        rng = Random(seed)
        graph = in_place_graph(rng, rng.randint(2, 4))
        once = Rules(forward_again=True, after_boundary=True, drops=False)
        search = ProgramSearch(graph, once if isinstance(strategy, Monet) else Rules(drops=False))
        least_bytes = search.smallest_peak()
        most_bytes = replay(graph, store_all(graph)).peak_bytes
        for budget in {least_bytes, (least_bytes + most_bytes) // 2}:
            solution = strategy.solve(graph, budget, time_limit_s=10.0)
            assert solution.status is not Status.INFEASIBLE
            if solution.lower_bound_s is not None:
                assert solution.lower_bound_s <= search.least_time(budget) * (1 + 1e-9)
                bounded += 1
    assert bounded > 5


def test_without_a_backward_there_is_no_loss_to_hold() -> None:
    tensors = [Tensor("x", 1, TensorKind.INPUT), Tensor("y", 2)]
    operator = Operator("y", (0,), (1,), 1.0)
    graph = Graph(tensors, [operator], (1,), boundary_bytes=50)
    for built in (MonetModel(graph), CheckmateModel(graph), TimePointModel(graph)):
        assert built.model.solve(2).values
    assert memopt.plan(graph, budget="min", strategy="monet", progress=False).budget == 3


def test_a_tangent_that_nothing_reads_goes_at_the_boundary() -> None:
    tensors = [
        Tensor("x", 1, TensorKind.INPUT),
        Tensor("y", 1),
        Tensor("dy", 5, TensorKind.GRADIENT),
        Tensor("dx", 4, TensorKind.GRADIENT),
    ]
    operators = [
        Operator("y", (0,), (1,), 1.0),
        Operator("dx", (0,), (3,), 1.0, phase=Phase.BACKWARD),
    ]
    graph = Graph(tensors, operators, (1,), (3,), (2,), tangents_held=False)
    assert CheckmateModel(graph).model.solve(6).values


def test_a_bound_spares_what_may_not_run_twice_and_nothing_needs() -> None:
    tensors = [Tensor("x", 1, TensorKind.INPUT), Tensor("unread", 2), Tensor("y", 1)]
    operators = [
        Operator("unread", (0,), (1,), 5.0, recomputable=False),
        Operator("y", (0,), (2,), 1.0),
    ]
    answer = TimePointModel(Graph(tensors, operators, (2,))).model.solve(None)
    assert answer.values
    answer = TimePointModel(Graph(tensors, operators, (2,))).model.solve(99)
    assert answer.bound == 1.0


def test_a_second_run_that_writes_a_result_first_stays() -> None:
    tensors = [
        Tensor("x", 1, TensorKind.INPUT),
        Tensor("y", 1),
        *(Tensor(name, 1, TensorKind.GRADIENT) for name in ("dy", "dx", "dw")),
    ]
    choices = (Implementation("dx", 1.0, writes=(3,)), Implementation("dw", 1.0, writes=(4,)))
    operators = [
        Operator("y", (0,), (1,), 1.0),
        Operator("b", (2,), (3, 4), 1.0, phase=Phase.BACKWARD, implementations=choices),
    ]
    graph = Graph(tensors, operators, (1,), (3, 4), (2,))
    runs = [Compute(0, ()), LossBoundary(), Compute(1, (), "dx"), Compute(1, (), "dw")]
    assert without_unread_reruns(graph, runs) == runs
    assert without_unread_reruns(graph, [*runs, Compute(1, (), "dw")]) == runs


def test_a_bound_of_nothing_proves_nothing() -> None:
    # Nothing needs y, so the bound is 0; without a search it runs all the same.
    tensors = [Tensor("x", 1, TensorKind.INPUT), Tensor("y", 1)]
    graph = Graph(tensors, [Operator("y", (0,), (1,), 1.0)])
    found = RotorMenus(merged_s=0.0).solve(graph, 9, time_limit_s=0.0)
    assert (found.time_s, found.lower_bound_s) == (1.0, 0.0)
    assert found.status is Status.FEASIBLE
    assert RotorMenus().solve(graph, None).time_s == 0.0
