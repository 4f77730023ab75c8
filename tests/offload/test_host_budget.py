"""plan(host_budget=): kept, named where it is too small, refused where it means nothing."""

from __future__ import annotations

from random import Random

import pytest

import memopt
from memopt.errors import InfeasibleBudgetError
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph

LINK = Device(to_host_bytes_per_s=1.0)
GRAPH = random_graph(Random(3), 8)
CHAIN = random_chain(Random(1), 8)


def planned(model: object, strategy: str, host_budget: int | str | None) -> memopt.Plan:
    return memopt.plan(
        model,
        budget=least(model, strategy),
        strategy=strategy,
        host_budget=host_budget,
        device=LINK,
        progress=False,
    )


def least(model: object, strategy: str) -> int:
    budget = memopt.plan(model, budget="min", strategy=strategy, device=LINK, progress=False).budget
    assert budget is not None
    return budget


CASES = [(GRAPH, "offload-graph"), (CHAIN, "dynprog"), (CHAIN, "greedy")]


@pytest.mark.parametrize(("model", "strategy"), CASES)
def test_what_is_needed_is_enough_and_nothing_is_too_little(model: object, strategy: str) -> None:
    needed = planned(model, strategy, None).host_peak_bytes
    assert needed > 0
    assert planned(model, strategy, needed).host_peak_bytes <= needed
    with pytest.raises(InfeasibleBudgetError, match="host_budget_bytes=0 is too small"):
        planned(model, strategy, 0)


@pytest.mark.parametrize("wrong", [-1, 0.5, "plenty", True])
def test_unreadable(wrong: object) -> None:
    with pytest.raises(ValueError, match="host_budget"):
        planned(GRAPH, "offload-graph", wrong)  # type: ignore[arg-type]  # wrong on purpose


def test_a_strategy_that_moves_nothing_needs_none() -> None:
    assert planned(GRAPH, "store-all", 0).host_peak_bytes == 0


def test_auto_says_who_takes_one() -> None:
    with pytest.raises(ValueError, match="auto takes no host_budget"):
        memopt.plan(GRAPH, strategy="auto", host_budget=5, device=LINK, progress=False)


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_link_without_bandwidth_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Device(to_host_bytes_per_s=rate)
    with pytest.raises(ValueError, match="must be positive"):
        Device(to_host_bytes_per_s=1.0, from_host_bytes_per_s=rate)
