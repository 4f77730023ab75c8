"""A judge of races that is not ours: `torch.cuda._sanitizer`'s event handler, fed from a CPU.

A planned step runs on the CPU with a stand-in for the device's streams. What a device would be
told is written down as it would be told: which kernel runs on which stream, what it reads and
writes, which events are recorded and waited for. The handler says which two accesses nothing
orders. Values are right whatever the order, since the CPU does everything at once; only the log
is judged.

Memory that one tensor has for itself is named by its address. What several share, arenas and the
pinned pool, is named by blocks of `BLOCK_BYTES`, so that slots and ranges that overlap conflict.
Allocating and freeing device memory count
as writes of the stream that allocated it: the caching allocator gives memory that a stream freed to
the next tensor of the same stream, without waiting for any other. Other streams have pools of their
own, so that a CPU address stands for another block in each.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.cuda import _sanitizer
from torch.cuda._sanitizer import EventHandler, SynchronizationError
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

BLOCK_BYTES = 64
"""What torch's CPU allocator aligns to, and a divisor of the pinned pool's alignment."""

COMPUTE, OTHER = "compute", "compute of another thread"

_METADATA = {torch.ops.aten.set_.source_Storage_storage_offset, torch.ops.aten.set_.source_Storage}
"""Written, by their schemas; what they write is where a tensor's memory is."""

_SUSPENDED = (None for _ in ())
_NO_STACK = SimpleNamespace(currentframe=lambda: _SUSPENDED.gi_frame)
"""In place of `inspect`: a stack of one frame. Walking the whole one at each launch takes most of
the time, and says less than the operator's name."""


@dataclass(frozen=True)
class Region:
    """An allocation: its bytes, whose pool it is from, and whether several tensors share it."""

    size_bytes: int
    pool: str
    divided: bool = False


_OLDER = Region(0, "before the judge came")


class Judge(TorchDispatchMode):
    """Everything that one device was told, and what is wrong with it.

    While it is entered, kernels count as launched on the stream `current`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.handler = EventHandler()
        self.current = COMPUTE
        self.found: list[SynchronizationError] = []
        self.launches: dict[str, int] = {}
        self._regions: dict[int, Region] = {}
        """Address of what is allocated now → what it is."""
        self._pools: dict[str, int] = {}
        self._quiet = False
        self._events = itertools.count(1)

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Not a user's mode, inside of which planned modules run unplanned."""
        return True

    def launch(self, stream: str, reads: Iterable[int], writes: Iterable[int], what: str) -> None:
        """A kernel or a copy is queued on a stream; blocks in both are written."""
        written, read = set(writes), set(reads)
        self.launches[stream] = self.launches.get(stream, 0) + 1
        aliases: dict[int, list[str]] = {block: [] for block in read | written}
        with mock.patch.object(_sanitizer, "inspect", _NO_STACK):
            self.found += self.handler._handle_kernel_launch(
                stream,  # type: ignore[arg-type]  # any hashable name does
                read - written,
                written,
                set(),
                what,
                aliases,
            )

    def record(self, stream: str) -> int:
        """A new event, recorded on a stream now."""
        event = next(self._events)
        self.handler._handle_event_creation(event)
        self.handler._handle_event_record(event, stream)  # type: ignore[arg-type]  # a name
        return event

    def wait(self, stream: str, event: int) -> None:
        """Make a stream wait for an event."""
        self.handler._handle_event_wait(event, stream)  # type: ignore[arg-type]  # a name

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """What runs inside happens on no stream: it is logged in another way, or not on the
        device."""
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    def blocks(self, address: int, size_bytes: int) -> range:
        """The names of some bytes."""
        if not size_bytes:
            return range(0)
        region = self._regions.get(address) or next(
            (
                one
                for begin, one in self._regions.items()
                if one.divided and begin <= address < begin + one.size_bytes
            ),
            _OLDER,
        )
        first = self._pools.setdefault(region.pool, len(self._pools)) << 64
        end = address + size_bytes if region.divided else address + 1
        return range(first + address // BLOCK_BYTES, first - (-end // BLOCK_BYTES))

    def whole(self, tensor: Tensor) -> range:
        """The names of a tensor's whole storage."""
        storage = tensor.untyped_storage()
        return self.blocks(storage.data_ptr(), storage.nbytes())

    def flat(self, tensor: Tensor) -> range:
        """The names of a contiguous tensor's own bytes, which may be a part of its storage's."""
        return self.blocks(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def allocated(self, tensor: Tensor, *, divided: bool = False) -> None:
        """Watch a tensor's storage, if it is new, until it is freed."""
        storage = tensor.untyped_storage()
        address, home = storage.data_ptr(), self.current
        if address in self._regions or not storage.nbytes():
            return
        self._regions[address] = Region(storage.nbytes(), home, divided)
        blocks = self.whole(tensor)
        self.launch(home, (), blocks, "allocate")
        weakref.finalize(storage, self._freed, address, blocks, home).atexit = False

    def pinned(self, tensor: Tensor) -> None:
        """Watch a tensor's host memory. Its allocator waits for copies before it gives the memory
        to others, so that giving it back conflicts with nothing."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        self._regions[address] = Region(storage.nbytes(), "host", divided=True)
        blocks = self.whole(tensor)
        weakref.finalize(storage, self._given_back, address, blocks).atexit = False

    def _freed(self, address: int, blocks: range, home: str) -> None:
        del self._regions[address]
        self.launch(home, (), blocks, "free")

    def _given_back(self, address: int, blocks: range) -> None:
        del self._regions[address]
        for block in blocks:
            self.handler.tensors_accessed.accesses.pop(block, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._quiet or func in _METADATA:
            return result
        reads, writes = accesses(func._schema, args, kwargs)
        made = [v for v in pytree.tree_leaves(result) if isinstance(v, Tensor)]
        taken = {v.untyped_storage().data_ptr() for v in reads + writes + views(args, kwargs)}
        for value in made:
            if value.untyped_storage().data_ptr() not in taken:
                self.allocated(value, divided=value.dtype == torch.uint8)  # an arena
                writes.append(value)
        if reads or writes:
            self.launch(
                self.current,
                itertools.chain.from_iterable(map(self.whole, reads)),
                itertools.chain.from_iterable(map(self.whole, writes)),
                str(func),
            )
        return result


def accesses(schema: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operator reads and those that it writes; a view does neither."""
    reads: list[Tensor] = []
    writes: list[Tensor] = []
    named = {argument.name: argument for argument in schema.arguments}
    given = [
        *zip(schema.arguments, args, strict=False),
        *((named[k], v) for k, v in kwargs.items()),
    ]
    for argument, value in given:
        alias = argument.alias_info
        tensors = [v for v in pytree.tree_leaves(value) if isinstance(v, Tensor)]
        if alias is None:
            reads += tensors
        elif alias.is_write:
            writes += tensors
    return reads, writes


def views(args: Any, kwargs: Any) -> list[Tensor]:
    """All tensors among the arguments."""
    return [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]


class JudgedStreams:
    """`memopt.executor.swap_streams.Streams` that copy at once and tell a judge."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge

    def here(self) -> str:
        return self.judge.current

    def mark(self, home: str) -> int:
        return self.judge.record(home)

    def stream(self, outward: bool) -> str:
        """The stream of a direction."""
        return "out" if outward else "in"

    def copy(self, target: Tensor, source: Tensor, outward: bool, after: Sequence[int]) -> int:
        stream = self.stream(outward)
        for event in after:
            self.judge.wait(stream, event)
        self.judge.launch(
            stream, self.judge.flat(source), self.judge.flat(target), f"copy {stream}"
        )
        with self.judge.quiet():
            target.copy_(source)
        return self.judge.record(stream)

    def wait(self, event: int, home: str) -> None:
        here = self.here()
        self.judge.wait(here, event)
        if home != here:
            self.judge.wait(home, event)

    def device_bytes(self, size_bytes: int) -> Tensor:
        with self.judge.quiet():
            made = torch.empty(size_bytes, dtype=torch.uint8)
        self.judge.allocated(made)
        return made

    def host_bytes(self, size_bytes: int) -> Tensor:
        with self.judge.quiet():
            made = torch.empty(size_bytes, dtype=torch.uint8)
        self.judge.pinned(made)
        return made
