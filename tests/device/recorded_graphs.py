"""A stand-in for CUDA graphs on the fake accelerator: what a capture launches, in the order of its
streams and events, is recorded, and a replay launches it again into the same memory.

It enforces CUDA's rules of captures (CUDA programming guide, "Stream capture"): a stream joins a
capture by waiting for an event of it; no wait crosses a capture's boundary; all joined streams must
have joined the first one when it ends; nothing waits on the host, and no pinned memory is made.
A capture launches nothing, so that all memory and the generator are as before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from memopt.step.accelerator import Accelerator, Generator
from memopt.step.backend import BACKENDS
from tests.device import accelerator
from tests.executor.fake_graphs import Call, CallRecorder, CaptureError


@dataclass(eq=False)
class Record:
    """What one capture launched: (what, stream, anything it needs), in order."""

    origin: int
    items: list[tuple[str, int, Any]] = field(default_factory=list)
    clocks: dict[int, dict[int, int]] = field(default_factory=dict)
    """Stream → what it has seen of each stream's work; its keys are the streams in the capture."""

    def launched(self, stream: int, what: str, more: Any) -> None:
        if stream not in self.clocks:
            raise CaptureError(f"{what} on a stream that is not in the capture")
        self.items.append((what, stream, more))
        clock = self.clocks[stream]
        clock[stream] = clock.get(stream, 0) + 1

    def check_joined(self) -> None:
        seen = self.clocks[self.origin]
        for stream, clock in self.clocks.items():
            if clock.get(stream, 0) > seen.get(stream, 0):
                raise CaptureError("a stream has not joined the capture's at its end")


_now: list[Record] = []
"""The capture under way, if any."""


class Stream:
    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.id = inner.stream_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and self.inner == other.inner

    def __hash__(self) -> int:
        return hash(self.id)

    def wait_event(self, event: Event) -> None:
        record = _now[-1] if _now else None
        if event.of is not record:
            raise CaptureError("a wait crosses the boundary of a capture")
        if record is None:
            self.inner.wait_event(event.inner)
            return
        clock = record.clocks.setdefault(self.id, {})
        for stream, position in event.clock.items():
            clock[stream] = max(clock.get(stream, 0), position)
        record.items.append(("wait", self.id, event))


class Event:
    def __init__(self, enable_timing: bool = False) -> None:
        self.inner = accelerator.mod.Event(enable_timing=enable_timing)
        self.of: Record | None = None
        self.clock: dict[int, int] = {}

    def record(self, stream: Stream | None = None) -> None:
        stream = Stream(accelerator.mod.current_stream()) if stream is None else stream
        if not _now:
            self.inner.record(stream.inner)
            return
        self.of = _now[-1]
        self.of.launched(stream.id, "record", self)
        self.clock = dict(self.of.clocks[stream.id])

    def synchronize(self) -> None:
        if _now:
            raise CaptureError("a capture waits on the host")
        self.inner.synchronize()

    def elapsed_time(self, other: Event) -> float:
        return float(self.inner.elapsed_time(other.inner))


class Runtime(Accelerator):
    """The accelerator, with streams and events that a capture records."""

    Event = Event  # type: ignore[assignment]

    def Stream(self, device: Any = None) -> Stream:
        return Stream(accelerator.mod.Stream(device))

    def current_stream(self, device: Any = None) -> Stream:
        return Stream(accelerator.mod.current_stream(device))

    def stream(self, stream: Stream) -> Any:
        return accelerator.mod.stream(stream.inner)

    def synchronize(self, device: Any = None) -> None:
        if _now:
            raise CaptureError("a capture waits on the host")
        accelerator.mod.synchronize(device)

    def generator(self, device: Any) -> Generator:
        if _now:
            raise CaptureError("a capture looks at the generator's state")
        return super().generator(device)


def record_streams(device: torch.device, patch: pytest.MonkeyPatch) -> None:
    """Let memopt's streams and events on a kind of device be such that a capture records."""
    row = replace(BACKENDS[device.type], register_host=None)  # torch pins, which a capture sees
    vars(row)["runtime"] = Runtime(device.type)
    patch.setitem(BACKENDS, device.type, row)


class _Recorder(CallRecorder):
    """Records calls on the streams where they run."""

    def __init__(self, record: Record, device: torch.device) -> None:
        def launched(call: Call) -> None:
            record.launched(accelerator.mod.current_stream(device).stream_id, "run", call)

        super().__init__(device, launched)

    def synchronize(self) -> None:
        accelerator.mod.synchronize(self._device)


class RecordedGraphs:
    """Captures by recording; replays on real streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = accelerator.mod.Stream(device)
        self.captures = self.replays = 0
        self.records: list[Record] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[Callable[[], object]]:
        self.captures += 1
        accelerator.mod.synchronize(self._device)
        generator = accelerator.generator(self._device.index)
        state = generator.get_state()
        record = Record(self._stream.stream_id, clocks={self._stream.stream_id: {}})
        recorder = _Recorder(record, self._device)
        with accelerator.mod.stream(self._stream), self._under_way(record), recorder:
            yield lambda: self._replay(record)
        record.check_joined()
        recorder.put_back()
        generator.set_state(state)
        accelerator.mod.synchronize(self._device)
        self.records.append(record)

    @contextlib.contextmanager
    def _under_way(self, record: Record) -> Iterator[None]:
        _now.append(record)
        try:
            yield
        finally:
            _now.pop()

    def _replay(self, record: Record) -> None:
        self.replays += 1
        streams: dict[int, Any] = {record.origin: accelerator.mod.current_stream(self._device)}
        events: dict[Event, Any] = {}
        with torch.no_grad():
            for what, number, more in record.items:
                if number not in streams:
                    streams[number] = accelerator.mod.Stream(self._device)
                stream = streams[number]
                if what == "record":
                    events[more] = accelerator.mod.Event()
                    events[more].record(stream)
                elif what == "wait":
                    stream.wait_event(events[more])
                else:
                    with accelerator.mod.stream(stream):
                        more.launch()
