"""Dynamic programs over a chain, their tables by slots of memory or exact."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from memopt.models.chain import Chain
from memopt.models.quantize import SlotScale, slot_scale
from memopt.strategies.base import Progress
from memopt.strategies.rotor.chain_strategy import ChainStrategy
from memopt.strategies.rotor.curve import PlanSet
from memopt.strategies.rotor.limits import SolveLimits, TooLarge

DEFAULT_SLOTS = 500
FEWEST_SLOTS = 15
EXACT_TABLE_BYTES = 2**26

Plan = Callable[[SlotScale, bool, SolveLimits], PlanSet]
"""plan(scale, exact, limits): the schedules from one table; raises TooLarge or Stopped."""


@dataclass(frozen=True)
class TableStrategy(ChainStrategy):
    """A dynamic program whose table is over slots of memory, or exact.

    Attributes:
        slots: memory is counted in slots of 1/slots of the store-all memory, sizes rounded up;
            None: exact, with tables of step functions. Whatever the slots, a schedule is
            measured in exact bytes, and the smallest budget is exact.
        exact_stages: chains with at most so many stages are planned exactly in any case.
        table_bytes: largest table. An exact one is also held to 64 MiB unless slots is None;
            past that, slots are used; a slot table that is too large gets fewer slots. The
            solution's stats say so ("mode", "slots", "note").
    """

    slots: int | None = DEFAULT_SLOTS
    exact_stages: int = 40
    table_bytes: int = 2**33

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise ValueError(
                f"{type(self).__name__}: slots must be at least 1, or None for exact memory; "
                f"got {self.slots!r}"
            )

    @abstractmethod
    def plan(self, chain: Chain, scale: SlotScale, exact: bool, limits: SolveLimits) -> PlanSet:
        """The schedules of one table; raises TooLarge."""

    def plan_set(
        self, chain: Chain, deadline_s: float | None = None, progress: Progress | None = None
    ) -> PlanSet:
        note: dict[str, object] = {}
        if self.slots is None or len(chain) <= self.exact_stages:
            most = self.table_bytes
            if self.slots is not None:
                most = min(most, EXACT_TABLE_BYTES)
            try:
                return self.plan(chain, SlotScale(1), True, SolveLimits(most, deadline_s, progress))
            except TooLarge as error:
                note = {"note": f"not exact: {error}"}
        slots = self.slots or DEFAULT_SLOTS
        while True:
            try:
                limits = SolveLimits(self.table_bytes, deadline_s, progress)
                plans = self.plan(chain, slot_scale(chain, slots), False, limits)
                return plans.with_stats(None, slots=slots, **note)
            except TooLarge as error:
                note = {"note": f"fewer slots: {error}"}
                if slots <= FEWEST_SLOTS:
                    raise MemoryError(
                        f"{self.name}: a chain of {len(chain)} stages needs a table of "
                        f"{error.needed_bytes} bytes even with {slots} slots, more than "
                        f"table_bytes = {self.table_bytes}; raise table_bytes, or use "
                        'strategy "rotor" on a shorter chain'
                    ) from error
                slots = max(FEWEST_SLOTS, slots // 2)


@dataclass(frozen=True)
class Persistent(TableStrategy):
    """The fastest memory persistent schedule (Rotor §4.4), with parameter gradients."""

    name: ClassVar[str] = "rotor"

    exact_stages: int = 80

    def plan(self, chain: Chain, scale: SlotScale, exact: bool, limits: SolveLimits) -> PlanSet:
        from memopt.strategies.rotor.persistent_tables import persistent_plans

        return persistent_plans(chain, scale, True, exact, limits)
