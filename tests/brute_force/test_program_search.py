"""The exhaustive search itself: by hand, and against random programs and exact solvers."""

from __future__ import annotations

from random import Random

import pytest

from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.programs.in_place import with_in_place
from memopt.programs.replay import replay
from memopt.strategies.monet.checkmate_strategies import Checkmate
from tests.brute_force.program_search import ProgramSearch, Rules
from tests.brute_force.tiny_graphs import tiny_graph, with_in_place_marks
from tests.random_programs import random_program


def test_two_results_of_one_operator_are_made_one_after_the_other() -> None:
    # x (3 bytes) makes a and b (4 each); c (4) reads a, d (4) reads b and c. With both held c
    # needs 3 + 12; run again for b alone, "make" needs 3 + 4 + 8 as well, but without the scratch
    # memory (5) that "c" has.
    tensors = [
        Tensor("x", 3, TensorKind.INPUT),
        *(Tensor(name, 4) for name in "abcd"),
    ]
    operators = [
        Operator("make", (0,), (1, 2), 1.0),
        Operator("c", (1,), (3,), 1.0, 5),
        Operator("d", (2, 3), (4,), 1.0),
    ]
    graph = Graph(tensors, operators, outputs=(4,))
    assert ProgramSearch(graph, Rules(again=False)).smallest_peak() == 3 + 12 + 5
    search = ProgramSearch(graph)
    assert search.smallest_peak() == 3 + 8 + 5
    assert search.least_time(3 + 8 + 5) == 4.0
    assert search.least_time(3 + 12 + 5) == 3.0
    assert search.least_time(3 + 8 + 4) == float("inf")


def test_an_output_takes_over_what_dies() -> None:
    tensors = [Tensor("x", 1, TensorKind.INPUT), Tensor("a", 4), Tensor("b", 4)]
    operators = [
        Operator("a", (0,), (1,), 1.0),
        Operator("b", (1,), (2,), 1.0, in_place=(1,)),
    ]
    assert ProgramSearch(Graph(tensors, operators, outputs=(2,))).smallest_peak() == 1 + 4
    # Both are results: nothing dies.
    assert ProgramSearch(Graph(tensors, operators, outputs=(1, 2))).smallest_peak() == 1 + 8


def test_the_backward_comes_after_the_boundary() -> None:
    tensors = [
        Tensor("x", 1, TensorKind.INPUT),
        Tensor("y", 2),
        Tensor("dy", 3, TensorKind.GRADIENT),
        Tensor("dx", 4, TensorKind.GRADIENT),
    ]
    operators = [
        Operator("forward", (0,), (1,), 1.0),
        Operator("backward", (2,), (3,), 1.0, phase=Phase.BACKWARD),
    ]
    graph = Graph(
        tensors, operators, (1,), (3,), tangents=(2,), tangents_held=False, boundary_bytes=9
    )
    assert ProgramSearch(graph).smallest_peak() == 1 + 2 + 3 + 9


def test_random_operators_run_where_there_is_no_backward() -> None:
    tensors = [Tensor("x", 1, TensorKind.INPUT), Tensor("a", 4), Tensor("b", 4)]
    operators = [
        Operator("drop", (0,), (1,), 1.0, random=True),
        Operator("b", (0,), (2,), 1.0),
    ]
    assert ProgramSearch(Graph(tensors, operators, outputs=(2,))).least_time(9) == 2.0


def test_no_random_program_needs_less() -> None:
    for seed in range(60):
        rng = Random(seed)
        drawn = random_graph(rng, rng.randint(1, 3), implementations=rng.random() < 0.5)
        graph = with_in_place_marks(rng, drawn)
        reordered, in_order = (ProgramSearch(graph, Rules(in_order=x)) for x in (False, True))
        floor_bytes = reordered.smallest_peak()
        assert floor_bytes <= in_order.smallest_peak()
        for _ in range(5):
            program = random_program(rng, graph, recomputations=rng.randint(0, 4), reorder=True)
            timeline = replay(graph, with_in_place(graph, program))
            assert floor_bytes <= timeline.peak_bytes
            assert reordered.least_time(timeline.peak_bytes) <= timeline.time_s


@pytest.mark.slow
def test_the_smallest_peak_is_most_often_that_of_a_program() -> None:
    attained = 0
    for seed in range(40):
        graph = tiny_graph(Random(seed))
        search = ProgramSearch(graph, allowed=lambda operator, choice: False)
        floor_bytes = search.smallest_peak()
        found = Checkmate().solve(graph, 1, time_limit_s=20.0)
        assert found.smallest_budget_bytes is not None
        assert found.smallest_budget_bytes >= floor_bytes
        attained += found.smallest_budget_bytes == floor_bytes
    assert attained > 25, attained
