"""Rotor and its yardstick revolve: dynamic programs over a chain, by slots or in exact memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memopt.models.chain import Chain
from memopt.models.quantize import SlotScale
from memopt.strategies.base import Progress
from memopt.strategies.rotor.curve import PlanSet
from memopt.strategies.rotor.floating import RotorOptimal
from memopt.strategies.rotor.limits import SolveLimits
from memopt.strategies.rotor.table_strategy import Persistent, TableStrategy


@dataclass(frozen=True)
class Rotor(Persistent):
    """The fastest memory persistent schedule (Rotor §4.4), with parameter gradients.

    Attributes:
        persistent: False: the fastest weakly persistent schedule (Rotor §4.3, corrected), as
            `RotorOptimal`, in a factor L more time.
    """

    persistent: bool = True

    def plan_set(
        self, chain: Chain, deadline_s: float | None = None, progress: Progress | None = None
    ) -> PlanSet:
        if self.persistent:
            return super().plan_set(chain, deadline_s, progress)
        exact_stages = min(self.exact_stages, RotorOptimal.exact_stages)
        optimal = RotorOptimal(self.slots, exact_stages, self.table_bytes)
        return optimal.plan_set(chain, deadline_s, progress)


@dataclass(frozen=True)
class Revolve(TableStrategy):
    """The heterogeneous AD model (Rotor §5.4): only activations are kept, and every backward comes
    right after its own F_all. Rotor's recurrence without the move that keeps ā.
    """

    name: ClassVar[str] = "revolve"

    exact_stages: int = 80

    def plan(self, chain: Chain, scale: SlotScale, exact: bool, limits: SolveLimits) -> PlanSet:
        from memopt.strategies.rotor.persistent_tables import persistent_plans

        return persistent_plans(chain, scale, False, exact, limits)
