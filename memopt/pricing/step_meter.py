"""Meters a training step that runs as the user wrote it, section by section.

The sections lie between marks: where a planned part of the model begins or ends its forward, or
begins its backward. As for a loss (`memopt.pricing.memory.LossMeter`), a CPU profile cannot be
stopped inside autograd, and ends with the backward.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from memopt.pricing.memory import cpu_profile, memory_events, running_meter
from memopt.step.backend import backend_of
from memopt.torch_private.modes import (
    backward_number,
    before_other_profiles,
    when_backward_is_over,
)

_MARK = "memopt::mark "


class StepMeter:
    """Meters device memory from now until a backward is over.

    Args:
        device: the device to meter; `LossMeter.possible` says whether it can be metered.
        found: called once with the highest level of each section, in bytes above the start; there
            is one section more than marks. Not called if the step has no backward.
    """

    def __init__(self, device: torch.device, found: Callable[[list[int]], None]) -> None:
        self._runtime, self._device = backend_of(device).runtime, device
        self._found, self._thread = found, threading.get_ident()
        self._count, self._levels = 0, list[int]()
        self._profile: contextlib.ExitStack | None = None
        self._backward, self._ends = False, False
        if self._runtime is not None:
            self._start = int(self._runtime.memory_allocated(device))
            self._runtime.reset_peak_memory_stats(device)
            return
        self._profile = contextlib.ExitStack()
        self._profiler = self._profile.enter_context(cpu_profile())
        self._profile.enter_context(before_other_profiles(self.close))
        running_meter(weakref.ref(self))

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
            with torch.profiler.record_function(f"{_MARK}{self._count}"):
                pass
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
        found, self._found = self._found, _nobody
        if self._runtime is not None:
            if self._backward and found is not _nobody:
                found([*self._levels, self._level()])
            return
        if self._profile is None or threading.get_ident() != self._thread:
            self._found = found
            return
        if backward_number() != -1:
            self._found = found
            when_backward_is_over(self.close)
            return
        self._profile.close()
        self._profile = None
        if self._backward:
            found(self._sections())

    def _sections(self) -> list[int]:
        events = self._profiler.profiler.kineto_results.events()
        marks = {one.name(): one.start_ns() for one in events if one.name().startswith(_MARK)}
        ends = [marks[f"{_MARK}{number}"] for number in range(self._count)]
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


def _nobody(_levels: list[int]) -> None:
    pass
