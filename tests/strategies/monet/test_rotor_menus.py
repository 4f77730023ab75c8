"""rotor-menus against Rotor on random graphs."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random

import pytest

from memopt.api.planning import solve
from memopt.models.bounds import time_lower_bound
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.models.status import Status
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.reductions.linearize import linearize
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.solvers.recent import RecentAnswers
from memopt.solvers.running import Deadline
from memopt.strategies import Rotor
from memopt.strategies.monet.rotor_menus import RotorMenus
from memopt.strategies.rotor.persistent_kernels import row
from memopt.strategies.shared import stage_alternatives as stages
from memopt.strategies.shared.alternatives_table import AlternativesTable
from memopt.strategies.shared.stage_alternatives import stage_alternatives
from memopt.strategies.shared.time_point_search import TimePointSearch
from tests.models.training_graphs import drawing
from tests.strategies.monet.graphs import training_graph, with_one_gradient_choices


def drawn(seed: int) -> tuple[Graph, int, int]:
    """A graph, Rotor's smallest budget and the peak that saves everything."""
    rng = Random(seed)
    size = rng.randint(5, 14)
    graph = random_graph(rng, size) if seed % 5 == 0 else training_graph(rng, size, False)
    floor = solve(graph, "min", Rotor(), device=Device()).budget
    assert floor is not None
    return graph, floor, replay(graph, store_all(graph)).peak_bytes


@pytest.mark.parametrize("seed", range(50))
def test_menus_are_never_slower_than_rotor(seed: int) -> None:
    graph, floor, peak_bytes = drawn(seed)
    for share in (0.0, 0.5):
        budget = floor + int(share * (peak_bytes - floor))
        made = RotorMenus().solve(graph, budget)
        assert made.program is not None
        assert made.time_s is not None
        assert made.time_s <= solve(graph, budget, Rotor(), device=Device()).step_time_s
        violation, figures = validate_and_replay(graph, made.program, Budget(budget), None)
        assert violation is None
        assert figures.peak_bytes == made.peak_bytes
        assert figures.peak_bytes <= budget
        assert figures.time_s == made.time_s


def interrupt(fraction: float, what: str) -> None:
    """A caller who stops at once."""
    raise KeyboardInterrupt


def test_stopped_it_keeps_rotors_plan() -> None:
    recomputed = 0
    for seed in range(1, 15):
        graph, floor, _ = drawn(seed)
        rotor_s, late_s = (
            solve(graph, floor, Rotor(), device=Device(), time_limit_s=limit_s).step_time_s
            for limit_s in (None, 0.0)
        )
        assert RotorMenus().solve(graph, floor, time_limit_s=0.0).time_s <= late_s
        assert RotorMenus().solve(graph, floor, progress=interrupt).time_s <= max(rotor_s, late_s)
        recomputed += rotor_s > graph.compute_time_s
        below = RotorMenus().solve(graph, floor - 1, time_limit_s=0.0)
        assert below.status is Status.UNKNOWN
        assert below.smallest_budget_bytes == floor
    assert recomputed > 5


def tabled(seed: int, alternatives: bool) -> tuple[Graph, AlternativesTable]:
    """The table of a random step's menus."""
    rng = Random(seed)
    graph = training_graph(rng, rng.randint(4, 9), alternatives)
    peak = replay(graph, store_all(graph)).peak_bytes
    return graph, AlternativesTable(linearize(graph), peak, 200, Deadline())


@pytest.mark.parametrize("seed", range(12))
def test_programs_of_the_table_keep_its_figures(seed: int) -> None:
    graph, table = tabled(seed, seed % 3 > 0)
    assert table.budgets
    n = len(table.view.chain)
    low, times = int(table.table.low[1, n]), row(table.table, 1, n)
    for memory in table.budgets[:: max(1, len(table.budgets) // 6)]:
        violation, figures = validate_and_replay(graph, table.program(memory), Budget(), None)
        assert violation is None
        assert figures.peak_bytes <= table.fixed + memory
        slots = memory // table.arrays.slot - low
        if slots >= 0:
            assert figures.time_s <= times[min(slots, len(times) - 1)] * (1 + 1e-9)


def test_options_run_by_other_implementations_where_those_pay() -> None:
    chosen = 0
    for seed in range(12):
        table = tabled(seed, True)[1]
        for menu in table.alternatives:
            for option in menu[1:]:
                runs = (*option.forward, *option.backward)
                chosen += any(run.implementation is not None for run in runs)
                assert {run.op for run in menu[0].backward} <= {run.op for run in option.backward}
        none = stage_alternatives(table.view, lambda operator, name: False)
        plain = {run.implementation for menu in none for o in menu for run in o.backward}
        assert plain <= {None}
    assert chosen > 10


def test_stages_are_solved_once_for_all_budgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages, "_RECENT", RecentAnswers(100))
    view = linearize(training_graph(Random(2), 9, True))
    # What there was no time to solve is not taken for all there is later.
    plain = stage_alternatives(view, None, Deadline(0.0))
    found = stage_alternatives(view)
    assert sum(map(len, found)) > sum(map(len, plain)) == len(found)

    def refused(*_: object) -> None:
        raise AssertionError("solved again")

    monkeypatch.setattr(stages, "TimePointModel", refused)
    assert stage_alternatives(view) == found


def test_a_stage_may_read_a_result_of_a_later_one() -> None:
    """The gradient of a sum's parameter is that of its input: a result, read by what follows."""
    tensors = [
        Tensor("x", 4, TensorKind.INPUT),
        Tensor("w", 4, TensorKind.PARAMETER),
        Tensor("a", 8),
        Tensor("y", 4),
        Tensor("dy", 4, TensorKind.GRADIENT),
        Tensor("da = dp", 8, TensorKind.GRADIENT),
        Tensor("dw", 4, TensorKind.GRADIENT),
    ]
    operators = [
        Operator("linear", (0, 1), (2,), 1.0),
        Operator("sum", (2,), (3,), 1.0),
        Operator("back of sum", (4, 2), (5,), 1.0, phase=Phase.BACKWARD),
        Operator("back of linear", (5, 0), (6,), 1.0, phase=Phase.BACKWARD),
    ]
    graph = Graph(tensors, operators, outputs=(3,), gradients=(5, 6), tangents=(4,))
    floor = solve(graph, "min", RotorMenus(), device=Device()).peak_bytes
    for budget in range(floor, replay(graph, store_all(graph)).peak_bytes + 1):
        assert solve(graph, budget, RotorMenus(), device=Device()).peak_bytes <= budget


@pytest.mark.parametrize("seed", range(20))
def test_programs_of_graphs_that_draw(seed: int) -> None:
    """Nothing that draws is left out, whatever its results are for; operators run twice for two
    results of the step."""
    rng = Random(seed)
    graph = training_graph(rng, rng.randint(2, 5), True)
    graph = drawing(rng, with_one_gradient_choices(graph, rng) if seed % 2 else graph)
    if seed % 3 == 0:
        # Implementations cost nothing: nor does running one after the other, but for the law.
        operators = [
            replace(
                operator,
                time_s=0.0,
                recomputable=operator.recomputable and rng.random() < 0.5,
                implementations=tuple(replace(c, time_s=0.0) for c in operator.implementations),
            )
            for operator in graph.operators
        ]
        graph = replace(graph, operators=tuple(operators))
    view = linearize(graph)
    peak_bytes = replay(graph, store_all(graph)).peak_bytes
    table = AlternativesTable(view, peak_bytes, 40, Deadline())
    assert table.budgets
    for memory in table.budgets:
        assert validate(graph, table.program(memory)) is None
    search = TimePointSearch(graph, None, 2 * peak_bytes, Deadline().within(60)).run()
    assert search.best.program is not None
    assert validate(graph, search.best.program, Budget(2 * peak_bytes)) is None
    assert search.bound_s >= time_lower_bound(graph) * (1 - 1e-9)


def test_figures_are_finite_where_rotor_has_no_plan() -> None:
    solution = RotorMenus().solve(training_graph(Random(0), 4, True), 1)
    assert not solution.stats["rotor_found"]
    json.dumps(dict(solution.stats), allow_nan=False)
