"""Measures memory by torch's own allocators, byte by byte.

On CPU the allocation events of torch's profiler are summed; scratch that bypasses torch's
allocator (oneDNN's own) is invisible. On CUDA the caching allocator's statistics are read.
"""

from __future__ import annotations

import atexit
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

from memopt.errors import ProfilerBusyError
from memopt.pricing.one_session import free_soon, session, taken_elsewhere
from memopt.step.backend import backend_of
from memopt.step.operators import define
from memopt.torch_private.modes import (
    allocation_tag,
    backward_number,
    before_other_profiles,
    dispatch_modes_off,
    operators_alone,
    profile_begun,
    when_backward_is_over,
)


@dataclass
class MemoryUse:
    """Memory of a metered block, in bytes above the block's start. Filled when the block ends.

    Attributes:
        peak_bytes, end_bytes: the highest and the last level.
        update_bytes: the most that an optimizer's step inside a loss's backward needs and frees.
    """

    peak_bytes: int = 0
    end_bytes: int = 0
    update_bytes: int = 0


@contextmanager
def metered(device: torch.device) -> Iterator[MemoryUse]:
    """Measure the device memory of a block.

    On CUDA everything that the process allocates counts. On CPU torch's profiler sees what this
    thread allocates (the backward runs on it, too), and frees of the same memory. Freeing memory
    from before the block does not lower the level.
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
    with cpu_profile() as profiler:
        yield use
    use.peak_bytes, use.end_bytes = _levels(memory_events(profiler))


_ARRIVED = "over"
_MARK = define("profile_mark() -> ()", lambda: None, lambda: None)


class _Running(threading.local):
    """Keeps, per thread, the meter of the loss that runs there."""

    meter: weakref.ref[MeterUntilBackward] | None = None


_RUNNING = _Running()


@atexit.register
def end_metering() -> None:
    """End the metering of this thread's loop. At exit, torch crashes where a profile is open."""
    running = None if _RUNNING.meter is None else _RUNNING.meter()
    if running is not None:
        running.close()


class MeterUntilBackward:
    """Meters device memory from now on, for subclasses. On the CPU a profile does, which torch
    cannot stop inside autograd: it ends with the backward.

    Args:
        device: the device to meter; `LossMeter.possible` says whether it can be metered.
    """

    def __init__(self, device: torch.device) -> None:
        self._runtime, self._device = backend_of(device).runtime, device
        self._thread = threading.get_ident()
        self._profile: contextlib.ExitStack | None = None
        self._marked: list[str | int] = []
        if self._runtime is not None:
            self._start = int(self._runtime.memory_allocated(device))
            self._runtime.reset_peak_memory_stats(device)
            return
        self._profile = contextlib.ExitStack()
        self._profiler = self._profile.enter_context(cpu_profile())
        self._profile.enter_context(before_other_profiles(self.close))
        _RUNNING.meter = weakref.ref(self)

    def close(self) -> None:
        """Stop metering, in the thread that began it."""
        raise NotImplementedError

    def _profile_ended(self) -> bool:
        """End the profile, if this thread began it, once no backward runs; return whether it has
        ended now."""
        if self._profile is None or threading.get_ident() != self._thread:
            return False
        if backward_number() != -1:
            when_backward_is_over(self.close)
            return False
        self._profile.close()
        self._profile = None
        return True

    def _mark(self, what: str | int) -> None:
        """Mark the present time in the profile."""
        self._marked.append(what)
        _mark_now()

    def _marks(self) -> dict[str | int, int]:
        """Return the times, in ns, of the marks in the profile, which has ended."""
        return dict(zip(self._marked, _marked_at(self._profiler), strict=True))


def _mark_now() -> None:
    """Mark the present time in the running profile."""
    # A mode of the user's, such as one that counts operations, would call it a second time.
    with dispatch_modes_off():
        _MARK()


class LossMeter(MeterUntilBackward):
    """Meters device memory from the return of a forward until its backward begins, that is, the
    memory of the loss that a training loop computes.

    The end lies inside autograd, where torch's profiler cannot be stopped: autograd restores the
    thread's state, the profiler with it. On CPU the profile therefore ends with the backward, and
    is read up to the backward's beginning.

    Args:
        device: the device to meter; `possible` says whether it can be metered.
        found: called once with the peak and the end; freed outputs of the forward don't lower the
            end.
    """

    def __init__(self, device: torch.device, found: Callable[[MemoryUse], None]) -> None:
        self._found = found
        self._gone: dict[int, int] | None = None
        self._updates = 0
        super().__init__(device)

    @staticmethod
    def possible(device: torch.device) -> bool:
        """Return whether memory can be metered now: not inside a backward, and on CPU not while
        another profile runs."""
        if backward_number() != -1:
            return False
        return not backend_of(device).on_host or not (profile_begun() or taken_elsewhere())

    @property
    def profiles(self) -> bool:
        """Whether its profile is open."""
        return self._profile is not None

    def ended(self, address: int) -> None:
        """Record that a tensor of the forward's outputs was freed. As far as is known, no other
        tensor uses its memory, which begins at `address`."""
        if self._profile is not None and threading.get_ident() == self._thread:
            self._mark(address)

    def arrived(self, gone: dict[int, int], gone_before_bytes: int) -> None:
        """Record that the backward begins. Called inside it, in the thread that called the forward.

        Args:
            gone: freed outputs of the forward: address → bytes.
            gone_before_bytes: bytes freed that were allocated before the forward returned.
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
        self._mark(_ARRIVED)
        when_backward_is_over(self.close)

    def update(self) -> None:
        """Record that an optimizer's step inside the backward begins, or that the last one ends."""
        if self._gone is not None and self.profiles and threading.get_ident() == self._thread:
            self._updates += 1
            self._mark(-self._updates)

    def close(self) -> None:
        """Stop, in the thread that called the forward. Without a backward nothing is reported."""
        if not self._profile_ended() or self._gone is None:
            return
        marks = self._marks()
        until_ns = marks.get(_ARRIVED)
        if until_ns is None:
            return
        everything = memory_events(self._profiler)
        # A step that raised has no end.
        times = [marks[-1 - i] for i in range(self._updates)]
        update_bytes = max(
            (
                freed_again(*_levels([one for one in everything if begin <= one[0] <= end]))
                for begin, end in zip(times[::2], times[1::2], strict=False)
            ),
            default=0,
        )
        events = [event for event in everything if event[0] <= until_ns]
        end_bytes = sum(size for _, size in events)
        # The profile lacks frees of memory allocated before it began.
        events += [
            (marks[address], -size) for address, size in self._gone.items() if address in marks
        ]
        events.sort(key=lambda event: event[0])
        self._found(MemoryUse(_levels(events)[0], end_bytes, update_bytes))


def freed_again(peak_bytes: int, end_bytes: int) -> int:
    """Return the bytes that a block of code has used and freed again, without those that it leaves
    (the state that an optimizer's first step makes)."""
    return peak_bytes - max(0, end_bytes)


def library_bytes(device: torch.device) -> int:
    """Return a device's bytes that libraries keep between steps, after making them give these back.

    On CUDA these are cuBLAS's workspaces, one for every stream and thread (the forward's and
    autograd's) that has multiplied matrices; the next product allocates its own again. Their size
    is the drop in the allocator's count. 0 on CPU.
    """
    backend = backend_of(device)
    if backend.give_back_libraries is None:
        return 0
    backend.synchronize(device)
    before = int(backend.runtime.memory_allocated(device))
    backend.give_back_libraries()
    return max(0, before - int(backend.runtime.memory_allocated(device)))


def can_measure(device: torch.device) -> bool:
    """Return whether a device's memory can be measured now: on a CPU not while somebody else's
    profile runs. This thread's meter is ended; another thread's measuring or meter is waited for,
    ten seconds at most."""
    if not backend_of(device).on_host:
        return True
    end_metering()
    return free_soon() and not profile_begun()


@contextmanager
def cpu_profile() -> Iterator[Any]:
    """Profile the memory that this thread allocates on the CPU; other meters end.

    Raises:
        ProfilerBusyError: somebody else's profile runs, which this one would end.
    """
    # Kineto prints two lines per session on stderr unless told otherwise.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    if not can_measure(torch.device("cpu")):
        raise ProfilerBusyError
    with contextlib.ExitStack() as opened:
        opened.enter_context(session())
        with operators_alone():
            # It counts no steps, as torch.profiler's does: `profile_begun` sees others by these.
            profile = torch.autograd.profiler.profile(profile_memory=True, use_kineto=True)
            profiler = opened.enter_context(profile)
        yield profiler


def _marked_at(profiler: Any) -> list[int]:
    """Return the times, in ns, of the marks in a finished CPU profile."""
    events = profiler.kineto_results.events()
    return sorted(one.start_ns() for one in events if one.name() == "memopt::profile_mark")


def _allocations(profiler: Any) -> tuple[list[tuple[int, int, int, bool]], list[int]]:
    """Return the allocations and frees of a finished CPU profile in the order of time: (time in ns,
    address, bytes: positive allocated, negative freed, whether inside a process group's call); and
    the times in ns at which waits for collectives ended."""
    kind = allocation_tag()
    found: list[tuple[int, int, int, bool]] = []
    waits: list[int] = []
    roots = profiler.kineto_results.experimental_event_tree()
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
    """Return (time in ns, bytes: positive allocated, negative freed) of a finished CPU profile.
    Frees of memory allocated before it are left out: the profiler knows the size of only some."""
    sizes: dict[int, tuple[int, bool, int]] = {}
    events = []
    found, waits = _allocations(profiler)

    def freed_elsewhere(size: int, scratch: bool, since_ns: int, until_ns: int) -> None:
        # A process group's threads hold memory until the wait, and free it unseen by the profiler.
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
        sections: each prepares a block and returns it; the preparation is not metered. A block's
            result is kept alive until the block's end is read, then dropped.

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
    with cpu_profile() as profiler:
        for prepare in sections:
            block = prepare()
            _mark_now()
            kept = block()
            _mark_now()
            del kept, block
    marks = iter(_marked_at(profiler))
    spans = list(zip(marks, marks, strict=True))
    events = memory_events(profiler)
    times = [time_ns for time_ns, _ in events]
    within = [slice(bisect_left(times, start), bisect_right(times, end)) for start, end in spans]
    return [MemoryUse(*_levels(events[part])) for part in within]


def _levels(events: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the highest and the last level, from 0 at the start."""
    levels = list(itertools.accumulate((size for _, size in events), initial=0))
    return max(levels), levels[-1]
