"""plan(host_budget=): kept, named where it is too small, refused where it means nothing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import ClassVar

import pytest

import memopt
from memopt.errors import InfeasibleBudgetError, InvalidProgramError, PlanFileError
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph
from memopt.strategies import Auto, DynProg, OffloadGraph, Progress, Solution, StoreAll, Strategy
from memopt.strategies.base import CostModel, Features

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


@pytest.mark.parametrize("host_bytes", [0, 5])
def test_auto_keeps_one(host_bytes: int) -> None:
    auto, most = Auto(time_limit_s=2.0), least(GRAPH, "store-all")
    made = memopt.plan(
        GRAPH,
        budget="min",
        strategy=auto,
        host_budget=host_bytes,
        device=LINK,
        progress=False,
    )
    assert made.host_budget == host_bytes
    assert made.host_peak_bytes <= host_bytes
    assert made.peak_bytes <= most


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_link_without_bandwidth_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        Device(to_host_bytes_per_s=rate)
    with pytest.raises(ValueError, match="must be positive"):
        Device(to_host_bytes_per_s=1.0, from_host_bytes_per_s=rate)


@dataclass(frozen=True)
class Overrunning(Strategy):
    """Moves what it likes: a budget of the device, but none of the host, is kept."""

    moves_for: int = 0
    host_budget_bytes: int | None = None

    name: ClassVar[str] = "overrunning"
    needs: ClassVar[str] = "any"
    features: ClassVar[Features] = Features(offload=True)

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        true = OffloadGraph() if isinstance(cost_model, Graph) else DynProg()
        return true.solve(cost_model, self.moves_for, device=device)


def overrun(model: Graph | Chain, **options: object) -> memopt.Plan:
    """A plan of the strategy that overruns its host budget."""
    strategy = Overrunning(least(model, "offload-graph" if model is GRAPH else "dynprog"))
    return memopt.plan(model, strategy=strategy, device=LINK, progress=False, **options)  # type: ignore[arg-type]  # of plan


@pytest.mark.parametrize(
    ("model", "passes"), [(CHAIN, ()), (GRAPH, ()), (GRAPH, ("order",)), (GRAPH, ("place",))]
)
def test_a_plan_over_the_host_budget_is_refused(
    model: Graph | Chain, passes: tuple[str, ...]
) -> None:
    more = dict.fromkeys(passes, True)
    used = overrun(model, **more).host_peak_bytes
    assert overrun(model, host_budget=used, **more).host_budget == used
    with pytest.raises(InvalidProgramError, match="host memory exceeds its budget"):
        overrun(model, host_budget=used - 1, **more)


def test_the_strategys_own_limit_counts_too() -> None:
    strategy = Overrunning(least(GRAPH, "offload-graph"), host_budget_bytes=1)
    with pytest.raises(InvalidProgramError, match="host memory exceeds its budget"):
        memopt.plan(GRAPH, strategy=strategy, device=LINK, progress=False)
    auto = Auto((strategy, StoreAll()))
    plan = memopt.plan(GRAPH, strategy=auto, device=LINK, progress=False)
    assert plan.stats["chosen"] == "store-all"
    both = replace(strategy, host_budget_bytes=2**20)
    with pytest.raises(InvalidProgramError, match="host memory exceeds its budget"):
        memopt.plan(GRAPH, strategy=both, host_budget=1, device=LINK, progress=False)


@pytest.mark.parametrize("model", [GRAPH, CHAIN])
def test_a_file_over_its_host_budget_is_refused(model: Graph | Chain, tmp_path: Path) -> None:
    plan = overrun(model, host_budget=2**20)
    plan.save(tmp_path / "plan.json")
    assert memopt.load(tmp_path / "plan.json").host_budget == 2**20
    replace(plan, host_budget=plan.host_peak_bytes - 1).save(tmp_path / "plan.json")
    with pytest.raises(PlanFileError, match="host memory exceeds its budget"):
        memopt.load(tmp_path / "plan.json")
