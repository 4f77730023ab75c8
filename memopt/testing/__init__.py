"""Checks on tiny instances whether a strategy keeps the laws of `Strategy.solve`.

Needs no test framework: `check_strategy(Mine())` raises an AssertionError that names the law.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph
from memopt.models.instances import three_layers
from memopt.strategies import Strategy
from memopt.strategies.base import CostModel
from memopt.strategies.target import Target
from memopt.testing.case import Also as Also
from memopt.testing.case import Case as Case
from memopt.testing.case import Fastest as Fastest
from memopt.testing.case import Law as Law
from memopt.testing.case import StrategyLawError as StrategyLawError
from memopt.testing.plans import check_plans
from memopt.testing.solutions import check_solutions

SLOW_LINK = Device(to_host_bytes_per_s=5.0)
"""A link so slow that moving a tensor of a tiny instance takes as long as its operators."""


def tiny_instances() -> dict[str, CostModel]:
    """Map names to instances: chains, random graphs, some with alternatives, and a whole step."""
    return {
        "three layers": three_layers(),
        "graph": random_graph(Random(1), 4),
        "graph with alternatives": random_graph(Random(5), 3, implementations=True),
        "whole step": random_graph(Random(4), 2, updates=True),
        "chain": random_chain(Random(8), 4, parameter_gradients=True),
        "chain of one stage": random_chain(Random(2), 1),
    }


def check_strategy(
    strategy: Strategy,
    models: Mapping[str, CostModel] | None = None,
    *,
    device: Device = SLOW_LINK,
    exact_smallest: bool = True,
    monotone: bool = False,
    fastest: Fastest | None = None,
    also: Also | None = None,
) -> tuple[Case, ...]:
    """Check every law of `Law` on every instance that the strategy plans.

    Args:
        strategy: an instance, with parameters that solve tiny instances quickly.
        models: the instances by their names; None: `tiny_instances()`. Those that the strategy
            refuses (`why_not`) are left out, and chains for one that plans graphs.
        device: link rates.
        exact_smallest: whether the smallest budget that the strategy names is exact: nothing below
            it is feasible. A heuristic's next search may find a smaller one.
        monotone: whether the strategy promises that a larger budget never gives a slower plan.
        fastest: fastest(cost model, budget in bytes) returns the seconds of the fastest schedule in
            the strategy's class, by exhaustive search; infinity if no schedule fits.
        also: also(cost model, plan), a further check of every plan.

    Returns:
        A case for each instance that was checked.

    Raises:
        StrategyLawError: a law is broken; names the law, the instance and the budget.
    """
    found = []
    for name, model in (tiny_instances() if models is None else models).items():
        of_chain = isinstance(model, Chain) and strategy.plans_operators
        if of_chain or Target.of(strategy, model).why_not() is not None:
            continue
        case = Case(strategy, name, model, device, exact_smallest, monotone, fastest, also)
        check_solutions(case)
        check_plans(case)
        found.append(case)
    if not found:
        raise StrategyLawError(Law.PLANS, strategy.name, "every instance", None, "it plans none")
    return tuple(found)
