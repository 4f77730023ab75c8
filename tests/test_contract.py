"""Every strategy that memopt has by name, on tiny graphs and chains: see `tests.contract`."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from memopt.models.chain import Chain
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph
from memopt.strategies import STRATEGIES as KNOWN
from memopt.strategies import (
    AutoSwap,
    OffloadExact,
    Strategy,
)
from tests.contract import check_budgets, check_host_budget, check_plan, check_smallest, planned
from tests.models.training_graphs import drawing, overwriting
from tests.monet.graphs import training_graph

MODELS: dict[str, Chain | Graph] = {
    "graph that draws": drawing(Random(2), random_graph(Random(1), 4)),
    "graph with alternatives": training_graph(Random(5), 4, True),
    "graph in place": overwriting(Random(7), drawing(Random(7), random_graph(Random(7), 3))),
    "whole step": drawing(Random(3), random_graph(Random(4), 2, updates=True)),
    "chain": random_chain(Random(8), 4, parameter_gradients=True),
}
QUICK: dict[str, Strategy] = {
    "autoswap": AutoSwap(trials=4),
    "offload-exact": OffloadExact(effort=0.2),
}
STRATEGIES = tuple(QUICK.get(strategy.name, strategy) for strategy in KNOWN)
BY_NAME = {strategy.name: strategy for strategy in STRATEGIES}


HEURISTIC = {"checkmate-rounding", "rotor-menus"}
"""Name the smallest budget that they found: their next search may find a smaller one."""


def plans(strategy: Strategy, model: Chain | Graph) -> bool:
    """Whether a strategy plans such a model; those for chains plan a graph's chain."""
    return (strategy.needs == "chain" and isinstance(model, Graph)) or not strategy.why_not(model)


CASES = [
    pytest.param(strategy, model, id=f"{strategy.name}-{name}")
    for strategy in STRATEGIES
    for name, model in MODELS.items()
    if plans(strategy, model)
]


def test_every_strategy_has_its_cases() -> None:
    for strategy in STRATEGIES:
        own = [case for case in CASES if case.values[0] is strategy]
        assert len(own) >= (2 if strategy.needs == "graph" else len(MODELS)), strategy.name


@pytest.mark.parametrize(("strategy", "model"), CASES)
def test_plans_are_valid_within_their_budgets_and_the_same_each_time(
    strategy: Strategy, model: Chain | Graph, tmp_path: Path
) -> None:
    assert check_budgets(strategy, model, tmp_path) > 0


@pytest.mark.parametrize(("strategy", "model"), CASES)
def test_the_smallest_budget_is_kept(
    strategy: Strategy, model: Chain | Graph, tmp_path: Path
) -> None:
    check_smallest(strategy, model, tmp_path, exact=strategy.name not in HEURISTIC)


@pytest.mark.parametrize("name", [n for n, s in BY_NAME.items() if s.features.offload])
def test_host_budgets_are_kept(name: str, tmp_path: Path) -> None:
    strategy = BY_NAME[name]
    if name != "auto":  # which takes none
        models = [model for model in MODELS.values() if plans(strategy, model)]
        assert sum(check_host_budget(strategy, model, tmp_path) for model in models) > 0


@pytest.mark.parametrize("strategy", STRATEGIES, ids=list(BY_NAME))
def test_passes_over_every_strategys_plan(strategy: Strategy, tmp_path: Path) -> None:
    """Order and addresses, at the smallest budget and without a limit."""
    for name in ("graph that draws", "graph in place"):
        for budget in ("min", None):
            plan = planned(strategy, MODELS[name], budget, order=True, place=True)
            assert plan is not None or budget == "min"
            if plan is not None:
                check_plan(plan, MODELS[name], tmp_path)
