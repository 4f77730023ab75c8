"""Ordering: brute force over all topological orders, bounds, interruption."""

from __future__ import annotations

from dataclasses import replace as replace_fields
from random import Random

import pytest

from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.models.status import Status
from memopt.passes.order.mincut import forced_live, last_task_bound, minimum_cut
from memopt.passes.order.ordering import greedy_orders
from memopt.passes.order.task_contraction import (
    cut_points,
    eager,
    expand_order,
    free_tasks,
    without_free_tasks,
)
from memopt.passes.order.tasks import Tasks
from memopt.programs.in_place import with_in_place
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.strategies.olla import order_program, order_tasks
from tests.models.training_graphs import drawing, overwriting
from tests.passes.oracles import all_orders, best_order_bytes, is_order, random_tasks


def small_graphs(count: int, seed: int, most: int) -> list[Graph]:
    """Training steps of at most `most` operators, with few enough orders to list."""
    rng = Random(seed)
    graphs = []
    while len(graphs) < count:
        graph = random_graph(
            rng, rng.randint(1, 4), updates=rng.random() < 0.5, inference=rng.random() < 0.3
        )
        if len(graph.operators) <= most:
            graphs.append(graph)
    return graphs


def check_against_all_orders(graph: Graph) -> None:
    program, ordering = order_program(graph, store_all(graph))
    assert validate(graph, program) is None
    best = best_order_bytes(graph)
    assert ordering.peak == replay(graph, program).peak_bytes == best
    assert ordering.bound <= best
    assert ordering.status is Status.OPTIMAL


def test_equals_brute_force() -> None:
    for graph in small_graphs(60, 1, 8):
        check_against_all_orders(graph)


def test_equals_brute_force_where_results_are_computed_in_place() -> None:
    rng = Random(4)
    better = 0
    for graph in small_graphs(60, 3, 8):
        graph = overwriting(rng, graph)
        program, ordering = order_program(graph, with_in_place(graph, store_all(graph)))
        best = min(replay(graph, with_in_place(graph, one)).peak_bytes for one in all_orders(graph))
        assert ordering.peak == replay(graph, program).peak_bytes == best
        assert ordering.status is Status.OPTIMAL
        better += best < best_order_bytes(graph)
    assert better > 5


def test_equals_brute_force_where_operators_draw() -> None:
    rng = Random(6)
    dearer = 0
    for graph in small_graphs(80, 6, 7):
        drawn = drawing(rng, graph)
        if len(drawn.operators) <= 8:
            check_against_all_orders(drawn)
            free = [replace_fields(operator, random=False) for operator in drawn.operators]
            dearer += best_order_bytes(replace_fields(drawn, operators=free)) < best_order_bytes(
                drawn
            )
    assert dearer > 5


@pytest.mark.slow
def test_equals_brute_force_up_to_ten_operators() -> None:
    for graph in small_graphs(400, 2, 10):
        check_against_all_orders(graph)


def exhaustive_peak(tasks: Tasks) -> int:
    """The least peak over all orders, by recursion over executed sets."""
    best: dict[frozenset[int], int] = {}

    def solve(done: frozenset[int]) -> int:
        if len(done) == len(tasks):
            return tasks.base
        if done not in best:
            live = tasks.base + sum(
                v.size
                for v in tasks.values
                if v.producer in done and (v.kept or any(c not in done for c in v.consumers))
            )
            best[done] = min(
                max(live + tasks.output_bytes[t] + tasks.transient[t], solve(done | {t}))
                for t in range(len(tasks))
                if t not in done and all(other in done for other in tasks.before[t])
            )
        return best[done]

    return solve(frozenset())


def test_arbitrary_dags_equal_exhaustive_search() -> None:
    rng = Random(5)
    for _ in range(250):
        tasks = random_tasks(rng, rng.randint(1, 10))
        best = exhaustive_peak(tasks)
        ordering = order_tasks(tasks)
        assert is_order(tasks, ordering.order)
        assert ordering.peak == tasks.peak(ordering.order) == best
        assert ordering.bound == best


def test_bounds_hold_and_the_cut_is_the_stronger_one() -> None:
    rng = Random(6)
    for _ in range(120):
        tasks = random_tasks(rng, rng.randint(2, 9))
        best = exhaustive_peak(tasks)
        assert last_task_bound(tasks) <= best
        forced = forced_live(tasks)
        for task in range(len(tasks)):
            bound, executed = minimum_cut(tasks, task)
            assert forced[task] <= bound <= best
            # The set it names is closed under predecessors and attains the bound.
            first = [t for t in tasks.topological if executed >> t & 1]
            assert all(executed >> other & 1 for t in first for other in tasks.before[t])
            rest = [t for t in tasks.topological if not executed >> t & 1 and t != task]
            order = [*first, task, *rest]
            assert is_order(tasks, order)
            assert tasks.profile(order)[len(first)] == bound


def test_greedy_orders_are_valid() -> None:
    rng = Random(7)
    for _ in range(60):
        tasks = random_tasks(rng, rng.randint(1, 25))
        for name, order in greedy_orders(tasks):
            assert is_order(tasks, order), name


def test_leaving_out_free_tasks_keeps_the_optimum() -> None:
    rng = Random(9)
    left_out = 0
    for _ in range(150):
        tasks = random_tasks(rng, rng.randint(2, 9))
        smaller, kept = without_free_tasks(tasks)
        left_out += len(tasks) - len(smaller)
        assert exhaustive_peak(smaller) == exhaustive_peak(tasks)
        order = expand_order(tasks, kept, smaller.topological)
        assert is_order(tasks, order)
        assert tasks.peak(order) == smaller.peak(smaller.topological)
    assert left_out > 50


def test_cut_points_are_where_every_order_passes() -> None:
    # 0 → 1, 2 → 3 → 4, 5: the first and task 3 come alone.
    from memopt.passes.order.tasks import Value

    edges = {0: (1, 2), 1: (3,), 2: (3,), 3: (4, 5), 4: (), 5: ()}
    values = tuple(Value(1, t, readers, not readers) for t, readers in edges.items())
    tasks = Tasks((0,) * 6, values, ((),) * 6)
    assert cut_points(tasks) == [0, 3]
    assert free_tasks(tasks) == set()


def figure_3() -> Graph:
    """The shape of OLLA figure 3: v2 turns a big tensor into a small one; running it before v3,
    which makes another big one, is better."""
    tensors = [
        Tensor("x", 0, TensorKind.INPUT),
        Tensor("e1", 40),
        Tensor("e2", 30),
        Tensor("e3", 5),
        Tensor("e4", 40),
        Tensor("y", 1, TensorKind.OUTPUT),
    ]
    operators = [
        Operator("v1", (0,), (1, 2), 1.0),
        Operator("v3", (2,), (4,), 1.0),
        Operator("v2", (1,), (3,), 1.0),
        Operator("v4", (3, 4), (5,), 1.0),
    ]
    return Graph(tensors, operators, outputs=(5,))


def test_figure_3_runs_v2_before_v3() -> None:
    graph = figure_3()
    own = store_all(graph)
    program, ordering = order_program(graph, own)
    names = [graph.operators[x.op].name for x in program if hasattr(x, "op")]
    assert names == ["v1", "v2", "v3", "v4"]
    assert replay(graph, own).peak_bytes == 110
    assert ordering.peak == ordering.bound == 75
    assert len(list(all_orders(graph))) == 2


def test_updates_run_early() -> None:
    for graph in small_graphs(30, 12, 40):
        if not any(x.phase is Phase.UPDATE for x in graph.operators):
            continue
        program, ordering = order_program(graph, store_all(graph))
        assert ordering.peak <= replay(graph, store_all(graph)).peak_bytes
        assert validate(graph, program) is None


def test_interruption_returns_the_best_order_so_far() -> None:
    rng = Random(13)
    stopped = 0
    for _ in range(40):
        tasks = random_tasks(rng, 30)

        def stop(_seconds: float, _peak: int, _bound: int) -> None:
            raise KeyboardInterrupt

        ordering = order_tasks(tasks, on_improvement=stop)
        stopped += bool(ordering.stats["interrupted"])
        assert is_order(tasks, ordering.order)
        assert ordering.peak == tasks.peak(ordering.order) <= tasks.peak(tasks.topological)
        assert ordering.bound <= ordering.peak
        limited = order_tasks(tasks, time_limit_s=0.0)
        assert is_order(tasks, limited.order)
    assert stopped > 20


def test_same_problem_same_order() -> None:
    rng = Random(14)
    for _ in range(20):
        tasks = random_tasks(rng, 25)
        assert order_tasks(tasks).order == order_tasks(tasks).order


def test_an_order_at_the_bound_is_kept() -> None:
    rng = Random(15)
    kept = 0
    for _ in range(100):
        tasks, _ = without_free_tasks(random_tasks(rng, 8))
        own = eager(tasks, tasks.topological)
        ordering = order_tasks(tasks)
        if tasks.peak(own) == ordering.bound:
            kept += 1
            assert list(ordering.order) == list(own)
    assert kept > 5
