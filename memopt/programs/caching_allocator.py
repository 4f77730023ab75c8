"""Simulates PyTorch's CUDA caching allocator: the bytes that a sequence of requests reserves.

It follows `c10/cuda/CUDACachingAllocator.cpp`: `round_size`, `get_pool`, `get_free_block`,
`get_allocation_size`, `should_split`, `try_merge_blocks`, `release_available_cached_blocks`,
`release_cached_blocks`, `garbage_collect_cached_blocks`, `find_expandable_block`, `map_block`. Not
modelled: blocks that wait for another stream's events (`record_stream`, which memopt never calls),
private pools of CUDA graphs, and libraries' requests to the driver.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from memopt.programs.allocator_settings import (
    ROUND_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    rounded,
)


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment, with its neighbours in it. Addresses are unique over all segments.

    Attributes:
        born: requests that its pool had seen when it was freed, for garbage collection.
        mapped: whether it has memory; the unused rest of an expandable segment has none.
    """

    address: int
    size_bytes: int
    pool: _Pool = field(repr=False)
    free: bool = True
    mapped: bool = True
    born: int = 0
    before: Block | None = field(default=None, repr=False)
    after: Block | None = field(default=None, repr=False)

    @property
    def is_split(self) -> bool:
        """Whether it is only a part of its segment."""
        return self.before is not None or self.after is not None

    @property
    def expandable_bytes(self) -> int:
        """Bytes that it could serve with the address space after it."""
        room = self.after
        return self.size_bytes + (room.size_bytes if room is not None and not room.mapped else 0)


class _Pool:
    """The free blocks of one stream, small or large: sorted keys (size, address)."""

    def __init__(self, small: bool) -> None:
        self.small = small
        self.keys: list[tuple[int, int]] = []
        self.blocks: dict[int, Block] = {}
        self.requests = 0
        self.expandable: Block | None = None
        """The first block of its expandable segment."""

    def insert(self, block: Block) -> None:
        block.born = self.requests
        insort(self.keys, (block.size_bytes, block.address))
        self.blocks[block.address] = block

    def remove(self, block: Block) -> None:
        del self.keys[bisect_left(self.keys, (block.size_bytes, block.address))]
        del self.blocks[block.address]


class CachingAllocator:
    """The allocator's state; call `allocate` and `release` in the order of the requests.

    Attributes:
        allocated_bytes: in use now, in whole blocks, as `torch.cuda.memory_allocated` counts.
        reserved_bytes: held from the device, as `torch.cuda.memory_reserved` counts.
        allocated_peak_bytes, reserved_peak_bytes: the most so far.
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = AllocatorSettings() if settings is None else settings
        self.allocated_bytes = self.allocated_peak_bytes = 0
        self.reserved_bytes = self.reserved_peak_bytes = 0
        self._used: dict[Hashable, Block] = {}
        self._segments: dict[int, Block] = {}
        """Address of each segment → its first block."""
        self._pools: dict[tuple[int, bool], _Pool] = {}
        self._next_address = 0

    def allocate(self, id_: Hashable, size_bytes: int, stream: int = 0) -> int | None:
        """Serve a request of a stream; return its address, or None for an empty one.

        Raises:
            ValueError: the name is in use, or the size is negative.
            MemoryError: it does not fit the capacity, even after giving cached blocks back.
        """
        if id_ in self._used:
            raise ValueError(f"{id_!r} is allocated already")
        if size_bytes < 0:
            raise ValueError(f"cannot allocate {size_bytes} bytes")
        if size_bytes == 0:
            return None
        size = self.settings.request_bytes(size_bytes)
        small = size <= SMALL_BYTES
        pool = self._pools.setdefault((stream, small), _Pool(small))
        block = self._best_fit(pool, size) or self._new_block(pool, size)
        if block is None:
            raise MemoryError(
                f"{size} bytes do not fit: {self.allocated_bytes} are allocated and "
                f"{self.reserved_bytes} reserved of {self.settings.capacity_bytes}"
            )
        self._split(block, size)
        block.free = False
        self._used[id_] = block
        # A block that is not split counts in full, as in PyTorch's statistics.
        self.allocated_bytes += block.size_bytes
        self.allocated_peak_bytes = max(self.allocated_peak_bytes, self.allocated_bytes)
        return block.address

    def release(self, id_: Hashable) -> None:
        """Give a block back to its pool, and merge it with free neighbours.

        An unknown name belongs to an empty allocation: nothing happens.
        """
        block = self._used.pop(id_, None)
        if block is None:
            return
        self.allocated_bytes -= block.size_bytes
        block.free = True
        block.pool.insert(self._merged(block))

    def holds(self, id_: Hashable) -> bool:
        """Return whether a name is in use."""
        return id_ in self._used

    def empty_cache(self) -> None:
        """Give every unused segment, or chunk of one, back to the device."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if pool.expandable is not None:
                    self._unmap(pool, block)
                elif not block.is_split:
                    self._give_back(block)

    def segments(self) -> Iterator[tuple[Block, ...]]:
        """Yield the blocks of every segment, by address; of an expandable one those with memory."""
        for head in self._segments.values():
            yield tuple(block for block in _blocks(head) if block.mapped)

    def _best_fit(self, pool: _Pool, size: int) -> Block | None:
        pool.requests += 1
        keys, limit = pool.keys, self.settings.max_split_bytes
        at = bisect_left(keys, (size, -1))
        if at == len(keys):
            return None
        found = pool.blocks[keys[at][1]]
        if self.settings.expandable_segments:
            # Blocks are compared with the address space after them.
            for _, address in keys[at + 1 :]:
                other = pool.blocks[address]
                if other.expandable_bytes >= found.expandable_bytes:
                    break
                found = other
        if limit is not None:
            if size < limit <= found.size_bytes:
                return None
            if size >= limit and found.size_bytes >= size + self.settings.rounding_limit_bytes:
                return None
        pool.remove(found)
        return found

    def _new_block(self, pool: _Pool, size: int) -> Block | None:
        """Return a block of new memory; give as many cached blocks back as necessary."""
        wanted = self.settings.segment_bytes(size)
        self._collect_garbage()
        block = self._segment(pool, size, wanted)
        if block is None and self._give_back_oversize(pool, size):
            block = self._segment(pool, size, wanted)
        if block is None:
            self.empty_cache()
            block = self._segment(pool, size, wanted)
        return block

    def _segment(self, pool: _Pool, size: int, wanted: int) -> Block | None:
        capacity = self.settings.capacity_bytes
        if capacity is not None and self.reserved_bytes + wanted > capacity:
            return None
        if self.settings.expandable_segments:
            return self._expanded(pool, size)
        block = Block(self._next_address, wanted, pool)
        self._next_address += wanted
        self._segments[block.address] = block
        self._reserve(wanted)
        return block

    def _reserve(self, size_bytes: int) -> None:
        self.reserved_bytes += size_bytes
        self.reserved_peak_bytes = max(self.reserved_peak_bytes, self.reserved_bytes)

    def _split(self, block: Block, size: int) -> None:
        """Cut the block down to `size`; the rest goes to the pool, if it is large enough."""
        left, limit = block.size_bytes - size, self.settings.max_split_bytes
        if block.pool.small or self.settings.expandable_segments:
            worth = left >= ROUND_BYTES
        else:
            worth = left > SMALL_BYTES and (limit is None or size < limit)
        if worth:
            block.pool.insert(_cut(block, size))

    def _merged(self, block: Block) -> Block:
        """Merge a free block with its free neighbours of the same kind, which leave the pool."""
        low = block.before
        if low is not None and low.free and low.mapped == block.mapped:
            if low.mapped:
                block.pool.remove(low)
            block = _joined(low, block)
        high = block.after
        if high is not None and high.free and high.mapped == block.mapped:
            if high.mapped:
                block.pool.remove(high)
            block = _joined(block, high)
        return block

    def _give_back(self, block: Block) -> None:
        block.pool.remove(block)
        del self._segments[block.address]
        self.reserved_bytes -= block.size_bytes

    def _give_back_oversize(self, pool: _Pool, size: int) -> bool:
        """Give back blocks that are never split, until they suffice; return whether they do."""
        limit = self.settings.max_split_bytes
        if limit is None or self.settings.expandable_segments:
            return False
        wanted = max(size, limit)
        at = bisect_left(pool.keys, (wanted, -1))
        if at < len(pool.keys):
            self._give_back(pool.blocks[pool.keys[at][1]])
            return True
        given = 0
        while given < wanted and pool.keys and pool.keys[-1][0] >= limit:
            given += pool.keys[-1][0]
            self._give_back(pool.blocks[pool.keys[-1][1]])
        return given >= wanted

    def _collect_garbage(self) -> None:
        """Beyond a share of the capacity, give back large blocks that have been free for longer
        than the average one."""
        capacity, share = self.settings.capacity_bytes, self.settings.garbage_collection_threshold
        if capacity is None or not share or self.settings.expandable_segments:
            return
        target = self.reserved_bytes - int(share * capacity)
        if target <= 0:
            return
        ages = {
            block: pool.requests - block.born
            for pool in self._pools.values()
            if not pool.small
            for _, address in pool.keys
            if not (block := pool.blocks[address]).is_split
        }
        given = 0
        while ages and given < target:
            average = sum(ages.values()) / len(ages)
            for block in [block for block, age in ages.items() if age >= average]:
                # The average falls as they go; the limit of this round stays.
                given += block.size_bytes
                del ages[block]
                self._give_back(block)

    def _expanded(self, pool: _Pool, size: int) -> Block:
        """Return a block of the pool's expandable segment, which grows by whole chunks."""
        if pool.expandable is None:
            start = Block(self._next_address, self.settings.address_space_bytes, pool, mapped=False)
            self._next_address += start.size_bytes
            self._segments[start.address] = pool.expandable = start
        block = self._room(pool.expandable, size)
        if block.mapped:
            pool.remove(block)
        else:
            block = self._map(block, size)
        while block.size_bytes < size:
            assert block.after is not None
            block = self._map(block.after, size - block.size_bytes)
        return block

    def _room(self, head: Block, size: int) -> Block:
        """Return the lowest block without memory, or the free one before it, that begins a free
        range of at least `size` addresses."""
        for block in _blocks(head):
            if block.mapped:
                continue
            start = block
            if block.before is not None and block.before.free:
                start = block.before
            room, at = 0, start
            while at.free and room < size:
                room += at.size_bytes
                if at.after is None:
                    break
                at = at.after
            if room >= size:
                return start
        raise MemoryError(f"no addresses left for {size} bytes")

    def _map(self, block: Block, size: int) -> Block:
        """Map memory to the first chunks of a block without; merge it with free neighbours."""
        chunk = SMALL_SEGMENT_BYTES if block.pool.small else self.settings.large_segment_bytes
        mapped = min(rounded(size, chunk), block.size_bytes)
        if mapped < block.size_bytes:
            _cut(block, mapped).mapped = False
        block.mapped = True
        self._reserve(mapped)
        low = block.before
        if low is not None and low.free and low.mapped:
            if low.address in block.pool.blocks:
                block.pool.remove(low)
            block = _joined(low, block)
        high = block.after
        if high is not None and high.free and high.mapped:
            block.pool.remove(high)
            block = _joined(block, high)
        return block

    def _unmap(self, pool: _Pool, block: Block) -> None:
        """Unmap the memory of the whole chunks of a free block."""
        chunk = SMALL_SEGMENT_BYTES if pool.small else self.settings.large_segment_bytes
        assert pool.expandable is not None
        start = pool.expandable.address
        low = start + rounded(block.address - start, chunk)
        high = start + (block.address + block.size_bytes - start) // chunk * chunk
        if low >= high:
            return
        pool.remove(block)
        if low > block.address:
            rest = _cut(block, low - block.address)
            pool.insert(block)
            block = rest
        if block.size_bytes > high - low:
            pool.insert(_cut(block, high - low))
        block.mapped = False
        self.reserved_bytes -= high - low
        self._merged(block)


def _blocks(head: Block | None) -> Iterator[Block]:
    while head is not None:
        yield head
        head = head.after


def _cut(block: Block, size: int) -> Block:
    """Cut a block down to `size`; return the rest, after it."""
    left = block.size_bytes - size
    rest = Block(block.address + size, left, block.pool, before=block, after=block.after)
    if block.after is not None:
        block.after.before = rest
    block.after = rest
    block.size_bytes = size
    return rest


def _joined(low: Block, high: Block) -> Block:
    low.size_bytes += high.size_bytes
    low.after = high.after
    low.mapped = high.mapped
    if high.after is not None:
        high.after.before = low
    return low
