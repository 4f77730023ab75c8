"""Larger rectangles from buffers that fit together exactly: a tiling with fewer pieces.

Where a placement leaves no byte free, sizes that add up are seldom chance: if what begins at some
instant has the size of what ends there, the one most likely follows the other at the same offset.
So buffers are joined, bottom up, into rectangles of time and memory (`join_kernels.py`: stacks
beside each other, and spirals; `join_choices.py`: which joins are likely). Wrong joins leave pieces
that fit nowhere, and a local search repairs them (`join_search_kernels.py`): dissolve a few pieces
at some boundary, join again without the first of them, and keep the result if no more pieces, or
not many more, are left. When all pieces live all the time, their stack is a tiling.

A join is a guess. It may exclude every tiling, so nothing is proved with it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memopt.strategies.olla.buffers import Ints

if TYPE_CHECKING:
    from memopt.strategies.olla.join_choices import Scratch
    from memopt.strategies.olla.join_kernels import Forest


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


class JoinedBuffers:
    """Buffers joined as far as sizes suggest, and the search for better joins.

    Args:
        size, first, last: of the buffers, which leave no byte free in any section.
        rng: of the random choices.
    """

    def __init__(self, size: Ints, first: Ints, last: Ints, rng: np.random.Generator) -> None:
        from memopt.strategies.olla import join_search_kernels as kernels

        self.buffers = len(size)
        self.kernels = kernels
        self.forest = _forest(size, first, last, rng)
        self.scratch = _scratch(len(self.forest.first), int(rng.integers(1, 1 << 31)))
        kernels.rejoin(self.forest, self.scratch)
        self.best = deepcopy(self.forest)

    @property
    def work(self) -> int:
        """Work done so far, in steps of about half a microsecond."""
        return int(self.scratch.work[0])

    @property
    def all_joined(self) -> bool:
        """Whether all pieces live all the time."""
        from memopt.strategies.olla.join_kernels import OPEN

        return int(self.best.tally[OPEN]) == 0

    def improve(self, work: int) -> None:
        """Search for better joins."""
        self.kernels.improve(self.forest, self.best, self.scratch, work)

    def pieces(self) -> list[Piece]:
        """The fewest so far."""
        pieces = []
        for head in self.best.start_head.tolist():
            while head >= 0:
                pieces.append(self._piece(head))
                head = int(self.best.start_next[head])
        return pieces

    def _piece(self, top: int) -> Piece:
        """One piece with all that is in it."""
        best = self.best
        parts: list[tuple[int, int]] = []
        todo = [(top, 0)]
        while todo:
            piece, height = todo.pop()
            if piece < self.buffers:
                parts.append((piece, height))
                continue
            ends = best.groups[piece].cumsum().tolist()
            groups = [
                best.parts[piece, begin:end].tolist()
                for begin, end in zip([0, *ends], ends, strict=False)
            ]
            low, middle = (int(best.size[group].sum()) for group in groups[:2])
            for group, ground in zip(groups, (0, low, low + middle, 0, low), strict=True):
                for part in group:
                    todo.append((part, height + ground))
                    ground += int(best.size[part])
        return Piece(
            int(best.first[top]), int(best.last[top]), int(best.size[top]), tuple(sorted(parts))
        )


def _zeros(*shape: int) -> Ints:
    return np.zeros(shape, dtype=np.int64)


def _forest(size: Ints, first: Ints, last: Ints, rng: np.random.Generator) -> Forest:
    """Every buffer a piece of its own, and numbers for as many joins twice."""
    from memopt.strategies.olla import join_kernels as kernels

    buffers, boundaries = len(size), int(last.max()) + 1
    most = 3 * buffers + 16
    forest = kernels.Forest(
        first=_zeros(most), last=_zeros(most), size=_zeros(most), code=_zeros(most),
        groups=_zeros(most, kernels.GROUPS), parts=_zeros(most, kernels.MOST_PARTS),
        start_head=_zeros(boundaries) - 1, start_next=_zeros(most) - 1,
        start_before=_zeros(most) - 1, end_head=_zeros(boundaries) - 1,
        end_next=_zeros(most) - 1, end_before=_zeros(most) - 1,
        due=np.full(boundaries, kernels.NEVER), free=np.arange(buffers, most),
        journal=_zeros(2 * most, 2), tally=_zeros(kernels.COUNTS),
    )  # fmt: skip
    columns = (forest.first, first), (forest.last, last), (forest.size, size)
    for column, values in columns:
        column[:buffers] = values
    forest.code[:buffers] = rng.integers(1, 1 << 62, buffers)
    forest.tally[kernels.FREE_COUNT] = most - buffers
    for buffer in range(buffers):
        kernels.show(forest, buffer)
    return forest


def _scratch(most: int, seed: int) -> Scratch:
    """What looking out for joins writes."""
    from memopt.strategies.olla import join_choices as choices
    from memopt.strategies.olla.join_kernels import GROUPS, MOST_PARTS

    stacks = choices.STACKS
    return choices.Scratch(
        random=np.array([seed], dtype=np.int64), work=_zeros(1),
        pieces=_zeros(GROUPS, most), height=_zeros(GROUPS, stacks),
        stack=_zeros(GROUPS, stacks, 4), other_end=_zeros(GROUPS, stacks),
        slot=_zeros(choices.SLOTS), same_slot=_zeros(stacks),
        stacks=_zeros(GROUPS), taken=_zeros(GROUPS), groups=_zeros(2, GROUPS),
        parts=_zeros(2, GROUPS * MOST_PARTS), span=_zeros(3), forbidden=_zeros(1),
    )  # fmt: skip
