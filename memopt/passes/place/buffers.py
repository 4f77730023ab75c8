"""Buffers and their placement: the data of the placement problem (OLLA eq. 15), without torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

import numpy as np

from memopt.models.bounds import relative_gap
from memopt.models.status import Status
from memopt.programs.lifetimes import Ints as Ints
from memopt.programs.lifetimes import live_bytes


@dataclass(frozen=True, slots=True)
class Buffer:
    """One lifetime of one tensor: `size` bytes, live in the half-open interval [lower, upper).

    A tensor with several lifetimes (recomputed, swapped) is several buffers, each placed on its
    own. Times are arbitrary integers; only their order matters.

    Attributes:
        id: unique among the buffers placed together.
        lower: first instant the buffer is live.
        upper: first instant it is not live any more.
        size: bytes.
        alignment: its offset must be a multiple of this; it occupies whole multiples of it.
    """

    id: str
    lower: int
    upper: int
    size: int
    alignment: int = 1

    def __post_init__(self) -> None:
        if self.upper <= self.lower:
            raise ValueError(
                f"Buffer {self.id!r}: upper must be greater than lower, got "
                f"[{self.lower}, {self.upper})"
            )
        if self.size < 0:
            raise ValueError(f"Buffer {self.id!r}: size must be at least 0, got {self.size}")
        if self.alignment < 1:
            raise ValueError(f"Buffer {self.id!r}: alignment must be at least 1")

    @property
    def extent(self) -> int:
        """Return the bytes it occupies: its size rounded up to its alignment."""
        return -(-self.size // self.alignment) * self.alignment


@dataclass(frozen=True, slots=True)
class Placement:
    """An offset for every buffer, with the proof of how good it is.

    Attributes:
        offsets: buffer id → byte offset. Always a valid placement, the best one found.
        peak: the largest offset + extent, bytes.
        bound: no placement has a smaller peak, bytes.
        status: OPTIMAL when peak = bound, else FEASIBLE; where a capacity was asked for and the
            peak exceeds it, INFEASIBLE when that is proved to be unavoidable, else UNKNOWN.
        stats: "method" that found it, "nodes", "time_s", "interrupted".
    """

    offsets: Mapping[str, int]
    peak: int
    bound: int
    status: Status
    stats: Mapping[str, object] = field(default_factory=dict)

    @property
    def gap(self) -> float:
        """Return (peak - bound) / bound; 0.0 when both are zero."""
        return relative_gap(self.peak, self.bound)

    @property
    def fragmentation(self) -> float:
        """Return (peak - bound) / peak, as OLLA §5.4 measures it; 0.0 for an empty placement."""
        return (self.peak - self.bound) / self.peak if self.peak else 0.0


class Layout:
    """The buffers as arrays over *sections*: the maximal sets of buffers live together.

    Two buffers overlap in time if and only if they share a section (the live sets of intervals
    have the Helly property), and any set that is not maximal constrains nothing on its own.
    """

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        ids = {buffer.id for buffer in buffers}
        if len(ids) != len(buffers):
            raise ValueError("place: two buffers have the same id")
        self.buffers = tuple(buffers)
        self.size: Ints = np.array([b.extent for b in buffers], dtype=np.int64)
        self.alignment: Ints = np.array([b.alignment for b in buffers], dtype=np.int64)
        self.lower: Ints = np.array([b.lower for b in buffers], dtype=np.int64)
        self.upper: Ints = np.array([b.upper for b in buffers], dtype=np.int64)
        self.first, self.last, self.times = self._sections()

    def _sections(self) -> tuple[Ints, Ints, Ints]:
        """Find the sections, which begin at the last begin of a buffer before each end. Return each
        buffer's first section and the end of its sections, and the sections' times."""
        lowers, uppers = np.unique(self.lower), np.unique(self.upper)
        # The last start before each end is where the live set is maximal.
        position = np.searchsorted(lowers, uppers, side="left") - 1
        times = np.unique(lowers[position]) if len(uppers) else lowers
        first = np.searchsorted(times, self.lower, side="left")
        last = np.searchsorted(times, self.upper, side="left")
        return first.astype(np.int64), last.astype(np.int64), times

    def __len__(self) -> int:
        return len(self.buffers)

    def reordered(self, order: Ints) -> Layout:
        """Return the same buffers with buffer order[i] at position i."""
        return Layout([self.buffers[index] for index in order])

    @property
    def sections(self) -> int:
        """Return the number of maximal live sets."""
        return len(self.times)

    @cached_property
    def section_bytes(self) -> Ints:
        """Return the bytes live in each section."""
        return live_bytes(self.first, self.last, self.size, self.sections)

    @cached_property
    def duration(self) -> Ints:
        """Return the length of each buffer's lifetime, in the instance's own times."""
        return self.upper - self.lower

    @cached_property
    def fullest(self) -> Ints:
        """Return the bytes live in the fullest section of each buffer."""
        spans = zip(self.first, self.last, strict=True)
        return np.array([self.section_bytes[a:b].max() for a, b in spans])

    @property
    def columns(self) -> tuple[Ints, Ints, Ints, Ints]:
        """Return (size, alignment, first section, end of sections) for compiled code."""
        return self.size, self.alignment, self.first, self.last

    @cached_property
    def unit(self) -> int:
        """Return the unit that divides all offsets where buffers rest on each other."""
        sizes = self.size.tolist()
        if (self.alignment == 1).all():
            return gcd(*sizes)
        return gcd(*sizes, *self.alignment.tolist())

    @cached_property
    def bound(self) -> int:
        """Return the most bytes live at once: no placement has a smaller peak."""
        return int(self.section_bytes.max(initial=0))

    @cached_property
    def twins(self) -> Ints:
        """Return each buffer's predecessor of the same size, alignment and sections, or -1."""
        twin = np.full(len(self), -1, dtype=np.int64)
        seen: dict[tuple[int, ...], int] = {}
        for index, key in enumerate(zip(*(x.tolist() for x in self.columns), strict=True)):
            twin[index] = seen.get(key, -1)
            seen[key] = index
        return twin

    @cached_property
    def members(self) -> tuple[Ints, Ints]:
        """Return (start, buffer): section s holds buffer[start[s]:start[s+1]]."""
        spans = [np.arange(a, b) for a, b in zip(self.first, self.last, strict=True)]
        section = np.concatenate(spans) if spans else np.zeros(0, dtype=np.int64)
        owner = np.repeat(np.arange(len(self)), self.last - self.first)
        order = np.argsort(section, kind="stable")
        return np.searchsorted(section[order], np.arange(self.sections + 1)), owner[order]

    @cached_property
    def overlaps(self) -> tuple[Ints, Ints]:
        """Return (start, other): buffers that share a section with buffer i, i itself left out."""
        start = [0]
        parts: list[Ints] = []
        everyone = np.arange(len(self))
        for index in range(len(self)):
            shared = (self.first < self.last[index]) & (self.last > self.first[index])
            shared[index] = False
            parts.append(everyone[shared])
            start.append(start[-1] + len(parts[-1]))
        flat = np.concatenate(parts) if parts else np.zeros(0)
        return np.array(start, dtype=np.int64), flat.astype(np.int64)


def lower_bound(buffers: Iterable[Buffer]) -> int:
    """Return the most bytes live at once, a lower bound on the peak of every placement."""
    return Layout(tuple(buffers)).bound


def peak_of(buffers: Iterable[Buffer], offsets: Mapping[str, int]) -> int:
    """Return the largest offset + extent of a placement, bytes."""
    return max((offsets[b.id] + b.extent for b in buffers), default=0)
