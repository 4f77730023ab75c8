"""How whoever waits is told how far something is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[float, str], None]
"""progress(fraction in [0, 1], what is being done). It may raise KeyboardInterrupt to stop a
solver, which then returns its best plan with its bound."""


def stops(progress: Progress | None, fraction: float, what: str) -> bool:
    """Tell the caller how far it is; whether the caller wants the search to end here."""
    try:
        if progress is not None:
            progress(fraction, what)
    except KeyboardInterrupt:
        return True
    return False
