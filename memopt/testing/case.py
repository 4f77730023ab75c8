"""One strategy on one instance, and the error that names the law it breaks there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from memopt.models.device import Device
from memopt.plan_record import PlanRecord
from memopt.strategies import Strategy
from memopt.strategies.base import CostModel

Fastest: TypeAlias = Callable[[CostModel, int | None], float]
"""fastest(cost model, budget in bytes; None: no limit): seconds; infinity: no schedule fits."""
Also: TypeAlias = Callable[[CostModel, PlanRecord], None]
"""also(cost model, plan): raises an AssertionError where something is wrong."""


class Law(StrEnum):
    """The laws that every strategy keeps; see `Strategy.solve`."""

    PLANS = "it plans: something at least, and everything without a budget"
    VALID = "a plan is valid: it is a schedule of its cost model, and replays"
    BUDGETS = "a plan keeps the budgets of device and host"
    BOUND = "no schedule within the budget is faster than the bound"
    OPTIMAL = "nothing beats an optimal plan, and nothing fits an infeasible budget"
    MONOTONE = "a larger budget gives no slower plan"
    DETERMINISTIC = "the same budget gives the same plan"
    SMALLEST = "without a plan it names the smallest budget, which is feasible"
    STOPS = "it ends at its time limit and at Ctrl-C with what it has"
    REFUSAL = "it refuses a budget with an error that says what would do"
    STATS = "its statistics can be written as JSON"
    FILE = "a plan is the same after saving and loading"


class StrategyLawError(AssertionError):
    """A strategy breaks a law.

    Attributes:
        law: the law that is broken.
        strategy: its name.
        instance: the name of the instance that it planned.
        budget_bytes: the budget; None: no limit, or the law is about no single budget.
    """

    def __init__(
        self, law: Law, strategy: str, instance: str, budget_bytes: int | None, found: str
    ) -> None:
        within = "no budget" if budget_bytes is None else f"a budget of {budget_bytes} bytes"
        super().__init__(f"{strategy} on {instance!r} with {within}: {found} (law: {law.value})")
        self.law = law
        self.strategy = strategy
        self.instance = instance
        self.budget_bytes = budget_bytes


@dataclass
class Case:
    """A strategy on an instance: which checks to make, and how many plans were checked.

    Attributes:
        strategy: the strategy under test.
        instance: the name of the instance.
        model: its cost model.
        device: link rates.
        exact_smallest: whether one byte below its smallest budget must be refused.
        monotone: whether the strategy promises not to be slower with more memory.
        fastest: an exhaustive search; None: not checked.
        also: a further check of every plan; None: no such check.
        plans: how many plans were checked.
        host_peak_bytes: the largest host peak of these plans.
    """

    strategy: Strategy
    instance: str
    model: CostModel
    device: Device
    exact_smallest: bool = True
    monotone: bool = False
    fastest: Fastest | None = None
    also: Also | None = None
    plans: int = 0
    host_peak_bytes: int = 0

    def require(self, law: Law, holds: object, budget_bytes: int | None, found: str) -> None:
        """Raise StrategyLawError unless the law holds; `found` says what was found instead."""
        if not holds:
            raise StrategyLawError(law, self.strategy.name, self.instance, budget_bytes, found)
