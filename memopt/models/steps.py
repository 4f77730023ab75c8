"""Chain steps: what chain strategies produce (Rotor Table 1, and the moves of Offloading §3)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, TypeAlias

from memopt.models.codec import Columns


class Move(StrEnum):
    """The action of a chain step at its stage ℓ."""

    FORWARD_NO_SAVE = "F∅"
    """Compute a^ℓ and drop a^{ℓ-1}."""
    FORWARD_CHECKPOINT = "Fck"
    """Compute a^ℓ and keep a^{ℓ-1}."""
    FORWARD_ALL = "Fall"
    """Compute ā^ℓ (contains a^ℓ) and keep a^{ℓ-1}."""
    BACKWARD = "B"
    """Compute δ^{ℓ-1} from δ^ℓ, ā^ℓ and a^{ℓ-1}; frees δ^ℓ, ā^ℓ, and a^{ℓ-1} if held on its own."""
    DROP_ACTIVATION = "drop a"
    """Free a^ℓ (ℓ from 1; a^0 is never freed)."""
    DROP_SAVED = "drop ā"
    """Free ā^ℓ."""
    OFFLOAD = "offload"
    """Start copying ā^ℓ (a^0 for ℓ = 0) to the host; the device copy stays until its RELEASE."""
    RELEASE = "release"
    """Wait for the copy of ā^ℓ (a^0 for ℓ = 0) to the host, then free the device copy."""
    PREFETCH = "prefetch"
    """Start bringing ā^ℓ (a^0 for ℓ = 0) back: it occupies memory from here on, its first reader
    waits for it, and the host copy is dropped right after that reader."""


FORWARD_MOVES = (Move.FORWARD_NO_SAVE, Move.FORWARD_CHECKPOINT, Move.FORWARD_ALL)
TRANSFER_MOVES = (Move.OFFLOAD, Move.RELEASE, Move.PREFETCH)


@dataclass(frozen=True, slots=True, order=True)
class ChainStep:
    """One step of a chain schedule: `move` at stage `stage` (1-based, the loss is the last)."""

    move: Move
    stage: int

    def __str__(self) -> str:
        return f"{self.move}^{self.stage}"


def has_transfers(steps: Iterable[ChainStep]) -> bool:
    """Return whether a schedule moves data between the device and the host."""
    return any(step.move in TRANSFER_MOVES for step in steps)


Steps: TypeAlias = tuple[Annotated[ChainStep, Columns("move", "stage")], ...]
"""A chain schedule; in files, a list of [move, stage]."""
