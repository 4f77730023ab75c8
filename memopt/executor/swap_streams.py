"""Swaps by two copy streams, events, and one pinned pool addressed by the plan.

SwapOut: the device→host stream waits for an event recorded after the producer. Free: the compute
stream waits for the copy's event, then the tensor is dropped: the caching allocator reuses its
memory in the compute stream's order, so `record_stream` is not needed and memory is
deterministic. SwapIn: memory is allocated on the compute stream; the host→device stream waits for
an event recorded there; the first reader waits for the copy's event.

This module only decides the order of events; `Streams` does the work, so that the order
is tested without a GPU.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch

from memopt.executor.recorder import DeviceClock, Recorder
from memopt.executor.swap import HostAccount, StoredTensor, flat
from memopt.models.locks import generation
from memopt.step.backend import backend_of, is_on_host
from memopt.step.pinned_memory import pinned_bytes


class Streams(Protocol):
    """A compute stream and two copy streams."""

    def here(self) -> Any:
        """Return the compute stream that is current now."""

    def mark(self, home: Any) -> Any:
        """Record an event on a compute stream returned by `here`."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, outward: bool, after: Sequence[Any]
    ) -> Any:
        """Copy bytes on the stream of the direction after the events; return the end event."""

    def wait(self, event: Any, home: Any) -> None:
        """Make the compute stream wait for an event, and `home`, if that is another stream."""

    def finish(self, event: Any) -> None:
        """Make the calling thread wait for an event."""

    def captured(self) -> AbstractContextManager[Callable[[], None]]:
        """Enter around a capture; the function joins all copies in it to the compute stream."""

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        """Allocate device memory on the compute stream."""

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        """Allocate pinned host memory."""


class DeviceStreams:
    """The `Streams` of one device.

    An event is kept with the number of captures begun or ended before it. A capture may not wait
    for events from outside of it, nor the outside for a capture's; neither has to, since the device
    is idle when a capture begins, and all copies of one have joined its stream when it ends.

    Args:
        device: the device.
        recorder: records the step, if it is recorded.
        exact: whether host memory takes no byte more than asked for. Giving it back then waits for
            the device: it is for memory that lasts.
    """

    def __init__(
        self, device: torch.device, recorder: Recorder | None = None, exact: bool = False
    ) -> None:
        self._device, self._exact = device, exact
        self._recorder = recorder
        self._runtime = backend_of(device).runtime
        self._out, self._in = self._runtime.Stream(device), self._runtime.Stream(device)
        self._captures = 0
        self._last: dict[bool, Any] = {}
        """The last copy's event in each direction, during a capture."""

    def here(self) -> Any:
        return self._runtime.current_stream(self._device)

    def mark(self, home: Any) -> Any:
        event = self._runtime.Event()
        event.record(home)
        return event, self._captures

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, outward: bool, after: Sequence[Any]
    ) -> Any:
        stream = self._out if outward else self._in
        for event, number in after:
            if number == self._captures:
                stream.wait_event(event)
        begin = self._moment(stream)
        with self._runtime.stream(stream):
            target.copy_(source, non_blocking=True)
        end = self._runtime.Event()
        end.record(stream)
        if self._recorder is not None:
            self._recorder.copied(outward, begin, self._moment(stream))
        self._last[outward] = end
        return end, self._captures

    def _moment(self, stream: Any) -> Any:
        """Record an event with a time, if the step is recorded."""
        return None if self._recorder is None else DeviceClock(self._device).on(stream)

    def wait(self, event: Any, home: Any) -> None:
        awaited, number = event
        if number != self._captures:
            return
        here = self.here()
        here.wait_event(awaited)
        if home != here:
            home.wait_event(awaited)

    def finish(self, event: Any) -> None:
        event[0].synchronize()

    @contextlib.contextmanager
    def captured(self) -> Iterator[Callable[[], None]]:
        def join() -> None:
            for event in self._last.values():
                self.here().wait_event(event)

        self._captures += 1
        self._last.clear()
        try:
            yield join
        finally:
            self._captures += 1

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        if self._exact:
            return pinned_bytes(size_bytes, self._device)
        return torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)


@dataclass
class PoolLease:
    """One step's use of a pool; the pool is free again when the step's copies are gone."""

    pool: torch.Tensor
    streams: Streams
    free: list[tuple[torch.Tensor, Any]]
    home: Any
    """The compute stream of the step. It waits for the step's last copies, whichever thread drops
    them, so that the pool is idle after a mark on it."""

    generation: int = field(default_factory=generation)

    def __del__(self) -> None:
        # Streams and pinned memory do not go with a forked child.
        if getattr(self, "generation", None) == generation():  # Ctrl-C may end the constructor
            self.free.append((self.pool, self.streams.mark(self.home)))


@dataclass(kw_only=True)
class PooledCopy(StoredTensor):
    """A stored tensor in the pool, copied on streams."""

    streams: Streams
    lease: PoolLease | None
    stored: Any = None
    held: torch.Tensor | None = field(default=None, repr=False)
    """The device side of the transfer under way: alive until the compute stream has waited."""
    stays: bool = False
    """Whether the tensor is on the host by itself, and `buffer` is that tensor."""
    home: Any = None
    """The compute stream that made `held`. Its memory goes back to that stream's allocator, so
    that stream waits, too, if the copy dies elsewhere (in the garbage collector, say)."""

    def settle(self) -> None:
        """Let the compute stream wait for the transfer under way, if any."""
        if self.pending is not None:
            self.streams.wait(self.pending, self.home)
            self.pending = None
            self.held = None

    def __del__(self) -> None:
        if getattr(self, "generation", None) == generation():  # Ctrl-C may end the constructor
            self.settle()


class StreamSwap:
    """Swaps by events on streams, into a pool whose addresses the plan gives.

    Args:
        streams: do the work.
        pool_bytes: of a step's pool.
        recorder: records the step, if it is recorded.
        device: the model's; what kernels leave on the host stays there.
    """

    def __init__(
        self,
        streams: Streams,
        pool_bytes: int,
        recorder: Recorder | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.account = HostAccount()
        self.pool_bytes = pool_bytes
        self._streams, self._device = streams, device
        self._recorder = recorder
        self._free: list[tuple[torch.Tensor, Any]] = []

    def lease(self) -> PoolLease:
        """Lease a pool for one step; a second pool is made only for two steps at once."""
        home = self._streams.here()
        try:
            # Of two steps at once only one gets the idle pool: pop is atomic.
            pool, idle = self._free.pop()
        except IndexError:
            pool = self._streams.host_bytes(self.pool_bytes)
        else:
            # The step before may have run on another stream.
            self._streams.wait(idle, home)
        return PoolLease(pool, self._streams, self._free, home)

    def out(
        self, tensor: torch.Tensor, address: int | None = None, lease: PoolLease | None = None
    ) -> PooledCopy:
        """Start copying `tensor`'s storage to `address` of the lease's pool (without them: to
        host memory of its own)."""
        if is_on_host(tensor, self._device):
            return self.stayed(tensor)
        source = flat(tensor)
        count = source.numel()
        if lease is None or address is None:
            buffer = self._streams.host_bytes(count)
        else:
            buffer = lease.pool[address : address + count]
        copy = PooledCopy.of(tensor, buffer, streams=self._streams, lease=lease)
        self.account.add(copy, count)
        copy.held, copy.home = source, self._streams.here()
        copy.pending = copy.stored = self._streams.copy(
            buffer, source, True, (self._streams.mark(copy.home),)
        )
        return copy

    def stayed(self, tensor: torch.Tensor) -> PooledCopy:
        """Return a copy that is the tensor itself: kernels left it on the host, or would have
        outside of a captured step."""
        return PooledCopy.of(tensor, tensor, streams=self._streams, lease=None, stays=True)

    def make_pool(self) -> None:
        """Have a pool for the next lease, before a capture, which may allocate no pinned memory."""
        if self.pool_bytes and not self._free:
            pool = self._streams.host_bytes(self.pool_bytes)
            self._free.append((pool, self._streams.mark(self._streams.here())))

    def captured(self) -> AbstractContextManager[Callable[[], None]]:
        """Enter before a capture of the compute stream; call what it gives at its end, in it."""
        return self._streams.captured()

    def fork(self, saved: list[Any]) -> list[Any]:
        """Copy a step's pool for a backward that may run again (retain_graph), as each run
        overwrites dropped copies. The host waits for the copying, the compute stream for transfers
        under way."""
        copies = [one for one in saved if isinstance(one, PooledCopy)]
        for one in copies:
            one.settle()
        held = [one for one in copies if one.lease is not None]
        if not held:
            return saved
        before, lease = held[0].lease, self.lease()
        assert before is not None
        forked: dict[int, Any] = {id(before): lease}
        for one in held:
            self._streams.finish(one.stored)
            begin, count = one.buffer.storage_offset(), one.buffer.numel()
            begin -= before.pool.storage_offset()
            buffer = lease.pool[begin : begin + count].copy_(one.buffer)
            copy = replace(one, buffer=buffer, lease=lease, pending=None, held=None)
            self.account.add(copy, count)
            forked[id(one)] = copy
        return [forked.get(id(one), one) for one in saved]

    def store(self, copy: PooledCopy, tensor: torch.Tensor) -> None:
        """Start copying `tensor`'s storage over what `copy` holds."""
        copy.settle()
        source, copy.home = flat(tensor), self._streams.here()
        copy.pending = copy.stored = self._streams.copy(
            copy.buffer, source, True, (self._streams.mark(copy.home),)
        )
        copy.held = source

    def host_view(self, copy: PooledCopy) -> torch.Tensor:
        """Return the host copy, which must not be in a pool, as a tensor that shares its memory.
        Read it once its transfers are over."""
        return copy.made(copy.buffer.untyped_storage())

    def fence(self, copy: PooledCopy) -> Callable[[], None]:
        """Return a function by which another thread waits until `copy` is complete, and all work
        queued on the compute stream so far is, too: after that, changing host memory affects no
        copy that still reads it."""
        events = (copy.stored, self._streams.mark(self._streams.here()))

        def wait() -> None:
            for event in events:
                self._streams.finish(event)

        return wait

    def bring(self, copy: PooledCopy, into: torch.Tensor | None = None) -> torch.Tensor:
        """Allocate the device copy (or take the tensor given, which is all of its storage) and
        start filling it; `wait` before the first read."""
        if copy.stays:
            return cast("torch.Tensor", copy.buffer)
        copy.settle()
        size_bytes = copy.buffer.numel()
        there = self._streams.device_bytes(size_bytes) if into is None else flat(into)
        tensor = copy.made(there.untyped_storage())
        home = self._streams.here()
        copy.pending = self._streams.copy(
            there, copy.buffer, False, (self._streams.mark(home), copy.stored)
        )
        copy.home = home
        copy.held = there  # only now: a copy that could not start must not keep device memory
        return tensor

    def settle(self) -> None:
        """Do nothing: when an unfinished copy is dropped, its stream waits for the transfer by
        itself."""

    def wait(self, copy: PooledCopy) -> None:
        """Let the compute stream wait until the last transfer of `copy` has ended."""
        with self._recorder.waiting() if self._recorder else contextlib.nullcontext():
            copy.settle()
