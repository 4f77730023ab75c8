"""OLLA's program of an order in CP-SAT: against exhaustive search; windows, parts, limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from memopt.models.status import Status
from memopt.passes.cp_sat import CpSat
from memopt.passes.order import part_programs
from memopt.passes.order.lifetime_model import variables
from memopt.passes.order.ordering import order_tasks
from memopt.passes.order.task_contraction import eager, independent_parts, part_of
from memopt.passes.order.tasks import Tasks, Value
from memopt.passes.order.windows import Windows
from memopt.strategies.olla import Olla
from tests.passes.literal_equations import least_bytes
from tests.passes.oracles import best_order_bytes, is_order, random_tasks
from tests.passes.order.test_ordering import exhaustive_peak, small_graphs

COLD = CpSat(warm_start=False)


def every_order(tasks: Tasks) -> Iterator[tuple[int, ...]]:
    return (x for x in itertools.permutations(range(len(tasks))) if is_order(tasks, x))


def check_against_all_orders(count: int, seed: int, most: int) -> None:
    """By the strategy: the peak of exhaustive search, proved, on the framework's orders alone."""
    olla = Olla(solver="cp-sat", place=False, in_place=False, warm_start=False)
    for graph in small_graphs(count, seed, most):
        found = olla.solve(graph, None)
        assert found.status is Status.OPTIMAL
        assert found.peak_bytes == found.stats["order_bound_bytes"] == best_order_bytes(graph)


def test_equals_exhaustive_search_on_training_steps() -> None:
    check_against_all_orders(40, 31, 7)


@pytest.mark.slow
def test_equals_exhaustive_search_on_more_training_steps() -> None:
    check_against_all_orders(200, 32, 9)


def test_equals_exhaustive_search_on_any_graph() -> None:
    rng = Random(21)
    improved = 0
    for _ in range(160):
        tasks = random_tasks(rng, rng.randint(1, 9))
        best = exhaustive_peak(tasks)
        improved += tasks.peak(tasks.topological) > best
        for how in (COLD, CpSat()):
            found = order_tasks(tasks, cp_sat=how)
            assert tasks.peak(found.order) == found.peak == found.bound == best
            assert found.status is Status.OPTIMAL
    assert improved > 40


def test_equals_the_equations_as_printed() -> None:
    for graph in small_graphs(15, 33, 6):
        found = Olla(solver="cp-sat", place=False, in_place=False, warm_start=False)
        assert found.solve(graph, None).peak_bytes == least_bytes(graph, addresses=False)


def test_bounds_hold_wherever_it_is_stopped() -> None:
    rng = Random(22)
    open_ones = 0
    for effort in (1e-5, 1e-3, 3e-3) * 4:
        tasks = random_tasks(rng, 13)
        best = exhaustive_peak(tasks)
        found = order_tasks(tasks, cp_sat=replace(COLD, effort=effort))
        assert tasks.peak(found.order) == found.peak >= best >= found.bound
        assert not found.stats["interrupted"]
        open_ones += found.status is Status.FEASIBLE
        again = order_tasks(tasks, cp_sat=replace(COLD, effort=effort))
        assert (again.order, again.bound) == (found.order, found.bound)
    assert open_ones > 3


def test_windows_hold_in_every_order() -> None:
    rng = Random(23)
    narrow = apart = 0
    for _ in range(25):
        tasks = random_tasks(rng, rng.randint(2, 6))
        windows = Windows(tasks)
        lives = []
        for order in every_order(tasks):
            step = {task: at for at, task in enumerate(order)}
            assert all(step[task] in windows.span(task) for task in order)
            lives.append(rows := [])
            for edge in windows.edges:
                born = step[edge.producer]
                end = len(tasks) if edge.kept else max(step[x] for x in edge.consumers) + 1
                kept = range(born + 1, end)
                assert set(windows.preserved(edge)) <= set(kept) <= set(windows.useful(edge))
                rows.append(range(born, max(end, born + 1)))
        narrow += sum(len(windows.span(t)) < len(tasks) for t in range(len(tasks)))
        for (i, one), (j, other) in itertools.combinations(enumerate(windows.edges), 2):
            if windows.never_meet(one, other):
                apart += 1
                assert all(not set(rows[i]) & set(rows[j]) for rows in lives)
    assert narrow > 30
    assert apart > 15


def test_parts_are_independent() -> None:
    rng = Random(24)
    parts = 0
    for _ in range(80):
        tasks = random_tasks(rng, rng.randint(2, 9))
        order = eager(tasks, tasks.topological)
        profile = tasks.profile(order)
        best = tasks.base
        for begin, end in independent_parts(tasks, order):
            part = part_of(tasks, order, begin, end)
            assert part.profile(range(len(part)))[1:] == profile[begin:end]
            best = max(best, exhaustive_peak(part))
            parts += end - begin < len(tasks)
        assert best == exhaustive_peak(tasks)
    assert parts > 30


def backward_with_updates() -> Tasks:
    """Four layers back: each gradient of a weight (10 bytes) can wait, and so can its update."""
    values, after = [], []
    for layer in range(4):
        chain, weight, update = 3 * layer, 3 * layer + 1, 3 * layer + 2
        readers = (weight, chain + 3) if layer < 3 else (weight,)
        values += [Value(4, chain, readers), Value(10, weight, (update,))]
        after += [(), (), ()]
    return Tasks((0,) * 12, tuple(values), tuple(after))


def test_interruption_returns_the_best_order_so_far() -> None:
    rng = Random(26)
    stopped = 0
    for _ in range(4):
        tasks = random_tasks(rng, 30)

        def stop(_seconds: float, _peak: int, _bound: int) -> None:
            raise KeyboardInterrupt

        found = order_tasks(tasks, cp_sat=COLD, on_improvement=stop)
        stopped += bool(found.stats["interrupted"])
        assert is_order(tasks, found.order)
        assert found.bound <= found.peak <= tasks.peak(tasks.topological)
        limited = order_tasks(tasks, cp_sat=COLD, time_limit_s=0.0)
        assert is_order(tasks, limited.order)
        assert not limited.stats["interrupted"]
    assert stopped > 2


def test_a_program_that_is_too_large_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = random_tasks(Random(27), 12)
    monkeypatch.setattr(part_programs, "MOST_VARIABLES", 10)
    found = order_tasks(tasks, cp_sat=COLD)
    assert found.stats["too_large"] > 10
    assert found.peak == tasks.peak(eager(tasks, tasks.topological))
    assert variables(tasks) > 10


def test_more_workers_find_the_same_peak() -> None:
    tasks = random_tasks(Random(28), 12)
    assert order_tasks(tasks, cp_sat=replace(COLD, workers=2)).peak == exhaustive_peak(tasks)


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="workers"):
        CpSat(workers=0)
    with pytest.raises(ValueError, match="effort"):
        CpSat(effort=0)
