"""The settings of PyTorch's CUDA caching allocator (PYTORCH_CUDA_ALLOC_CONF), and its sizes."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

MIB = 2**20
EXPANDABLE = "PYTORCH_ALLOC_CONF=expandable_segments:True"
"""With it an allocator reserves little beyond what is allocated, and counts it exactly."""
ROUND_BYTES = 512
"""Unit of request sizes (kMinBlockSize)."""
SMALL_BYTES = MIB
"""The largest request of the small pool (kSmallSize)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""A segment of the small pool (kSmallBuffer)."""
LARGE_BYTES = 10 * MIB
"""Least size of a request with a segment of its own (kMinLargeAlloc)."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""A segment that larger requests share (kLargeBuffer), and a chunk of an expandable segment."""
SEGMENT_ROUND_BYTES = 2 * MIB
"""Unit of the segments of a single request (kRoundLarge)."""
_INTERVALS = 16
"""Size classes of `roundup_power2_divisions`: to 2 MiB, 4 MiB... (kRoundUpPowerOfTwoIntervals)."""


def rounded(size_bytes: int, unit: int) -> int:
    """Return the next multiple of a unit."""
    return -(-size_bytes // unit) * unit


def next_division(size_bytes: int, divisions: int) -> int:
    """Round up to the next of `divisions` equal steps between two powers of two: 1200 with 4 is
    1280, since the steps from 1024 on are 1280, 1536, 1792, 2048 (PyTorch's "CUDA semantics")."""
    power = 1 << size_bytes.bit_length() - 1
    step = power >> divisions.bit_length() - 1
    return 2 * power if step == 0 else rounded(size_bytes, step)


def _size_class(mebibytes: int) -> int:
    """Return the index of a size's class (`roundup_power2_divisions(size)`)."""
    return min(max(mebibytes.bit_length() - 1, 0), _INTERVALS - 1)


def _divisions(text: str) -> tuple[int, ...]:
    """Parse "[256:1,512:2,>:4]", MiB → divisions (`parseRoundUpPower2Divisions`): the first number
    also holds for smaller classes, and that of ">" for all after the last one named."""
    found, last, first = [0] * _INTERVALS, 0, True
    for option in text.strip("[] ").split(","):
        boundary, _, value = (part.strip() for part in option.partition(":"))
        if boundary == ">":
            found[last + 1 :] = [int(value)] * (_INTERVALS - last - 1)
            continue
        if int(boundary) < 1 or int(boundary) & (int(boundary) - 1):
            raise ValueError(f"roundup_power2_divisions has powers of two in MiB, got {boundary}")
        last = _size_class(int(boundary))
        if first:
            found[:last] = [int(value)] * last
        found[last], first = int(value), False
    return tuple(found)


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """The allocator's settings; the defaults are PyTorch's.

    Attributes:
        expandable_segments: one segment for each stream and pool, which grows by chunks.
        max_split_bytes: blocks of at least that size are never split; None: all are.
        garbage_collection_threshold: share of the capacity beyond which old blocks are given back;
            0: never.
        roundup_power2_divisions: number of size steps between powers of two, 0: no such rounding;
            or these numbers of 16 size classes, below 2 MiB, 4 MiB, 8 MiB...
        capacity_bytes: the most that may be reserved (`set_per_process_memory_fraction`, or the
            device's memory); None: no limit.
        large_segment_bytes: of the segments that requests from 1 to 10 MiB share.
        rounding_limit_bytes: the most by which the block of a never split request may be larger.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: int | tuple[int, ...] = 0
    capacity_bytes: int | None = None
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    rounding_limit_bytes: int = LARGE_SEGMENT_BYTES

    def __post_init__(self) -> None:
        if self.max_split_bytes is not None and self.max_split_bytes < LARGE_SEGMENT_BYTES:
            raise ValueError(
                f"max_split_bytes is {LARGE_SEGMENT_BYTES} or more, got {self.max_split_bytes}"
            )
        if not 0 <= self.garbage_collection_threshold < 1:
            raise ValueError(
                "garbage_collection_threshold is a share in [0, 1), got "
                f"{self.garbage_collection_threshold}"
            )
        given = self.roundup_power2_divisions
        every = (given,) * _INTERVALS if isinstance(given, int) else given
        if len(every) != _INTERVALS or any(one < 0 or one & (one - 1) for one in every):
            raise ValueError(
                f"roundup_power2_divisions is a power of two or 0, or {_INTERVALS} of them, got "
                f"{given}"
            )

    @property
    def address_space_bytes(self) -> int:
        """Largest size of an expandable segment: 9/8 of the device."""
        capacity = 2**46 if self.capacity_bytes is None else self.capacity_bytes
        return rounded(capacity + capacity // 8, self.large_segment_bytes)

    def request_bytes(self, size_bytes: int) -> int:
        """Return the size of the block that serves a request, bytes (`round_size`)."""
        divisions = self.roundup_power2_divisions
        if not isinstance(divisions, int):
            divisions = divisions[_size_class(size_bytes // MIB)]
        if divisions > 1 and size_bytes > ROUND_BYTES * divisions:
            return next_division(size_bytes, divisions)
        return rounded(size_bytes, ROUND_BYTES)

    def segment_bytes(self, size_bytes: int) -> int:
        """Return the size of a new segment for a rounded request size (`get_allocation_size`)."""
        if size_bytes <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size_bytes < LARGE_BYTES:
            return self.large_segment_bytes
        return rounded(size_bytes, SEGMENT_ROUND_BYTES)

    @classmethod
    def parse(cls, text: str, capacity_bytes: int | None = None) -> AllocatorSettings:
        """Parse a PYTORCH_ALLOC_CONF; options that change nothing here are ignored.

        Raises:
            ValueError: an option that is not "name:value", or a value that torch refuses.
        """
        found: dict[str, object] = {}
        # Commas inside of brackets do not end an option.
        for option in filter(None, map(str.strip, re.split(r",(?![^\[]*\])", text))):
            name, colon, value = (part.strip() for part in option.partition(":"))
            if not colon or not value:
                raise ValueError(f"an allocator's option is name:value, got {option!r}")
            if name == "max_split_size_mb":
                found["max_split_bytes"] = int(value) * MIB
            elif name == "expandable_segments":
                if value not in ("True", "False"):
                    raise ValueError(f"expandable_segments is True or False, got {value!r}")
                found[name] = value == "True"
            elif name == "max_non_split_rounding_mb":
                found["rounding_limit_bytes"] = int(value) * MIB
            elif name == "garbage_collection_threshold":
                found[name] = float(value)
            elif name == "roundup_power2_divisions":
                found[name] = _divisions(value) if value[0] == "[" else int(value)
        return cls(**found, capacity_bytes=capacity_bytes)  # type: ignore[arg-type]  # read above

    @classmethod
    def of_environment(cls) -> AllocatorSettings:
        """Read the settings with which this process's allocator starts (PYTORCH_ALLOC_CONF, or
        the older PYTORCH_CUDA_ALLOC_CONF).

        Raises:
            ValueError: see `parse`.
        """
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        return cls.parse(next(filter(None, map(os.environ.get, names)), ""))
