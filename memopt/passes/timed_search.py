"""The state every search here shares: its time limit, its listener and its gap."""

from __future__ import annotations

import time
from collections.abc import Callable

Improvement = Callable[[float, int, int], None]
"""Called with (seconds since the start, peak bytes, bound bytes)."""


class TimedSearch:
    """A search with a wall-clock limit that reports its improvements."""

    def __init__(
        self, time_limit_s: float | None, on_improvement: Improvement | None = None
    ) -> None:
        self.started_s = time.monotonic()
        self.time_limit_s = time_limit_s
        self.on_improvement = on_improvement
        self.interrupted = False

    def elapsed_s(self) -> float:
        """Return the seconds since the start."""
        return time.monotonic() - self.started_s

    def left_s(self) -> float | None:
        """Return the seconds left; None: there is no limit."""
        return None if self.time_limit_s is None else self.time_limit_s - self.elapsed_s()

    def out_of_time(self) -> bool:
        """Tell whether the time limit has passed."""
        return self.time_limit_s is not None and self.elapsed_s() >= self.time_limit_s

    def tell(self, peak: int, bound: int) -> None:
        """Report an improvement to the listener, if any."""
        if self.on_improvement is not None:
            self.on_improvement(self.elapsed_s(), peak, bound)
