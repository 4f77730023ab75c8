"""A whole step's rules between its backward and its updates, as plain data for plan files."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Any

from memopt.models.codec import SPARSE, Check, Rate

_Count = Annotated[int, Check("a whole number, at least 1", lambda value: value >= 1)]


def _number(value: object) -> float:
    """Return a number as it is, and NaN, which no limit allows, for anything else."""
    return value if isinstance(value, float | int) and value is not True else math.nan


@dataclass(frozen=True, slots=True)
class StepRules:
    """The way in which a whole step makes its updates from gradients.

    Attributes:
        micro_batches: number of batches whose gradients one step adds up, each with its loss
            divided by their number.
        clip_norm: the largest global norm of the gradients, to which they are scaled down; None:
            they are not clipped.
        norm_type: the kind of norm: 2.0, or inf.
        scaled: whether losses are scaled by a `torch.amp.GradScaler`.
        reduce_once: whether gradients are averaged over ranks once, with the last micro-batch.
    """

    micro_batches: _Count = field(default=1, metadata=SPARSE)
    clip_norm: float | None = field(default=None, metadata=SPARSE)
    norm_type: Rate = field(default=2.0, metadata=SPARSE)
    scaled: bool = field(default=False, metadata=SPARSE)
    reduce_once: bool = field(default=False, metadata=SPARSE)

    def __post_init__(self) -> None:
        if type(self.micro_batches) is not int or self.micro_batches < 1:
            raise ValueError(f"micro_batches is a number, at least 1, got {self.micro_batches!r}")
        if self.clip_norm is not None and not 0 < _number(self.clip_norm) < math.inf:
            raise ValueError(f"clip_norm is a positive number, got {self.clip_norm!r}")
        if self.reduce_once and self.micro_batches == 1:
            raise ValueError("reduce_once=True is for several micro_batches=, got 1: leave it out")
        if not _number(self.norm_type) > 0:
            raise ValueError(f"norm_type is positive, 2.0 or math.inf say, got {self.norm_type!r}")

    def __bool__(self) -> bool:
        """Return whether the step does anything but update by the gradients of one batch."""
        return self.micro_batches > 1 or self.clip_norm is not None or self.scaled


PLAIN = StepRules()
"""Every parameter is updated as soon as its gradient is complete."""


def scales(scaler: Any) -> bool:
    """Return whether a GradScaler (None: there is none) scales anything.

    Raises:
        ValueError: it is no GradScaler.
    """
    if scaler is not None and not hasattr(scaler, "is_enabled"):
        raise ValueError(f"scaler= is a torch.amp.GradScaler, got {scaler!r}")
    return scaler is not None and bool(scaler.is_enabled())
