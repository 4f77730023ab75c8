"""How long a search for a faster plan may take: no longer than what it finds comes back in."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

STEPS = 500
"""Steps of training in which the time that a search takes must come back."""
LEAST_S, MOST_S = 1.0, 20.0
"""Seconds: a search that may take less is not begun; the most for all members together."""
LOOK_S, LOOK_SHARE = 0.5, 0.5
"""Least seconds from one look at a search to the next, and share of its time so far."""


def worth_s(saved_s: float) -> float:
    """Return the seconds that a search may take which could save so many in every step; 0 where
    it is not worth to begin."""
    found = STEPS * saved_s
    return min(found, MOST_S) if found >= LEAST_S else 0.0


@dataclass
class Payback:
    """Looks now and then at what searches have gained since the last look.

    Attributes:
        time_s: the step's at the last look, seconds.
        over: whether the seconds before that did not pay.
    """

    time_s: float = math.inf
    over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._began_s = self._looked_s = time.monotonic()
        self._next_s = self._began_s + LOOK_S

    def ended(self, time_s: float) -> bool:
        """Tell whether the seconds since the last look do not come back in STEPS steps of so many
        seconds."""
        now_s = time.monotonic()
        if now_s >= self._next_s and not self.over:
            self.over = STEPS * (self.time_s - time_s) < now_s - self._looked_s
            self.time_s, self._looked_s = min(self.time_s, time_s), now_s
            self._next_s = now_s + max(LOOK_S, LOOK_SHARE * (now_s - self._began_s))
        return self.over
