"""Rotor's persistent dynamic program (Rotor §4.4, Algorithms 3 and 4) and revolve (§5.4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from memopt.models.chain import Chain
from memopt.models.quantize import slot_scale
from memopt.strategies.base import Progress
from memopt.strategies.rotor.chain_strategy import ChainStrategy
from memopt.strategies.rotor.curve import PlanSet


@dataclass(frozen=True)
class Rotor(ChainStrategy):
    """The fastest memory persistent schedule (Rotor Theorem 4.8), with parameter gradients.

    Attributes:
        slots: memory is counted in slots of 1/slots of the store-all memory.
    """

    name: ClassVar[str] = "rotor"

    slots: int = 500

    def plan_set(
        self, chain: Chain, deadline_s: float | None = None, progress: Progress | None = None
    ) -> PlanSet:
        from memopt.strategies.rotor.slotted import persistent_plans

        return persistent_plans(chain, slot_scale(chain, self.slots), True, deadline_s, progress)
