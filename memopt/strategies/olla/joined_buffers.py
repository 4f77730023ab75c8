"""Larger rectangles from buffers that fit together exactly: a tiling with fewer pieces.

Where a placement leaves no byte free, sizes that add up are seldom chance: if what begins at some
instant has the size of what ends there, the one most likely follows the other at the same offset.
So buffers are joined, bottom up, into rectangles of time and memory:

* stacks of buffers that live over the same sections, beside a stack of the same height that begins
  where they end (one to `MOST_STACKED` buffers in each), and
* spirals, four buffers around a fifth, which no straight cut separates.

A join is a guess. It may exclude every tiling, so nothing is proved with it; choices are random,
and every restart makes others.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memopt.strategies.olla.buffers import Ints

MOST_STACKED = 3


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle: sections first to last (excluded), bytes, and what it is made of, each with
    its height above the ground of the rectangle."""

    first: int
    last: int
    size: int
    parts: tuple[tuple[int, int], ...]
    """(buffer, offset within the rectangle)."""

    def above(self, height: int) -> tuple[tuple[int, int], ...]:
        """Its parts where the rectangle lies at a height."""
        return tuple((buffer, offset + height) for buffer, offset in self.parts)


def _stack(pieces: tuple[Piece, ...]) -> Piece:
    """Pieces of the same sections, one above the other."""
    heights = itertools.accumulate((piece.size for piece in pieces), initial=0)
    parts = [
        part for piece, height in zip(pieces, heights, strict=False) for part in piece.above(height)
    ]
    return Piece(pieces[0].first, pieces[0].last, sum(p.size for p in pieces), tuple(parts))


def joined_buffers(
    size: Ints, first: Ints, last: Ints, rng: np.random.Generator, share: float
) -> list[Piece]:
    """Buffers joined as far as sizes suggest.

    Args:
        size, first, last: of the buffers.
        rng: chooses among joins of equal evidence.
        share: of suggestions, the part that is followed.
    """
    columns = zip(first.tolist(), last.tolist(), size.tolist(), strict=True)
    return _Joining([Piece(*c, ((b, 0),)) for b, c in enumerate(columns)], rng, share).result()


class _Joining:
    def __init__(self, pieces: list[Piece], rng: np.random.Generator, share: float) -> None:
        self.rng, self.share = rng, share
        self.verdicts: dict[tuple[int, ...], bool] = {}
        self.classes: dict[tuple[int, int], list[Piece]] = defaultdict(list)
        self.from_: dict[int, set[int]] = defaultdict(set)
        self.until: dict[int, set[int]] = defaultdict(set)
        for piece in pieces:
            self._add(piece)

    def _add(self, piece: Piece) -> None:
        self.classes[piece.first, piece.last].append(piece)
        self.from_[piece.first].add(piece.last)
        self.until[piece.last].add(piece.first)

    def _followed(self, pieces: tuple[Piece, ...]) -> bool:
        """Whether this suggestion is followed: decided once."""
        key = tuple(piece.parts[0][0] for piece in pieces)
        if key not in self.verdicts:
            self.verdicts[key] = bool(self.rng.random() < self.share)
        return self.verdicts[key]

    def _replace(self, old: tuple[Piece, ...], new: Piece) -> None:
        for piece in old:
            here = self.classes[piece.first, piece.last]
            here.remove(piece)
            if not here:
                del self.classes[piece.first, piece.last]
                self.from_[piece.first].discard(piece.last)
                self.until[piece.last].discard(piece.first)
        self._add(new)

    def result(self) -> list[Piece]:
        while self._spirals() or self._beside():
            pass
        return [piece for here in self.classes.values() for piece in here]

    def _beside(self) -> bool:
        """Join what is beside each other, fewest pieces first; whether anything was."""
        changed = False
        for most in range(2, 2 * MOST_STACKED + 1):
            boundaries = [b for b in self.from_ if self.until.get(b)]
            self.rng.shuffle(boundaries)
            for boundary in boundaries:
                while self._join_at(boundary, most):
                    changed = True
            if changed:
                return True
        return False

    def _join_at(self, boundary: int, most: int) -> bool:
        found: list[tuple[tuple[Piece, ...], tuple[Piece, ...]]] = []
        for begin in sorted(self.until[boundary]):
            by_size: dict[int, list[tuple[Piece, ...]]] = defaultdict(list)
            for some in _subsets(self.classes[begin, boundary], most - 1):
                by_size[sum(piece.size for piece in some)].append(some)
            for end in sorted(self.from_[boundary]):
                for others in _subsets(self.classes[boundary, end], most - 1):
                    for some in by_size.get(sum(piece.size for piece in others), ()):
                        if len(some) + len(others) == most:
                            found.append((some, others))
        found = [(some, others) for some, others in found if self._followed(some + others)]
        if not found:
            return False
        some, others = found[int(self.rng.integers(len(found)))]
        left, right = _stack(some), _stack(others)
        self._replace(
            some + others, Piece(left.first, right.last, left.size, left.parts + right.parts)
        )
        return True

    def _spirals(self) -> bool:
        """Join the spirals there are now; whether there was any."""
        changed = False
        for middle in [piece for here in self.classes.values() for piece in here]:
            for way in (False, True):
                if middle not in self.classes.get((middle.first, middle.last), ()):
                    break
                for left, right, low, high in self._around(middle, way):
                    if self._followed((middle, left, right, low, high)):
                        whole = _spiral_piece(middle, left, right, low, high, way)
                        self._replace((middle, left, right, low, high), whole)
                        changed = True
                        break
        return changed

    def _around(self, middle: Piece, way: bool) -> Iterator[tuple[Piece, Piece, Piece, Piece]]:
        """(left, right, low, high) around a middle; `way`: the low one begins under the middle's
        left end and goes on to the right, else the other way round."""
        for begin in sorted(self.until[middle.first]):
            for end in sorted(self.from_[middle.last]):
                under = (middle.first, end) if way else (begin, middle.last)
                over = (begin, middle.last) if way else (middle.first, end)
                for low in self.classes.get(under, ()):
                    for high in self.classes.get(over, ()):
                        height = low.size + middle.size + high.size
                        beside_left = height - (high.size if way else low.size)
                        beside_right = height - (low.size if way else high.size)
                        for left in self.classes[begin, middle.first]:
                            if left.size != beside_left:
                                continue
                            for right in self.classes[middle.last, end]:
                                if right.size == beside_right:
                                    yield left, right, low, high


def _spiral_piece(
    middle: Piece, left: Piece, right: Piece, low: Piece, high: Piece, way: bool
) -> Piece:
    top = low.size + middle.size
    parts = (
        low.parts
        + middle.above(low.size)
        + high.above(top)
        + left.above(0 if way else low.size)
        + right.above(low.size if way else 0)
    )
    return Piece(left.first, right.last, top + high.size, parts)


def _subsets(pieces: list[Piece], most: int) -> Iterator[tuple[Piece, ...]]:
    for count in range(1, min(most, MOST_STACKED, len(pieces)) + 1):
        yield from itertools.combinations(pieces, count)
