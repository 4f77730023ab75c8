"""How a long computation reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[float, str], None]
"""progress(fraction in [0, 1], the current work). It may raise KeyboardInterrupt to stop a
solver, which then returns its best plan with its bound."""


def stops(progress: Progress | None, fraction: float, what: str) -> bool:
    """Report progress; return whether the caller wants the search to end."""
    try:
        if progress is not None:
            progress(fraction, what)
    except KeyboardInterrupt:
        return True
    return False
