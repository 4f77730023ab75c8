"""The laws of `memopt.testing` for every strategy that memopt has by name, on tiny instances."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.generate import random_chain, random_graph
from memopt.models.steps import has_transfers
from memopt.plan_record import PlanRecord
from memopt.reductions.chain_replay import replay_chain
from memopt.strategies import STRATEGIES as KNOWN
from memopt.strategies import AutoSwap, Joint, OffloadExact, Strategy
from memopt.strategies.base import CostModel
from memopt.testing import check_strategy, tiny_instances
from tests.brute_force.sweep import Optimum, chain_optima, graph_optima
from tests.brute_force.tiny_graphs import tiny_graph
from tests.models.training_graphs import drawing, overwriting, writing_back
from tests.models.validate_chain import validate_chain
from tests.strategies.monet.graphs import training_graph
from tests.strategies.offload.validate_offload import validate_offload

MODELS: dict[str, CostModel] = {
    "graph that draws": drawing(Random(2), random_graph(Random(1), 4)),
    "graph that writes buffers back": writing_back(random_graph(Random(1), 3)),
    "graph with alternatives": training_graph(Random(5), 4, True),
    "graph in place": overwriting(Random(7), drawing(Random(7), random_graph(Random(7), 3))),
    "whole step": drawing(Random(3), random_graph(Random(4), 2, updates=True)),
    "chain": random_chain(Random(8), 4, parameter_gradients=True),
}
QUICK: dict[str, Strategy] = {
    "autoswap": AutoSwap(trials=4),
    "joint": Joint(changes=200),
    "offload-exact": OffloadExact(effort=0.2),
}
STRATEGIES = {strategy.name: QUICK.get(strategy.name, strategy) for strategy in KNOWN}
HEURISTIC = {"auto", "checkmate-rounding", "joint", "rotor-menus"}
"""Name the smallest budget that they found: their next search may find a smaller one."""
CHAIN = random_chain(Random(3), 5, parameter_gradients=True)
GRAPH = tiny_graph(Random(11))
OPTIMA: dict[str, tuple[CostModel, Optimum]] = {
    **{name: (GRAPH, optimum) for name, optimum in graph_optima(GRAPH).items()},
    **{name: (CHAIN, optimum) for name, optimum in chain_optima(CHAIN).items()},
}
"""Strategy → an instance that is searched exhaustively, and the optimum of the strategy's class."""


def schedule_is_valid(model: CostModel, plan: PlanRecord) -> None:
    """The schedule of a bare chain, by the chains' own validators and replay."""
    if not isinstance(model, Chain) or not plan.is_of_chain:
        return
    assert plan.chain_steps is not None
    if has_transfers(plan.chain_steps):
        limits = Budget(plan.budget, plan.host_peak_bytes)
        assert validate_offload(model, plan.chain_steps, limits) is None
    else:
        assert validate_chain(model, plan.chain_steps, plan.budget) is None
        assert replay_chain(model, plan.chain_steps).peak_bytes == plan.peak_bytes


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("models", [MODELS, tiny_instances()], ids=["drawn", "shipped"])
def test_every_strategy_keeps_the_laws(name: str, models: Mapping[str, CostModel]) -> None:
    strategy = STRATEGIES[name]
    exact = name not in HEURISTIC
    cases = check_strategy(strategy, models, exact_smallest=exact, also=schedule_is_valid)
    assert len(cases) >= (2 if strategy.needs == "graph" else len(models))
    assert all(case.plans > 0 for case in cases)
    if strategy.features.offload:
        assert any(case.host_peak_bytes > 0 for case in cases)


@pytest.mark.parametrize("name", OPTIMA)
def test_no_schedule_is_faster_than_a_bound(name: str) -> None:
    model, optimum = OPTIMA[name]
    check_strategy(
        STRATEGIES[name],
        {"exhaustively searched": model},
        exact_smallest=name not in HEURISTIC,
        also=schedule_is_valid,
        fastest=lambda _model, budget: optimum(2**40 if budget is None else budget),
    )
