"""Programs that joint starts from: within larger budgets, and single strategies that may win."""

from __future__ import annotations

from unittest import mock

import pytest

from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.solvers.running import Deadline
from memopt.strategies import Joint, resolve
from memopt.strategies.joint.local_search import LocalSearch
from memopt.strategies.joint.moved import Mover
from memopt.strategies.joint.neighbours import Decisions
from memopt.strategies.joint.planning import JointPlanning
from memopt.strategies.offload.graph import OffloadGraph
from memopt.strategies.shared.alternatives_table import lowered
from memopt.strategies.shared.chain_programs import orders_of_stages, programs_of_chain
from memopt.strategies.shared.graph_problem import graph_problem
from memopt.strategies.shared.run_table import RunTable
from tests.strategies.joint.chains import blocks


def test_stages_have_programs_for_many_budgets() -> None:
    graph = blocks(6)
    peak = replay(graph, store_all(graph)).peak_bytes
    orders = orders_of_stages(graph, peak, 6, Deadline(), lambda *_: True)
    programs = [lowered(graph, order) for order in orders]
    figures = [replay(graph, program) for program in programs]
    assert len({figure.peak_bytes for figure in figures}) >= 3
    assert figures[0].peak_bytes == min(figure.peak_bytes for figure in figures)
    # The last one has all the memory it wants.
    assert figures[-1].time_s == min(figure.time_s for figure in figures)
    for program, figure in zip(programs, figures, strict=True):
        assert validate(graph, program, Budget(figure.peak_bytes)) is None


def test_the_mover_runs_a_stages_order_as_its_program_does() -> None:
    graph = blocks(6)
    peak = replay(graph, store_all(graph)).peak_bytes
    table = RunTable(graph)
    mover = Mover(table, peak, Device())
    for order in orders_of_stages(graph, peak, 6, Deadline(), lambda *_: True):
        program = lowered(graph, order)
        assert mover.used(table.runs_of(order)).tolist() == table.runs_of(program).tolist()
        figures, moved = replay(graph, program), mover.moved(table.runs_of(order))
        assert (moved.time_s, moved.peak_bytes) == (figures.time_s, figures.peak_bytes)
        assert not moved.moves


def test_a_table_that_is_not_ready_in_time_has_no_programs() -> None:
    late = Deadline(0.0)
    assert list(orders_of_stages(blocks(6), 100, 6, late, lambda *_: True)) == []


def test_a_chain_whose_table_is_not_ready_in_time_has_its_least_memory_and_store_all() -> None:
    graph = blocks(9)
    peak = replay(graph, store_all(graph)).peak_bytes
    budgets = [peak - 16 * part for part in range(8)]
    late = [replay(graph, one) for one in programs_of_chain(graph, budgets, Deadline(0.0))]
    # A table that was stopped is not taken for the whole one later.
    whole = [replay(graph, one) for one in programs_of_chain(graph, budgets, Deadline())]
    assert 1 <= len(late) < len(whole)


def test_its_starts_are_the_strategies_of_their_names() -> None:
    """With less than they do, a plan could be slower than theirs."""
    starts = [member.strategy for member in Joint().starts(blocks(3), linked=True)]
    assert starts == [resolve(strategy.name) for strategy in starts]
    assert {strategy.name for strategy in starts} == {"rotor-menus", "offload-graph", "monet"}


def test_a_relaxation_that_takes_all_the_time_leaves_an_improved_plan() -> None:
    graph, device = blocks(9), Device(to_host_bytes_per_s=1.0)
    budget = int(0.6 * replay(graph, store_all(graph)).peak_bytes)
    rotor = min(
        replay(graph, program).time_s for program in programs_of_chain(graph, [budget], Deadline())
    )

    def takes_all(planning: JointPlanning) -> None:
        planning.deadline.at_s = 0.0

    with mock.patch.object(JointPlanning, "_relax", takes_all):
        solution = Joint().solve(graph, budget, device=device)
    assert solution.stats["source"] == "local search"
    assert solution.time_s is not None
    assert solution.time_s < rotor


def asked(seconds_a_byte: float) -> tuple[bool, float, float]:
    """(whether offload-graph was asked, the plan's time, the least that moving alone can take)."""
    graph = blocks(6)
    device = Device(to_host_bytes_per_s=1.0 / seconds_a_byte)
    budget = int(0.6 * replay(graph, store_all(graph)).peak_bytes)
    solution = Joint(changes=50).solve(graph, budget, device=device)
    assert solution.time_s is not None
    lines = solution.stats.get("starts", ())
    assert isinstance(lines, tuple)
    names = {line[0] for line in lines}
    least_s = graph_problem(graph, device).lower_bound_s(budget)
    return "offload-graph" in names, solution.time_s, least_s


def test_what_only_moves_is_not_asked_where_it_cannot_win() -> None:
    was_asked, time_s, least_s = asked(50.0)
    assert time_s < least_s
    assert not was_asked


def test_its_bound_is_one() -> None:
    graph = blocks(6)
    device = Device(to_host_bytes_per_s=1.0)
    peak = replay(graph, store_all(graph)).peak_bytes
    for share in (0.5, 0.7, 0.9):
        found = OffloadGraph().solve(graph, int(share * peak), device=device)
        assert found.time_s is not None
        least_s = graph_problem(graph, device).lower_bound_s(int(share * peak))
        assert graph.compute_time_s <= least_s <= found.time_s * (1 + 1e-9)


def test_equal_starts_are_searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, searched = blocks(6), list[bytes]()
    descend = LocalSearch.descend

    def noted(search: LocalSearch, at: Decisions) -> Decisions:
        searched.append(search.mover.used(at.runs).tobytes())
        return descend(search, at)

    monkeypatch.setattr(LocalSearch, "descend", noted)
    budget = int(0.6 * replay(graph, store_all(graph)).peak_bytes)
    device = Device(to_host_bytes_per_s=1.0)
    assert Joint(changes=50).solve(graph, budget, device=device).plans
    assert 1 < len(searched) == len(set(searched))
