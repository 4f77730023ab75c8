"""The CUDA caching allocator, replayed: what a sequence of allocations reserves on a device.

The rules are those of PyTorch's CUDACachingAllocator with its default settings, on one stream
(expandable segments, `max_split_size_mb` and rounding of powers of two are off): sizes are rounded
to 512 B; requests of at most 1 MiB come from 2 MiB segments, larger ones from segments of 20 MiB
or, from 10 MiB on, of their own size rounded up to 2 MiB; the smallest free block that is large
enough serves, at the lowest address among equals; what is left over is split off if it is 512 B or
more in the small pool, more than 1 MiB in the large one; free neighbours merge.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from memopt.models.graph import Graph
from memopt.programs.instructions import Program

ROUND_BYTES = 512
SMALL_BYTES = 2**20
SMALL_SEGMENT_BYTES = 2 * 2**20
LARGE_BYTES = 10 * 2**20
LARGE_SEGMENT_BYTES = 20 * 2**20
SEGMENT_ROUND_BYTES = 2 * 2**20


@dataclass(frozen=True, slots=True)
class Allocate:
    """Ask for `size_bytes` under a name that is free for use."""

    id: Hashable
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Release:
    """Give back what was allocated under this name."""

    id: Hashable


Event: TypeAlias = Allocate | Release


@dataclass(frozen=True, slots=True)
class AllocatorFigures:
    """Bytes in use (rounded to 512) and held from the device, at their highest.

    Attributes:
        allocated_peak_bytes: as `torch.cuda.max_memory_allocated` counts.
        reserved_peak_bytes: as `torch.cuda.max_memory_reserved` counts; nothing is handed back to
            the device, so this is what is reserved at the end, too.
    """

    allocated_peak_bytes: int
    reserved_peak_bytes: int

    @property
    def fragmentation(self) -> float:
        """(reserved - allocated) / reserved, of the peaks, as OLLA §5.4 measures it."""
        if not self.reserved_peak_bytes:
            return 0.0
        return 1 - self.allocated_peak_bytes / self.reserved_peak_bytes


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, with its neighbours in it. Addresses are unique over all segments."""

    address: int
    size_bytes: int
    small: bool
    free: bool = True
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)


class CachingAllocator:
    """The allocator's state; `allocate` and `release` as the events come.

    Attributes:
        allocated_bytes: in use now, rounded sizes of requests.
        reserved_bytes: of all segments.
        allocated_peak_bytes: the most in use so far.
    """

    def __init__(self) -> None:
        self.allocated_bytes = 0
        self.reserved_bytes = 0
        self.allocated_peak_bytes = 0
        self._used: dict[Hashable, Block] = {}
        self._segments: list[Block] = []
        # Sorted keys (size, address), and the blocks by address, for each pool.
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        self._blocks: dict[int, Block] = {}
        self._next_address = 0

    def allocate(self, id_: Hashable, size_bytes: int) -> int | None:
        """Serve a request; its address, or None for an empty one, which takes no memory.

        Raises:
            ValueError: the name is in use, or the size is negative.
        """
        if id_ in self._used:
            raise ValueError(f"{id_!r} is allocated already")
        if size_bytes < 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes")
        if size_bytes == 0:
            return None
        size = _rounded(size_bytes, ROUND_BYTES)
        block = self._best_fit(size) or self._segment(size)
        self._split(block, size)
        block.free = False
        self._used[id_] = block
        # A block that is not split counts in full, as in PyTorch's statistics.
        self.allocated_bytes += block.size_bytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block.address

    def release(self, id_: Hashable) -> None:
        """Give a block back to its pool, and merge it with free neighbours.

        A name that is not in use is that of an empty allocation: nothing happens.
        """
        block = self._used.pop(id_, None)
        if block is None:
            return
        self.allocated_bytes -= block.size_bytes
        block.free = True
        if block.before is not None and block.before.free:
            self._remove(block.before)
            block = self._merge(block.before, block)
        if block.after is not None and block.after.free:
            self._remove(block.after)
            block = self._merge(block, block.after)
        self._insert(block)

    def segments(self) -> Iterator[tuple[Block, ...]]:
        """The blocks of every segment, by address."""
        for head in self._segments:
            blocks, block = [], head
            while True:
                blocks.append(block)
                if block.after is None:
                    break
                block = block.after
            yield tuple(blocks)

    def figures(self) -> AllocatorFigures:
        """The peaks so far."""
        return AllocatorFigures(self.allocated_peak_bytes, self.reserved_bytes)

    def _best_fit(self, size: int) -> Block | None:
        keys = self._free[size <= SMALL_BYTES]
        at = bisect_left(keys, (size, -1))
        if at == len(keys):
            return None
        return self._blocks.pop(keys.pop(at)[1])

    def _segment(self, size: int) -> Block:
        if size <= SMALL_BYTES:
            total = SMALL_SEGMENT_BYTES
        elif size < LARGE_BYTES:
            total = LARGE_SEGMENT_BYTES
        else:
            total = _rounded(size, SEGMENT_ROUND_BYTES)
        block = Block(self._next_address, total, size <= SMALL_BYTES)
        self._next_address += total
        self.reserved_bytes += total
        self._segments.append(block)
        return block

    def _split(self, block: Block, size: int) -> None:
        """Cut the block down to `size`; what is left over goes to the pool, if worth it."""
        left = block.size_bytes - size
        if left < ROUND_BYTES or (not block.small and left <= SMALL_BYTES):
            return
        rest = Block(block.address + size, left, block.small, True, block, block.after)
        if block.after is not None:
            block.after.before = rest
        block.after = rest
        block.size_bytes = size
        self._insert(rest)

    def _merge(self, low: Block, high: Block) -> Block:
        low.size_bytes += high.size_bytes
        low.after = high.after
        if high.after is not None:
            high.after.before = low
        return low

    def _insert(self, block: Block) -> None:
        insort(self._free[block.small], (block.size_bytes, block.address))
        self._blocks[block.address] = block

    def _remove(self, block: Block) -> None:
        keys = self._free[block.small]
        del keys[bisect_left(keys, (block.size_bytes, block.address))]
        del self._blocks[block.address]


def replay_allocations(events: Iterable[Event]) -> AllocatorFigures:
    """The peaks of a trace, from an empty allocator.

    Raises:
        ValueError: a name is allocated twice, or a size is negative.
    """
    allocator = CachingAllocator()
    for event in events:
        if isinstance(event, Allocate):
            allocator.allocate(event.id, event.size_bytes)
        else:
            allocator.release(event.id)
    return allocator.figures()


def allocation_trace(graph: Graph, program: Program) -> Iterator[Event]:
    """List the requests of a valid program to the allocator, instruction by instruction.

    Resident tensors come first (`extra_resident_bytes`, of no tensor, are left out); a Compute
    allocates what it writes, then its workspace, and frees that and its transient outputs when it
    ends. Placed lifetimes are in one block of the arena's size, asked for first of all.
    """
    placed = {(position, tensor) for position, tensor, _ in program.offsets or ()}
    if program.offsets is not None:
        sizes = (offset + graph.tensors[t].size_bytes for _, t, offset in program.offsets)
        yield Allocate("arena", max(sizes, default=0))
    for tensor, value in enumerate(graph.tensors):
        if value.resident:
            yield Allocate(("resident", tensor), value.size_bytes)
    block: dict[int, tuple[int, int]] = {}
    """Live tensor → its block: the instruction and the tensor that it was asked for."""
    for position, instruction in enumerate(program):
        effects = instruction.effects(graph)
        taken = effects.overwrites
        for tensor in effects.ends:
            if tensor != taken and tensor in block:
                yield Release(block.pop(tensor))
        made = None if taken is None else effects.writes[0]
        for tensor in effects.begins:
            if tensor == made and taken in block:
                block[tensor] = block.pop(taken)
            elif (position, tensor) not in placed:
                block[tensor] = (position, tensor)
                yield Allocate((position, tensor), graph.tensors[tensor].size_bytes)
        passing = [
            tensor
            for tensor in set(effects.writes).difference(effects.begins)
            if tensor != made and (position, tensor) not in placed
        ]
        for tensor in passing:
            yield Allocate((position, tensor), graph.tensors[tensor].size_bytes)
        if position != program.boundary:
            yield Allocate("workspace", effects.workspace_bytes)
            yield Release("workspace")
        for tensor in passing:
            yield Release((position, tensor))
        if taken in block:
            yield Release(block.pop(taken))


def _rounded(size_bytes: int, unit: int) -> int:
    return -(-size_bytes // unit) * unit
