"""Checks on numbers shared by the frozen dataclasses of the cost model."""

from __future__ import annotations

import math
from numbers import Integral, Real


def check_bytes(owner: str, **values: int) -> None:
    """Raise ValueError unless every value is a non-negative whole number of bytes."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{owner}: {name} must be a whole number of bytes, got {value!r}")
        if value < 0:
            raise ValueError(f"{owner}: {name} must be at least 0 bytes, got {value}")


def check_seconds(owner: str, **values: float) -> None:
    """Raise ValueError unless every value is a finite, non-negative number of seconds."""
    for name, value in values.items():
        if not isinstance(value, Real) or not math.isfinite(value) or value < 0:
            raise ValueError(
                f"{owner}: {name} must be a finite number of seconds, at least 0, got {value!r}"
            )
