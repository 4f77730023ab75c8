"""Programs without a budget, against exhaustive search."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.graph import Graph, Implementation, Operator, Tensor, TensorKind
from memopt.models.status import Status
from memopt.programs.instructions import Compute
from memopt.programs.replay import replay
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies import Joint, Monet, RotorMenus, Strategy
from memopt.strategies.shared import fastest_runs
from memopt.strategies.shared.fastest_runs import fastest_program
from memopt.strategies.shared.incumbent import stored
from tests.brute_force.program_search import ProgramSearch
from tests.brute_force.tiny_graphs import tiny_graph
from tests.fuzz.instances import remembered, with_figures


@pytest.mark.parametrize("seeds", [range(80), range(80, 160)], ids=str)
def test_none_is_faster(seeds: range) -> None:
    faster = 0
    for seed in seeds:
        dice = Random(seed)
        time = remembered(lambda _, dice=dice: 10 ** dice.uniform(-9, 9))
        graph = with_figures(tiny_graph(dice), time=time)
        program, exact = fastest_program(graph, None)
        violation, figures = validate_and_replay(graph, program, Budget(None), Device())
        assert violation is None, seed
        assert exact, seed
        optimum = ProgramSearch(graph).least_time(2**60)
        assert figures.time_s == pytest.approx(optimum, rel=1e-12), seed
        faster += figures.time_s < graph.compute_time_s
    assert faster > 20


def _one_for_all() -> Graph:
    """`a` may write a mask that `b` reads instead, `c` is spared if `d` reads `a`'s result, and
    `e`'s two results are made faster one by one."""
    names = ("x", "a", "mask", "b", "c", "d", "e", "f")
    tensors = [Tensor(name, 4, TensorKind.INPUT if name == "x" else TensorKind.ACTIVATION)
               for name in names]  # fmt: skip
    operators = [
        Operator("a", (0,), (1,), 4.0, implementations=(
            Implementation("masked", 5.0, writes=(1, 2)),)),
        Operator("b", (1,), (3,), 4.0, implementations=(
            Implementation("by mask", 2.0, reads=(2,)),)),
        Operator("c", (1,), (4,), 4.0),
        Operator("d", (4,), (5,), 4.0, implementations=(
            Implementation("fused", 7.0, reads=(1,)),)),
        Operator("e", (1,), (6, 7), 4.0, implementations=(
            Implementation("first", 1.0, writes=(6,)),
            Implementation("second", 2.0, writes=(7,)),)),
    ]  # fmt: skip
    return Graph(tensors, operators, outputs=(3, 5, 6, 7))


def _names(graph: Graph) -> list[tuple[str, str | None]]:
    program, exact = fastest_program(graph, None)
    assert exact
    runs = (step for step in program if isinstance(step, Compute))
    return [(graph.operators[run.op].name, run.implementation) for run in runs]


def test_what_is_faster_together() -> None:
    found = [("a", "masked"), ("b", "by mask"), ("d", "fused"), ("e", "first"), ("e", "second")]
    assert _names(_one_for_all()) == found
    # An operator that may run once only has one implementation.
    operators = tuple(replace(o, recomputable=False) for o in _one_for_all().operators)
    assert _names(replace(_one_for_all(), operators=operators)) == [*found[:3], ("e", None)]


def test_none_but_those_allowed() -> None:
    graph = _one_for_all()
    assert fastest_program(graph, lambda *_: False)[0] == stored(graph)


@pytest.mark.parametrize("strategy", [Monet(), RotorMenus(), Joint(changes=10)])
def test_strategies_without_a_budget(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = _one_for_all()
    found = strategy.solve(graph, None, time_limit_s=0.1)
    assert (found.status, found.time_s, found.lower_bound_s) == (Status.OPTIMAL, 17.0, 17.0)
    # With states left out there is no proof, and the strategy searches.
    monkeypatch.setattr(fastest_runs, "STATES", 0)
    assert not fastest_program(graph, None)[1]
    found = strategy.solve(graph, None, time_limit_s=0.1)
    assert found.program is not None
    assert validate_and_replay(graph, found.program, Budget(None), Device())[0] is None


def test_a_forward_whose_implementations_spare_an_operator_is_searched_as_it_is() -> None:
    graph = _one_for_all()
    peak_bytes = replay(graph, stored(graph)).peak_bytes
    assert Monet().solve(graph, peak_bytes, time_limit_s=0.1).plans
