"""Swaps on CPU: host copies made by a worker thread, accounted apart from the device.

The "device" memory of a CPU run is torch's allocator; host copies live in numpy buffers, so
that a planned step's device peak and host peak can both be measured without a GPU.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch

from memopt.errors import ExecutionError
from memopt.executor.recorder import Recorder
from memopt.executor.worker import Task, Worker
from memopt.models.locks import Forked, generation
from memopt.torch_private.tensors import negated


@dataclass(kw_only=True)
class StoredTensor:
    """A tensor's storage on the host, with the shape to give it when it comes back, and whether
    it is read conjugated or negated (torch's lazy `conj()` and `imag`)."""

    buffer: Any
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    conjugated: bool
    negated: bool
    pending: Any = None
    generation: int = field(default_factory=generation)

    @classmethod
    def of(cls, tensor: torch.Tensor, buffer: Any, **more: Any) -> Self:
        """Describe a copy of `tensor` that will be in `buffer`."""
        return cls(
            buffer=buffer,
            dtype=tensor.dtype,
            size=tensor.size(),
            stride=tensor.stride(),
            offset=int(tensor.storage_offset()),
            conjugated=tensor.is_conj(),
            negated=tensor.is_neg(),
            **more,
        )

    def on_host(self, like: torch.Tensor) -> torch.Tensor:
        """Return the host copy as a tensor of the dtype and the layout of `like`, which shares its
        memory. Read it once the copy is complete (`fence`)."""
        held = self.buffer
        whole = held if isinstance(held, torch.Tensor) else torch.from_numpy(held)
        begin = int(whole.storage_offset()) // like.dtype.itemsize
        offset = begin + int(like.storage_offset())
        empty = torch.empty(0, dtype=like.dtype, device="cpu")
        return empty.set_(whole.untyped_storage(), offset, like.size(), like.stride())

    def made(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor again, over a storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        stored = empty.set_(storage, self.offset, self.size, self.stride)
        stored = stored.conj() if self.conjugated else stored
        return negated(stored) if self.negated else stored


@dataclass(kw_only=True)
class HostCopy(StoredTensor):
    """A stored tensor that a worker thread copies into a numpy array."""

    buffer: np.ndarray
    pending: Task | None = None


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor's whole storage."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, torch.Size((storage.nbytes(),)))  # type: ignore[call-overload,no-any-return]  # torch accepts an UntypedStorage here


LEFT_TAKEN_S = 2.0
"""Nobody needs an account's lock as long: a thread that was interrupted has left it taken."""


class HostAccount(Forked):
    """Bytes of host copies now and at the peak. Deaths of copies take no lock, as finalizers may
    run anywhere: they are noted, and settled when a copy is added."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        """Largest sum so far."""
        self._sizes: set[TiedValue[int]] = set()
        self._dead: deque[TiedValue[int]] = deque()
        self._sum_bytes, self._sure = 0, True
        self.in_child()
        super().__init__()

    def in_child(self) -> None:
        """Replace the lock: the parent's may have been held at the fork. It is reentrant, as an
        interruption may leave it held by its own thread."""
        self._lock = threading.RLock()

    @property
    def now_bytes(self) -> int:
        """Bytes of the copies that are alive."""
        return sum(kept.value for kept in list(self._sizes) if kept() is not None)

    def add(self, copy: object, size_bytes: int) -> None:
        """Count a copy for as long as it lives."""
        kept = TiedValue(copy, self._dead.append)
        kept.value = size_bytes
        lock = self._lock
        if not lock.acquire(timeout=LEFT_TAKEN_S):
            lock = self._lock = threading.RLock()
            lock.acquire()
            self._sure = False
        try:
            self._count(kept)
        finally:
            lock.release()

    def _count(self, kept: TiedValue[int]) -> None:
        # Not sure if Ctrl-C came in between here: the sum is made anew.
        sure, self._sure = self._sure, False
        self._sizes.add(kept)
        change_bytes = kept.value
        while self._dead:
            change_bytes -= self._dead[0].value
            self._sizes.discard(self._dead[0])
            self._dead.popleft()
        every = self._sizes
        self._sum_bytes = self._sum_bytes + change_bytes if sure else sum(k.value for k in every)
        self.peak_bytes = max(self.peak_bytes, self._sum_bytes)
        self._sure = True


def _fill(target: np.ndarray, cell: list[np.ndarray]) -> None:
    # The cell is emptied before the future is done, so that the device tensor dies at its Free.
    np.copyto(target, cell.pop())


def _empty_into(cell: list[np.ndarray], source: np.ndarray) -> None:
    np.copyto(cell.pop(), source)


class ThreadSwap:
    """Transfers by one worker thread, in order, as on a link."""

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.account = HostAccount()
        self._recorder = recorder
        self._worker = Worker("memopt-swap")

    def settle(self) -> None:
        """Wait until no copy is under way: after a failed step nobody else waits for them."""
        self._worker.settle()

    def fork(self, saved: list[Any]) -> list[Any]:
        """Return the saved tensors for a backward that may run again, once their copies are
        complete. No copy is written over, so that they can be shared."""
        for one in saved:
            if isinstance(one, HostCopy):
                self.wait(one)
        return saved

    def lease(self) -> None:
        """Do nothing: numpy buffers need no pool (see `memopt.executor.swap_streams`)."""

    def out(self, tensor: torch.Tensor, address: int | None = None, lease: None = None) -> HostCopy:
        """Start copying `tensor`'s storage to the host; address and lease are not used."""
        source: np.ndarray = flat(tensor).numpy()
        copy = HostCopy.of(tensor, np.empty(source.nbytes, dtype=np.uint8))
        self.account.add(copy, copy.buffer.nbytes)
        cell = [source]
        del source
        copy.pending = self._submit(_fill, True, copy.buffer, cell)
        return copy

    def store(self, copy: HostCopy, tensor: torch.Tensor) -> None:
        """Start copying `tensor`'s storage over what `copy` holds."""
        copy.pending = self._submit(_fill, True, copy.buffer, [flat(tensor).numpy()])
        copy.generation = generation()

    def host_view(self, copy: HostCopy) -> torch.Tensor:
        """Return the host copy as a tensor that shares its memory."""
        return copy.made(torch.from_numpy(copy.buffer).untyped_storage())

    def fence(self, copy: HostCopy) -> Callable[[], None]:
        """Return a function with which another thread waits for the last transfer of `copy`."""
        pending = copy.pending

        def wait() -> None:
            if pending is not None:
                pending.wait()
                if pending.failed:
                    raise ExecutionError(
                        "copying a tensor to the host failed (the copy raises its own error), so "
                        "that what reads the copy cannot run"
                    )

        return wait

    def bring(self, copy: HostCopy, into: torch.Tensor | None = None) -> torch.Tensor:
        """Allocate the device copy (or take the tensor given, which is all of its storage) and
        start filling it; `wait` before the first read. The worker runs in order, so a copy still
        on its way out arrives first."""
        if into is None:
            there = torch.empty(copy.buffer.nbytes, dtype=torch.uint8, device="cpu")
            storage = there.untyped_storage()
        else:
            storage = into.untyped_storage()
        tensor = copy.made(storage)
        copy.generation = generation()
        copy.pending = self._submit(_empty_into, False, [flat(tensor).numpy()], copy.buffer)
        return tensor

    def wait(self, copy: HostCopy) -> None:
        """Wait until the last transfer of `copy` has ended, and raise what it raised."""
        pending, copy.pending = copy.pending, None
        try:
            if pending is not None:
                if copy.generation != generation() and not pending.done:
                    raise ExecutionError(
                        "this process was forked while the step was copying to the host in "
                        "another thread; run the step's forward again here"
                    )
                with self._recorder.waiting() if self._recorder else contextlib.nullcontext():
                    pending.result()
        finally:
            # A failed transfer's exception holds this frame: no way back to it may stay, or the
            # step's tensors would wait for the garbage collector.
            del pending

    def _submit(self, copy: Callable[..., None], outward: bool, *arguments: Any) -> Task:
        if self._recorder is not None:
            copy = self._recorder.timed(copy, outward)
        return self._worker.submit(copy, *arguments)


V = TypeVar("V")


class TiedValue(weakref.ref[Any], Generic[V]):
    """A value kept until an object dies, even if Ctrl-C interrupts then: what a finalizer written
    in Python frees would otherwise stay for ever."""

    __slots__ = ("value",)

    value: V

    # Compare and hash the reference itself, since the object may be unhashable.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


def tie(tied: set[TiedValue[V]], owner: object, value: V) -> TiedValue[V]:
    """Keep `value` in a set until `owner` dies."""
    reference: TiedValue[V] = TiedValue(owner, tied.discard)
    reference.value = value
    tied.add(reference)
    return reference
