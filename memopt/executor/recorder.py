"""Records when the instructions, waits and copies of a step begin and end.

On CPU a clock is read around each of them, copies on the thread that makes them. Elsewhere events
are recorded on the streams and read when the step is over, so that the host never waits.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memopt.models.recording import Occupied, Recorded
from memopt.step.backend import backend_of


class HostClock:
    """The host's clock, for steps on CPU."""

    def now(self) -> float:
        """Return the time now."""
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        """Return the seconds from one time to another."""
        return end - begin


class DeviceClock:
    """Events of one device with streams; CUDA's resolution is about half a microsecond."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._runtime = device, backend_of(device).runtime

    def now(self) -> Any:
        """Record an event on the compute stream."""
        return self.on(self._runtime.current_stream(self._device))

    def on(self, stream: Any) -> Any:
        """Record an event on a stream."""
        event = self._runtime.Event(enable_timing=True)
        event.record(stream)
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Return the seconds from one event to another; call it when the step is over."""
        end.synchronize()
        begin.synchronize()
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1e3


class Recorder:
    """Collects one step; made for one program, used for one step at a time."""

    def __init__(self, clock: HostClock | DeviceClock) -> None:
        self.clock = clock
        self._spans: list[tuple[Occupied, int, Any, Any]] = []
        self._position = 0
        self._begin: Any = None

    def begin(self, position: int) -> None:
        """Begin the instruction at a position of the program."""
        self._position = position
        self._begin = self.clock.now()

    def end(self) -> None:
        """End the instruction that began last."""
        self._spans.append((Occupied.COMPUTE, self._position, self._begin, self.clock.now()))

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Record the block as a wait of the compute stream; the instruction begins after it."""
        begin = self.clock.now()
        try:
            yield
        finally:
            self._begin = self.clock.now()
            self._spans.append((Occupied.WAIT, self._position, begin, self._begin))

    def waited(self, wait: Callable[[], Any]) -> Any:
        """Record a wait of the compute stream and return its result."""
        with self.waiting():
            return wait()

    def copied(self, outward: bool, begin: Any, end: Any) -> None:
        """Record a copy that the current instruction has queued, from one event to another."""
        what = Occupied.TO_HOST if outward else Occupied.FROM_HOST
        self._spans.append((what, self._position, begin, end))

    def timed(self, copy: Callable[..., None], outward: bool) -> Callable[..., None]:
        """Wrap a copy so that it is recorded when it runs, for the present instruction."""
        what = Occupied.TO_HOST if outward else Occupied.FROM_HOST
        position = self._position

        def run(*arguments: Any) -> None:
            begin = self.clock.now()
            copy(*arguments)
            self._spans.append((what, position, begin, self.clock.now()))

        return run

    def take(self) -> tuple[Recorded, ...]:
        """Return the spans since the last `take`; times count from the first instruction."""
        spans, self._spans = self._spans, []
        if not spans:
            return ()
        own = (Occupied.COMPUTE, Occupied.WAIT)
        first = next(begin for what, _, begin, _ in spans if what in own)
        seconds = self.clock.seconds
        return tuple(
            Recorded(what, position, seconds(first, begin), seconds(first, end))
            for what, position, begin, end in spans
        )


def recorder_for(device: torch.device) -> Recorder:
    """Return a recorder with the clock of a device."""
    return Recorder(HostClock() if backend_of(device).on_host else DeviceClock(device))
