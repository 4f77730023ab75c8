"""Measured memory: what torch's own allocators say, byte by byte.

On CPU the allocation events of torch's profiler are summed; scratch that bypasses torch's
allocator (oneDNN's own) is invisible. On CUDA the caching allocator's statistics are read.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from memopt.step.backend import backend_of
from memopt.torch_private.modes import (
    allocation_tag,
    backward_number,
    before_other_profiles,
    profiler_looks_on,
    when_backward_is_over,
)


@dataclass
class MemoryUse:
    """Filled when the metered block ends. Bytes are relative to the block's start.

    Attributes:
        peak_bytes: the highest level above the start.
        end_bytes: the level at the end above the start.
    """

    peak_bytes: int = 0
    end_bytes: int = 0


@contextmanager
def metered(device: torch.device) -> Iterator[MemoryUse]:
    """Measure the device memory of a block.

    On CUDA everything that the process allocates counts. On CPU torch's profiler sees what this
    thread allocates (the backward runs on it, too), and frees of what it saw allocated: memory
    from before the block that is freed inside does not lower the level.
    """
    use = MemoryUse()
    runtime = backend_of(device).runtime
    if runtime is not None:
        runtime.synchronize(device)
        start = runtime.memory_allocated(device)
        runtime.reset_peak_memory_stats(device)
        yield use
        runtime.synchronize(device)
        use.peak_bytes = runtime.max_memory_allocated(device) - start
        use.end_bytes = runtime.memory_allocated(device) - start
        return
    with _cpu_profile() as profiler:
        yield use
    use.peak_bytes, use.end_bytes = _levels(memory_events(profiler))


_MARK = "memopt::loss "
_ARRIVED, _ENDED = f"{_MARK}over", f"{_MARK}without "


class _Running(threading.local):
    """Of each thread, the meter of a loss that runs in it."""

    meter: weakref.ref[LossMeter] | None = None


_RUNNING = _Running()


class LossMeter:
    """Device memory from the return of a forward until its backward begins: that of the loss which
    a training loop computes.

    Its end is inside autograd, where torch's profiler cannot be stopped: autograd puts back the
    thread's state, the profiler with it. So on CPU the profile ends with the backward, and is
    read up to its beginning.

    Args:
        device: whose memory. `possible` says where none can be metered.
        found: called once it is known, with the peak, and the end, which does not count the
            forward's outputs that are gone by then.
    """

    def __init__(self, device: torch.device, found: Callable[[MemoryUse], None]) -> None:
        self._runtime, self._device = backend_of(device).runtime, device
        self._found, self._thread = found, threading.get_ident()
        self._profile: contextlib.ExitStack | None = None
        self._gone: dict[int, int] | None = None
        if self._runtime is not None:
            self._start = int(self._runtime.memory_allocated(device))
            self._runtime.reset_peak_memory_stats(device)
            return
        self._profile = contextlib.ExitStack()
        self._profiler = self._profile.enter_context(_cpu_profile())
        self._profile.enter_context(before_other_profiles(self.close))
        _RUNNING.meter = weakref.ref(self)

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Whether memory can be metered here and now: not inside a backward, and on CPU not while
        torch's profiler records something else."""
        if backward_number() != -1:
            return False
        return not backend_of(device).on_host or not profiler_looks_on()

    def ended(self, address: int) -> None:
        """A tensor of the forward's outputs has ended, the last of its memory for all that is
        known."""
        if self._profile is not None and threading.get_ident() == self._thread:
            with torch.profiler.record_function(f"{_ENDED}{address}"):
                pass

    def arrived(self, gone: dict[int, int], gone_before_bytes: int) -> None:
        """The backward begins: inside it, by the thread that called the forward.

        Args:
            gone: of the forward's outputs, the bytes of the memory that is gone, by its address.
            gone_before_bytes: of what was there before the forward returned, and is gone.
        """
        if self._gone is not None or threading.get_ident() != self._thread:
            return
        if self._runtime is not None:
            start = self._start - gone_before_bytes
            end = int(self._runtime.memory_allocated(self._device)) - start
            peak = int(self._runtime.max_memory_allocated(self._device)) - start
            self._gone = gone
            self._found(MemoryUse(peak, end + sum(gone.values())))
            return
        if self._profile is None:
            return
        self._gone = gone
        with torch.profiler.record_function(_ARRIVED):
            pass
        when_backward_is_over(self.close)

    def close(self) -> None:
        """Stop, by the thread that called the forward; nothing is found unless the backward has
        begun."""
        if self._profile is None or threading.get_ident() != self._thread:
            return
        if backward_number() != -1:
            when_backward_is_over(self.close)
            return
        self._profile.close()
        self._profile = None
        if self._gone is None:
            return
        results = self._profiler.profiler.kineto_results.events()
        marks = {one.name(): one.start_ns() for one in results if one.name().startswith(_MARK)}
        until_ns = marks.get(_ARRIVED)
        if until_ns is None:
            return
        events = [event for event in memory_events(self._profiler) if event[0] <= until_ns]
        end_bytes = sum(size for _, size in events)
        # Frees of what was there before the profile are not in it.
        events += [
            (marks[f"{_ENDED}{address}"], -size)
            for address, size in self._gone.items()
            if f"{_ENDED}{address}" in marks
        ]
        events.sort(key=lambda event: event[0])
        self._found(MemoryUse(_levels(events)[0], end_bytes))


def library_bytes(device: torch.device) -> int:
    """Bytes of a device that libraries keep between steps, and give back here.

    On CUDA these are cuBLAS's workspaces, one for every thread (the forward's and autograd's have
    their own) and stream that has multiplied matrices; the next product takes its own again. What
    they are is what the allocator counts less once they are given back. 0 on CPU.
    """
    backend = backend_of(device)
    if backend.give_back_libraries is None:
        return 0
    backend.synchronize(device)
    before = int(backend.runtime.memory_allocated(device))
    backend.give_back_libraries()
    return max(0, before - int(backend.runtime.memory_allocated(device)))


@contextmanager
def _cpu_profile() -> Iterator[Any]:
    # Kineto prints two lines per session on stderr unless told otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # One profile at a time: another model's planning ends the metering of a loss.
    running = None if _RUNNING.meter is None else _RUNNING.meter()
    if running is not None:
        running.close()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiler:
        yield profiler


def _allocations(profiler: Any) -> tuple[list[tuple[int, int, int, bool]], list[int]]:
    """What happened to memory in a finished CPU profile, in the order of time: (time in ns,
    address, bytes: positive allocated, negative freed, whether inside a process group's call). And
    when waits for collectives ended, in ns."""
    kind = allocation_tag()
    found: list[tuple[int, int, int, bool]] = []
    waits: list[int] = []
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    stack = [(event, False) for event in roots]
    while stack:
        event, inside = stack.pop()
        inside = inside or event.name.startswith("c10d::")
        stack.extend((child, inside) for child in event.children)
        if event.tag == kind:
            fields = event.extra_fields
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size, inside))
        elif event.name == "_c10d_functional::wait_tensor":
            waits.append(event.end_time_ns)
    found.sort(key=lambda event: event[0])
    return found, sorted(waits)


def memory_events(profiler: Any) -> list[tuple[int, int]]:
    """(time in ns, bytes: positive allocated, negative freed) of a finished CPU profile. Frees of
    what was allocated before it are left out: of some of that the profiler knows the size."""
    sizes: dict[int, tuple[int, bool, int]] = {}
    events = []
    found, waits = _allocations(profiler)

    def freed_elsewhere(size: int, scratch: bool, since_ns: int, until_ns: int) -> None:
        # A process group's threads free, unseen, what they hold until they are waited for.
        later = bisect_left(waits, since_ns)
        at_ns = waits[later] if scratch and later < len(waits) else until_ns
        events.append((min(at_ns, until_ns), -size))

    for time_ns, address, size, scratch in found:
        if size > 0:
            if address in sizes:
                freed_elsewhere(*sizes[address], time_ns)
            sizes[address] = (size, scratch, time_ns)
            events.append((time_ns, size))
        elif address in sizes:
            events.append((time_ns, -sizes.pop(address)[0]))
    if waits:
        end_ns = max(time_ns for time_ns, *_ in found) if found else 0
        for size, scratch, time_ns in sizes.values():
            if scratch:
                freed_elsewhere(size, scratch, time_ns, end_ns)
        events.sort(key=lambda event: event[0])
    return events


def metered_sections(
    device: torch.device, sections: list[Callable[[], Callable[[], object]]]
) -> list[MemoryUse]:
    """Meter several blocks in one profiling session.

    Args:
        device: whose memory.
        sections: each prepares a block and returns it; the preparation is not metered. What a
            block returns is kept alive until its end is read, then dropped.

    Returns:
        One MemoryUse per section, relative to its block's own start.
    """
    if not backend_of(device).on_host:
        uses = []
        for prepare in sections:
            block = prepare()
            with metered(device) as use:
                kept = block()
            del kept, block
            uses.append(use)
        return uses
    with _cpu_profile() as profiler:
        for prepare in sections:
            block = prepare()
            with torch.profiler.record_function("memopt::section"):
                kept = block()
            del kept, block
    results = profiler.profiler.kineto_results.events()
    spans = sorted(
        (event.start_ns(), event.end_ns()) for event in results if event.name() == "memopt::section"
    )
    events = memory_events(profiler)
    times = [time_ns for time_ns, _ in events]
    within = [slice(bisect_left(times, start), bisect_right(times, end)) for start, end in spans]
    return [MemoryUse(*_levels(events[part])) for part in within]


def _levels(events: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The highest level and the last, from 0 at the start."""
    levels = list(itertools.accumulate((size for _, size in events), initial=0))
    return max(levels), levels[-1]
