"""Measures the time of a step: a median of a few runs."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

from memopt.models.garbage import full_collections_deferred
from memopt.step.backend import timed
from memopt.step.ranks import largest

_MINIMUM_STEPS = 3
_MOST_STEPS = 10
_ENOUGH_S = 2.0
_ALIKE = 1.1
"""Two steps that take long enough together suffice if one takes at most so many times the other:
their mean is within 5% of both."""


def median_step_s(
    step: Callable[[], object], clear: Callable[[], None], device: torch.device
) -> float:
    """Return the median seconds of a step that has run before; `clear` is called before each
    run."""
    times: list[float] = []
    with full_collections_deferred():
        while not _are_enough(times):
            clear()
            # The slowest rank's time if several measure together: all make equally many steps.
            times += largest([timed(step, device)])
    return statistics.median(times)


def _are_enough(times: Sequence[float]) -> bool:
    if len(times) == _MOST_STEPS:
        return True
    alike = len(times) > 1 and max(times) <= _ALIKE * min(times)
    return sum(times) >= _ENOUGH_S and (len(times) >= _MINIMUM_STEPS or alike)
