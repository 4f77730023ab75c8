"""Swapping on CUDA: two copy streams, events, and one pinned pool addressed by the plan.

SwapOut: the device→host stream waits for an event recorded after the producer. Free: the compute
stream waits for the copy's event, then the tensor is dropped: the caching allocator reuses its
memory in the compute stream's order, so `record_stream` is not needed and memory is
deterministic. SwapIn: memory is allocated on the compute stream; the host→device stream waits for
an event recorded there; the first reader waits for the copy's event.

The order of events is all that this module decides; `Streams` does the work, so that the order
is tested without a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from memopt.executor.swap import HostAccount


class Streams(Protocol):
    """A compute stream and two copy streams."""

    def mark(self) -> Any:
        """An event recorded on the compute stream now."""

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, outward: bool, after: Sequence[Any]
    ) -> Any:
        """Copy bytes on the stream of the direction once the events are over; its end event."""

    def wait(self, event: Any) -> None:
        """Make the compute stream wait for an event."""

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        """New device memory, allocated on the compute stream."""

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        """New pinned host memory."""


class CudaStreams:
    """`Streams` of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's own

    def mark(self) -> Any:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        event.record(torch.cuda.current_stream(self._device))
        return event

    def copy(
        self, target: torch.Tensor, source: torch.Tensor, outward: bool, after: Sequence[Any]
    ) -> Any:
        stream = self._out if outward else self._in
        for event in after:
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's own
        end.record(stream)
        return end

    def wait(self, event: Any) -> None:
        torch.cuda.current_stream(self._device).wait_event(event)

    def device_bytes(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def host_bytes(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)


@dataclass
class Lease:
    """One step's use of a pool; the pool is free again when the step's copies are gone."""

    pool: torch.Tensor
    free: list[torch.Tensor]

    def __del__(self) -> None:
        self.free.append(self.pool)


@dataclass
class PooledCopy:
    """A tensor's storage in the pool, with the shape to give it when it comes back."""

    buffer: torch.Tensor
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    streams: Streams
    account: HostAccount
    lease: Lease | None
    pending: Any = None
    stored: Any = None
    held: torch.Tensor | None = field(default=None, repr=False)
    """The device side of the transfer under way: alive until the compute stream has waited."""

    def settle(self) -> None:
        """Let the compute stream wait for the transfer under way, if any."""
        if self.pending is not None:
            self.streams.wait(self.pending)
            self.pending = None
            self.held = None

    def __del__(self) -> None:
        self.settle()
        self.account.add(-self.buffer.numel())


class StreamSwap:
    """out/bring/wait by events on streams, into a pool whose addresses the plan gives."""

    def __init__(self, streams: Streams, pool_bytes: int) -> None:
        self.account = HostAccount()
        self.pool_bytes = pool_bytes
        self._streams = streams
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def lease(self) -> Lease:
        """A pool for one step; a second one only if two steps are under way at once."""
        with self._lock:
            pool = self._free.pop() if self._free else None
        if pool is None:
            pool = self._streams.host_bytes(self.pool_bytes)
        return Lease(pool, self._free)

    def out(
        self, tensor: torch.Tensor, address: int | None = None, lease: Lease | None = None
    ) -> PooledCopy:
        """Start copying `tensor`'s storage to `address` of the lease's pool (without them: to
        host memory of its own)."""
        source = _flat(tensor)
        count = source.numel()
        if lease is None or address is None:
            buffer = self._streams.host_bytes(count)
        else:
            buffer = lease.pool[address : address + count]
        copy = PooledCopy(
            buffer=buffer,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            streams=self._streams,
            account=self.account,
            lease=lease,
        )
        self.account.add(count)
        copy.held = source
        copy.pending = copy.stored = self._streams.copy(
            buffer, source, True, (self._streams.mark(),)
        )
        return copy

    def bring(self, copy: PooledCopy) -> torch.Tensor:
        """Allocate the device copy and start filling it; `wait` before the first read."""
        copy.settle()
        flat = self._streams.device_bytes(copy.buffer.numel())
        tensor = torch.empty(0, dtype=copy.dtype, device=flat.device)
        tensor.set_(flat.untyped_storage(), copy.offset, copy.size, copy.stride)
        copy.pending = self._streams.copy(
            flat, copy.buffer, False, (self._streams.mark(), copy.stored)
        )
        copy.held = flat  # only now: a copy that could not start must not keep device memory
        return tensor

    def wait(self, copy: PooledCopy) -> None:
        """Let the compute stream wait until the last transfer of `copy` has ended."""
        copy.settle()


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's whole storage."""
    storage = tensor.untyped_storage()
    flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    flat.set_(storage, 0, torch.Size((storage.nbytes(),)))  # type: ignore[call-overload]  # torch accepts an UntypedStorage here
    return flat
