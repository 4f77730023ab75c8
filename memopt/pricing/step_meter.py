"""Meters a training step that runs as the user wrote it, section by section.

The sections lie between marks: where a planned part of the model begins or ends its forward, or
begins its backward. As for a loss (`memopt.pricing.memory.LossMeter`), a CPU profile cannot be
stopped inside autograd, and ends with the backward.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from memopt.pricing.memory import MeterUntilBackward, memory_events
from memopt.torch_private.modes import (
    when_backward_is_over,
)


class StepMeter(MeterUntilBackward):
    """Meters device memory from now until a backward is over.

    Args:
        device: the device to meter; `LossMeter.possible` says whether it can be metered.
        found: called once with the highest level of each section, in bytes above the start; there
            is one section more than marks. Not called if the step has no backward.
    """

    def __init__(self, device: torch.device, found: Callable[[list[int]], None]) -> None:
        self._found, self._count, self._levels = found, 0, list[int]()
        self._backward, self._ends, self._closed = False, False, False
        super().__init__(device)

    def mark(self, backward: bool = False) -> bool:
        """End a section, and begin the next; return whether the step is still metered.

        Args:
            backward: whether this is inside a backward, with whose end the metering ends.
        """
        if self._runtime is not None:
            self._levels.append(self._level())
        elif self._profile is None or threading.get_ident() != self._thread:
            return False
        else:
            self._mark(self._count)
        self._count += 1
        self._backward = self._backward or backward
        if backward and not self._ends:
            self._ends = True
            when_backward_is_over(self.close)
        return True

    def _level(self) -> int:
        runtime: Any = self._runtime
        peak = int(runtime.max_memory_allocated(self._device)) - self._start
        runtime.reset_peak_memory_stats(self._device)
        return peak

    def close(self) -> None:
        """Stop metering, in the thread that began it."""
        if self._runtime is not None:
            closed, self._closed = self._closed, True
            if self._backward and not closed:
                self._found([*self._levels, self._level()])
        elif self._profile_ended() and self._backward:
            self._found(self._sections())

    def _sections(self) -> list[int]:
        ends = list(self._marks().values())
        changes = memory_events(self._profiler)
        levels = list(itertools.accumulate((size for _, size in changes), initial=0))
        highest, at = [], 0
        for end_ns in [*ends, None]:
            peak = levels[at]
            while at < len(changes) and (end_ns is None or changes[at][0] <= end_ns):
                at += 1
                peak = max(peak, levels[at])
            highest.append(peak)
        return highest
