"""auto on real models: the minimum over the single strategies, and its time limit."""

from __future__ import annotations

import time

import pytest

import memopt
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.planning import solve
from memopt.strategies import Auto, resolve
from tests.zoo import get

MODELS = ("mlp", "gpt2", "unet", "resnet50", "mobilenet_v2", "llama")
MEMBERS = ("store-all", "sequential", "revolve", "rotor", "rotor-optimal", "olla")
SHARES = (0.0, 0.2, 0.4, 0.7, 1.0)
AMPLE_S = 1200.0
LIMIT_S = 10.0
SLACK_S = 2.0


def graph_of(name: str) -> Graph:
    """The tiny family, estimated: the same graph on every machine."""
    family = get(name)
    return memopt.profile(
        family.make("tiny"), family.inputs("tiny"), device="cpu-core", mode="estimate"
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_is_the_minimum(name: str) -> None:
    graph = graph_of(name)
    floor = memopt.plan(graph, budget="min", strategy="rotor", progress=False).peak_bytes
    peak = memopt.plan(graph, strategy="store-all", progress=False).peak_bytes
    auto = Auto(tuple(resolve(member) for member in MEMBERS))
    for share in SHARES:
        budget = floor + int(share * (peak - floor))
        times = []
        for member in MEMBERS:
            try:
                times.append(solve(graph, budget, resolve(member), device=Device()).step_time_s)
            except (InfeasibleBudgetError, MemoptError):
                continue
        made = solve(graph, budget, auto, device=Device(), time_limit_s=AMPLE_S)
        # Sums in another order differ in the last digit.
        assert made.step_time_s == pytest.approx(min(times), rel=1e-9), share
        assert made.peak_bytes <= budget


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_keeps_its_time_limit(name: str) -> None:
    graph = graph_of(name)
    floor = memopt.plan(graph, budget="min", strategy="rotor", progress=False).peak_bytes
    # The clock of this process: others on the machine don't count.
    begin, wall = time.process_time(), time.monotonic()
    solve(graph, floor, resolve("auto"), device=Device(), time_limit_s=LIMIT_S)
    spent = min(time.process_time() - begin, time.monotonic() - wall)
    assert spent <= LIMIT_S + SLACK_S
