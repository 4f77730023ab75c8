"""Order and addresses in one program: against OLLA's equations as printed, and never worse than one
after the other."""

from __future__ import annotations

from random import Random

import pytest

from memopt.models.budget import Budget
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.passes import joint_pass
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.programs.validate import validate
from memopt.strategies.olla import Olla
from tests.models.training_graphs import overwriting
from tests.passes.literal_equations import least_bytes
from tests.passes.order.test_ordering import small_graphs

JOINT = Olla(solver="cp-sat", joint=True)
COLD = Olla(solver="cp-sat", joint=True, warm_start=False)
SPLIT = Olla(arena_cost=None)


def checked(graph: Graph, solution: Solution) -> int:
    """The peak of a plan that places everything."""
    program, peak_bytes = solution.program, solution.peak_bytes
    assert program is not None
    assert peak_bytes is not None
    assert validate(graph, program, Budget(peak_bytes)) is None
    assert replay(graph, program).placed_peak_bytes == peak_bytes
    assert not program.unplaced
    return peak_bytes


def check_against_the_equations(count: int, seed: int, most: int) -> None:
    dearer = 0
    for graph in small_graphs(count, seed, most):
        least = least_bytes(graph, addresses=True)
        for joint in (JOINT, COLD):
            found = Olla(**{**vars(joint), "in_place": False}).solve(graph, None)
            assert checked(graph, found) == found.stats["joint_bound_bytes"] == least
            assert found.status is Status.OPTIMAL
        dearer += least > least_bytes(graph, addresses=False)
    assert dearer > count // 5


def test_equals_the_equations_as_printed() -> None:
    check_against_the_equations(25, 41, 7)


@pytest.mark.slow
def test_equals_the_equations_as_printed_on_more_graphs() -> None:
    check_against_the_equations(100, 42, 8)


def test_is_never_worse_than_one_after_the_other() -> None:
    rng = Random(43)
    better = 0
    for graph in small_graphs(40, 43, 9):
        graph = overwriting(rng, graph)
        split = checked(graph, SPLIT.solve(graph, None))
        for joint in (JOINT, COLD):
            found = joint.solve(graph, None)
            peak_bytes = checked(graph, found)
            assert found.stats["joint_bound_bytes"] <= peak_bytes <= split
            better += peak_bytes < split
    assert better > 0


def test_bounds_hold_wherever_it_is_stopped() -> None:
    open_ones = 0
    for graph in small_graphs(12, 44, 9):
        best = checked(graph, JOINT.solve(graph, None))
        for effort in (1e-6, 1e-4, 1e-3):
            short = Olla(**{**vars(COLD), "effort": effort})
            found = short.solve(graph, None)
            assert found.stats["joint_bound_bytes"] <= best <= checked(graph, found)
            open_ones += found.status is Status.FEASIBLE
            assert short.solve(graph, None).program == found.program
    assert open_ones > 3


def test_keeps_a_budget() -> None:
    split_budgets = 0
    for graph in small_graphs(25, 46, 8):
        best = JOINT.solve(graph, None).peak_bytes
        assert best is not None
        assert checked(graph, JOINT.solve(graph, best)) == best
        below = JOINT.solve(graph, best - 1)
        if below.plans:
            # Addresses for some lifetimes only.
            assert below.program is not None
            assert validate(graph, below.program, Budget(best - 1)) is None
            split_budgets += 1
        else:
            assert replay(graph, Olla(place=False).solve(graph, None).program).peak_bytes >= best
    assert split_budgets > 0


def test_results_with_the_user_have_no_address() -> None:
    for graph in small_graphs(10, 47, 8):
        found = Olla(**{**vars(JOINT), "place_results": False}).solve(graph, None)
        assert found.program is not None
        assert validate(graph, found.program) is None
        placed = {tensor for _, tensor, _ in found.program.offsets or ()}
        assert not placed & set(graph.kept)


def test_addresses_are_aligned() -> None:
    for graph in small_graphs(10, 48, 8):
        found = Olla(**{**vars(COLD), "alignment": 8}).solve(graph, None)
        assert found.program is not None
        assert validate(graph, found.program) is None
        assert all(offset % 8 == 0 for _, _, offset in found.program.offsets or ())


def test_interruption_returns_the_best_so_far() -> None:
    def stop(_fraction: float, what: str) -> None:
        if what.startswith("joint"):
            raise KeyboardInterrupt

    for graph in small_graphs(5, 49, 9):
        found, best = JOINT.solve(graph, None, progress=stop), JOINT.solve(graph, None)
        assert best.peak_bytes is not None
        assert found.stats["joint_bound_bytes"] <= best.peak_bytes <= checked(graph, found)


def test_a_program_that_is_too_large_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = 0
    for graph in small_graphs(20, 43, 9):
        best = checked(graph, COLD.solve(graph, None))
        with monkeypatch.context() as patch:
            patch.setattr(joint_pass, "MOST_ROWS", 0)
            found = COLD.solve(graph, None)
        assert found.stats["joint_bound_bytes"] <= best <= checked(graph, found)
        left_out += bool(found.stats.get("joint_too_large"))
    assert left_out > 3


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="joint=True needs"):
        Olla(joint=True)
    with pytest.raises(ValueError, match='"search" or "cp-sat"'):
        Olla(solver="gurobi")
    with pytest.raises(ValueError, match="effort"):
        Olla(effort=0)
