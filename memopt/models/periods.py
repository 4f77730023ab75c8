"""Finds where a sequence repeats itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

_CANDIDATES = 16
_TOGETHER = 4
"""Blocks of at most so many kinds may take turns."""


@dataclass(frozen=True)
class Period:
    """A stretch of a sequence that is some equal parts, one after the other.

    Attributes:
        start: position of the first part.
        length: of one part.
        count: of the parts.
    """

    start: int
    length: int
    count: int

    @property
    def end(self) -> int:
        """The position after the last part."""
        return self.start + self.length * self.count

    def at(self, part: int, offset: int) -> int:
        """Return a position, given by its part and its offset there."""
        return self.start + part * self.length + offset

    def part(self, position: int) -> int:
        """Return the part that a position belongs to."""
        return (position - self.start) // self.length

    def offset(self, position: int) -> int:
        """Return a position's offset in its part."""
        return (position - self.start) % self.length

    def positions(self, part: int) -> range:
        """Return the positions of a part."""
        return range(self.at(part, 0), self.at(part + 1, 0))


@dataclass(frozen=True)
class BlockRun:
    """A run of the parts of a period, numbered as a model's blocks are.

    Attributes:
        parts: its place.
        way: 1 where numbers go up, as in the forward, -1 where they go down, as in the backward.
        first: the number of the first part.
    """

    parts: Period
    way: int
    first: int

    @property
    def numbers(self) -> range:
        """The numbers of its parts, ascending."""
        other = self.first + self.way * (self.parts.count - 1)
        return range(min(self.first, other), max(self.first, other) + 1)

    def number(self, position: int) -> int:
        """Return the number of the part that a position belongs to."""
        return self.first + self.way * self.parts.part(position)

    def offset(self, position: int) -> int:
        """Return a position's offset in its part."""
        return self.parts.offset(position)

    def at(self, number: int, offset: int) -> int:
        """Return a position, given by its part's number and its offset there."""
        return self.parts.at((number - self.first) * self.way, offset)

    def holds(self, position: int) -> bool:
        """Whether a position is in the run."""
        return self.parts.start <= position < self.parts.end

    def has(self, number: int) -> bool:
        """Whether a part is in the run."""
        return 0 <= (number - self.first) * self.way < self.parts.count


def run_of(runs: Iterable[BlockRun], position: int) -> BlockRun | None:
    """Return the run that a position is in."""
    return next((run for run in runs if run.holds(position)), None)


def longest_period(
    keys: Sequence[Hashable], equal: Callable[[int, int], bool], least: int
) -> Period | None:
    """Return the stretch of at least `least` equal parts that leaves most out if one part of it is
    kept; the shorter period of two that do.

    Args:
        keys: a key of each element. Elements that correspond have equal keys.
        equal: whether two elements with equal keys, a period apart, correspond.
    """
    latest: dict[Hashable, int] = {}
    gaps: Counter[int] = Counter()
    for position, key in enumerate(keys):
        if key in latest:
            gaps[position - latest[key]] += 1
        latest[key] = position
    best: Period | None = None
    likely = [gap for gap, _ in gaps.most_common(_CANDIDATES)]
    for length in sorted({gap * times for gap in likely for times in range(1, _TOGETHER + 1)}):
        found = _longest(keys, equal, length)
        if found.count < least:
            continue
        if best is None or found.length * (found.count - 1) > best.length * (best.count - 1):
            best = found
    return best


def _longest(keys: Sequence[Hashable], equal: Callable[[int, int], bool], length: int) -> Period:
    best = Period(0, length, 0)
    start = 0
    for position in range(len(keys) - length + 1):
        other = position + length
        if other < len(keys) and keys[position] == keys[other] and equal(position, other):
            continue
        count = (position - start) // length + 1
        if count > best.count:
            best = Period(start, length, count)
        start = position + 1
    return best
