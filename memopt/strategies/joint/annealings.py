"""The annealings of a search, one after the other: how hot each begins, and how long it takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from memopt.solvers.running import Deadline
from memopt.strategies.shared.worth import LOOK_S, STEPS

HEATS = (3e-4, 1e-2, 3e-3)
"""Start temperatures, each from the best so far; the second suits large tensors."""
MOST_PASSES = 8
"""The most times that all of them are tried."""


def annealings(
    deadline: Deadline, began_s: float | None, best_s: Callable[[], float]
) -> Iterator[tuple[int, float, Deadline]]:
    """Yield (number, start temperature, deadline) of one annealing after the other.

    Args:
        deadline: of all.
        began_s: where the search must pay, when it began: all temperatures together take as long
            as the search so far, again and again, until the seconds of a pass do not come back in
            STEPS steps. None: each temperature once.
        best_s: returns the time of the best step so far, seconds.
    """
    if began_s is None:
        yield from ((number, hot, deadline) for number, hot in enumerate(HEATS))
        return
    for first in range(0, MOST_PASSES * len(HEATS), len(HEATS)):
        begin_s, before_s = time.monotonic(), best_s()
        each_s = max(LOOK_S, (begin_s - began_s) / len(HEATS))
        for number, hot in enumerate(HEATS):
            yield first + number, hot, deadline.within(each_s)
        if STEPS * (before_s - best_s()) < time.monotonic() - begin_s:
            return
