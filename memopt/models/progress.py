"""How whoever waits is told how far something is."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

Progress: TypeAlias = Callable[[float, str], None]
"""progress(fraction in [0, 1], what is being done). It may raise KeyboardInterrupt to stop a
solver, which then returns its best plan with its bound."""
