"""joint with parameters that may live on the host: activations are recomputed beside."""

from dataclasses import replace

import pytest

from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.strategies.joint.strategy import Joint
from memopt.strategies.moving.bound import link_bound_s
from memopt.strategies.offload.graph import OffloadGraph
from tests.strategies.offload.test_moved_step import layered


@pytest.mark.parametrize("rate", [pytest.param(30.0, marks=pytest.mark.slow), 300.0])
def test_never_slower_than_offload_graph(rate: float) -> None:
    graph = layered(6, weight=20, activation=60)
    operators = (replace(o, recomputable=o.phase != "update") for o in graph.operators)
    graph = replace(graph, operators=tuple(operators))
    device = Device(to_host_bytes_per_s=rate)
    budget = 520
    found = Joint().solve(graph, budget, device=device)
    moved = OffloadGraph().solve(graph, budget, device=device)
    assert found.program is not None
    assert validate(graph, found.program, Budget(budget)) is None
    time_s = replay(graph, found.program, device).time_s
    assert found.time_s == time_s >= link_bound_s(graph, budget, device) - 1e-9
    assert moved.time_s is None or time_s <= moved.time_s


def test_recomputing_is_tried_however_late_it_is() -> None:
    graph = layered(6, weight=20, activation=60)
    operators = (replace(o, recomputable=o.phase != "update") for o in graph.operators)
    graph = replace(graph, operators=tuple(operators))
    device = Device(to_host_bytes_per_s=1.0)
    found = Joint().solve(graph, 560, device=device, time_limit_s=0.0)
    assert found.program is not None
    assert str(found.stats["source"]).startswith("rotor")


@pytest.mark.slow
def test_the_host_budget_is_kept() -> None:
    graph = layered(6)
    device = Device(to_host_bytes_per_s=100.0)
    budget = graph.movable_bytes // 2
    free = Joint().solve(graph, budget, device=device)
    needed = replay(graph, free.program).host_peak_bytes
    kept = Joint(host_budget_bytes=needed).solve(graph, budget, device=device)
    assert replay(graph, kept.program).host_peak_bytes <= needed
