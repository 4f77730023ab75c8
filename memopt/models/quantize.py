"""Rounding of bytes to slots, the only place where the cost model rounds: sizes up, budgets down.

Rotor §5.2 says that sizes are rounded down; a plan made that way may exceed its budget, so
sizes go up here. The size of a slot comes from the memory that the chain needs without any
recomputation, never from the budget: one table then answers every budget, and a larger budget
never gets a slower plan because its slots happen to be larger.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SlotScale:
    """A slot of memory; every multiple of it is a whole number of slots.

    Attributes:
        slot_bytes: size of one slot, at least 1. With 1, nothing is rounded.
    """

    slot_bytes: int

    def __post_init__(self) -> None:
        if self.slot_bytes < 1:
            raise ValueError(f"SlotScale: slot_bytes must be at least 1, got {self.slot_bytes}")

    def size_slots(self, size_bytes: int) -> int:
        """Return the slots that hold `size_bytes`, rounded up."""
        return -(-size_bytes // self.slot_bytes)

    def budget_slots(self, budget_bytes: int) -> int:
        """Return the whole slots within `budget_bytes`, rounded down."""
        return budget_bytes // self.slot_bytes


def slot_scale(whole_bytes: int, slots: int) -> SlotScale:
    """Divide a chain's memory without recomputation (`whole_bytes`) into this many slots.

    Raises:
        ValueError: slots is below 1.
    """
    if slots < 1:
        raise ValueError(f"slots must be at least 1, got {slots}; use None for exact memory")
    return SlotScale(max(1, -(-whole_bytes // slots)))
