"""When a search must end: at its time limit, or when the caller interrupts it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from memopt.strategies.base import Progress, stops


@dataclass
class Deadline:
    """The end of a search.

    Attributes:
        at_s: on time.monotonic's clock.
        progress: called by `passed`; KeyboardInterrupt ends the search.
        over: whether `passed` has said so.
    """

    at_s: float = math.inf
    progress: Progress | None = None
    over: bool = False

    @property
    def left_s(self) -> float:
        """Seconds until the deadline, at least 0."""
        return max(0.0, self.at_s - time.monotonic())

    def within(self, seconds: float) -> Deadline:
        """Give a deadline in so many seconds, or this one where it is earlier."""
        return Deadline(min(self.at_s, time.monotonic() + seconds), self.progress)

    def passed(self, fraction: float, what: str) -> bool:
        """Tell the caller how far the search is; whether it is to end."""
        interrupted = stops(self.progress, fraction, what)
        self.over = self.over or interrupted or time.monotonic() >= self.at_s
        return self.over
