"""auto on real models: the minimum over the single strategies, on the tiny families, estimated, so
that the graphs are the same everywhere."""

from __future__ import annotations

import pytest

import memopt
from memopt.api.planning import solve
from memopt.errors import MemoptError
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.strategies import Auto, resolve
from tests.zoo import get

MODELS = ("mlp", "gpt2", "unet", "resnet50", "mobilenet_v2", "llama")
SHARES = (0.0, 0.2, 0.4, 0.7, 1.0)
"""Budgets: Rotor's smallest + share x (store-all's peak - that)."""
SINGLE = ("store-all", "sequential", "revolve", "rotor", "rotor-optimal", "rotor-free")
AMPLE_S = 1200.0


def graph_of(name: str) -> Graph:
    family = get(name)
    return memopt.profile(
        family.make("tiny"), family.inputs("tiny"), device="cpu-core", mode="estimate"
    )


def budgets_of(graph: Graph) -> dict[float, int]:
    """Share → bytes."""
    floor = memopt.plan(graph, budget="min", strategy="rotor", progress=False).peak_bytes
    peak = memopt.plan(graph, strategy="store-all", progress=False).peak_bytes
    return {share: floor + int(share * (peak - floor)) for share in SHARES}


def least_of(graph: Graph, budget_bytes: int) -> float:
    """The least step time of the single strategies."""
    found = []
    for name in SINGLE:
        try:
            found.append(solve(graph, budget_bytes, resolve(name), device=Device()).step_time_s)
        except MemoptError:
            # Infeasible: this strategy's class has no plan within the budget.
            continue
    return min(found)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", MODELS)
def test_is_the_minimum(name: str) -> None:
    graph = graph_of(name)
    auto = Auto(tuple(resolve(member) for member in SINGLE))
    for share, budget in budgets_of(graph).items():
        made = solve(graph, budget, auto, device=Device(), time_limit_s=AMPLE_S)
        # Sums in another order differ in the last digit.
        assert made.step_time_s == pytest.approx(least_of(graph, budget), rel=1e-9), share
        assert made.peak_bytes <= budget


@pytest.mark.parametrize("name", ["gpt2", "unet"])
def test_the_default_is_no_slower_than_rotor_at_once(name: str) -> None:
    """The portfolio has rotor's plan even where nothing more is worth a search."""
    graph = graph_of(name)
    for budget in budgets_of(graph).values():
        made = solve(graph, budget, Auto(at_once=True), device=Device())
        assert (
            made.step_time_s <= solve(graph, budget, resolve("rotor"), device=Device()).step_time_s
        )
        assert made.peak_bytes <= budget
