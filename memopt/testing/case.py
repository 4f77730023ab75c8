"""One strategy at one instance, and the error that says which law it breaks there."""

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
    """What every strategy promises; see `Strategy.solve`."""

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
        law: which.
        strategy: its name.
        instance: the name of what it planned.
        budget_bytes: for which budget; None: no limit, or none in particular.
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
    """A strategy at an instance: what is checked, and how much was.

    Attributes:
        strategy: who plans.
        instance: the name of what it plans.
        model: what it plans.
        device: link rates.
        exact_smallest: whether one byte below its smallest budget must be refused.
        monotone: whether it promises not to be slower with more memory.
        fastest: an exhaustive search; None: there is none.
        also: a further check of every plan; None: there is none.
        plans: how many plans were checked.
        host_peak_bytes: the most that any of them had on the host.
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
        """Raise StrategyLawError unless the law holds; `found` says what is there instead."""
        if not holds:
            raise StrategyLawError(law, self.strategy.name, self.instance, budget_bytes, found)
