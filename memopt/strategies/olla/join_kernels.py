"""Compiled forests of joined buffers: rectangles of time and memory, made of smaller ones.

A join makes one piece of five groups of pieces, some of which may be empty. The pieces of a group
live over the same sections and are stacked:

    high  high    right        low: l to e, middle: l to r, high: b to r,
    left  middle  right        left: b to l, as high as low + middle,
    left  low     low          right: r to e, as high as middle + high
    b     l       r     e

With all five it is a spiral, which no straight cut separates; with left and right only (then l = r)
two stacks of the same height beside each other.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from memopt.strategies.olla.buffers import Ints

Floats = npt.NDArray[np.float64]

LOW, MIDDLE, HIGH, LEFT, RIGHT, GROUPS = 0, 1, 2, 3, 4, 5
MOST_PARTS = 16
"""Pieces of a join, at most."""
# Entries of `Forest.tally`: pieces on top that do not live all the time, the queue of free numbers
# (the next one, how many), entries of the journal.
OPEN, FREE, FREE_COUNT, JOURNAL, COUNTS = 0, 1, 2, 3, 4
NEVER = np.inf


class Forest(NamedTuple):
    """Pieces by number, buffers first; those that no other contains are on top."""

    first: Ints
    last: Ints
    size: Ints
    code: Ints
    """Random numbers of the buffers; of other pieces the exclusive or of their buffers'."""
    groups: Ints
    """(piece, group): number of parts; all zero for a buffer."""
    parts: Ints
    """(piece, position): the parts, group by group."""
    start_head: Ints
    start_next: Ints
    start_before: Ints
    """Lists of the pieces on top that begin at a boundary; -1 ends them."""
    end_head: Ints
    end_next: Ints
    end_before: Ints
    """The same of those that end there."""
    due: Floats
    """By boundary: the least key that a join there can have, `NEVER` if there is none."""
    free: Ints
    """Numbers without a piece, a ring. What became free last is used last: there are at least as
    many as buffers, so that what was dissolved since the journal was empty can be restored."""
    journal: Ints
    """(entry, 2): pieces joined (1) and dissolved (0), to undo them."""
    tally: Ints


@njit(cache=True)
def parts_of(forest: Forest, piece: int) -> int:
    """Number of parts of a piece; 0 for a buffer."""
    return int(forest.groups[piece].sum())


@njit(cache=True)
def _always(forest: Forest, piece: int) -> bool:
    """Whether a piece lives all the time."""
    return bool(forest.first[piece] == 0 and forest.last[piece] == forest.due.shape[0] - 1)


@njit(cache=True)
def _link(head: Ints, after: Ints, before: Ints, at: int, piece: int) -> None:
    """Put a piece at the head of the list of a boundary."""
    other = head[at]
    after[piece], before[piece] = other, -1
    if other >= 0:
        before[other] = piece
    head[at] = piece


@njit(cache=True)
def _unlink(head: Ints, after: Ints, before: Ints, at: int, piece: int) -> None:
    """Take a piece out of the list of a boundary."""
    if before[piece] >= 0:
        after[before[piece]] = after[piece]
    else:
        head[at] = after[piece]
    if after[piece] >= 0:
        before[after[piece]] = before[piece]


@njit(cache=True)
def show(forest: Forest, piece: int) -> None:
    """A piece comes on top."""
    first, last = forest.first[piece], forest.last[piece]
    _link(forest.start_head, forest.start_next, forest.start_before, first, piece)
    _link(forest.end_head, forest.end_next, forest.end_before, last, piece)
    forest.due[first] = forest.due[last] = 0
    if not _always(forest, piece):
        forest.tally[OPEN] += 1


@njit(cache=True)
def _hide(forest: Forest, piece: int) -> None:
    """A piece is on top no longer."""
    first, last = forest.first[piece], forest.last[piece]
    _unlink(forest.start_head, forest.start_next, forest.start_before, first, piece)
    _unlink(forest.end_head, forest.end_next, forest.end_before, last, piece)
    forest.due[first] = forest.due[last] = 0
    if not _always(forest, piece):
        forest.tally[OPEN] -= 1


@njit(cache=True)
def _note(forest: Forest, piece: int, joined: int) -> None:
    entry = forest.tally[JOURNAL]
    forest.journal[entry, 0], forest.journal[entry, 1] = piece, joined
    forest.tally[JOURNAL] = entry + 1


@njit(cache=True)
def join(forest: Forest, groups: Ints, parts: Ints, first: int, last: int, size: int) -> None:
    """Make a piece of pieces on top."""
    count, ring = forest.tally, forest.free.shape[0]
    piece = forest.free[count[FREE]]
    count[FREE] = (count[FREE] + 1) % ring
    count[FREE_COUNT] -= 1
    forest.first[piece], forest.last[piece], forest.size[piece] = first, last, size
    forest.groups[piece] = groups
    forest.code[piece] = 0
    for k in range(groups.sum()):
        forest.parts[piece, k] = parts[k]
        forest.code[piece] ^= forest.code[parts[k]]
        _hide(forest, parts[k])
    show(forest, piece)
    _note(forest, piece, 1)


@njit(cache=True)
def _set_free(forest: Forest, piece: int) -> None:
    """Its parts come on top; it has a number that may be used again."""
    _hide(forest, piece)
    for k in range(parts_of(forest, piece)):
        show(forest, forest.parts[piece, k])


@njit(cache=True)
def dissolve(forest: Forest, piece: int) -> None:
    """Make parts of a piece on top."""
    _set_free(forest, piece)
    count, ring = forest.tally, forest.free.shape[0]
    forest.free[(count[FREE] + count[FREE_COUNT]) % ring] = piece
    count[FREE_COUNT] += 1
    _note(forest, piece, 0)


@njit(cache=True)
def undo(forest: Forest) -> None:
    """Restore the forest as it was when the journal was empty, nothing due."""
    count, ring = forest.tally, forest.free.shape[0]
    while count[JOURNAL] > 0:
        count[JOURNAL] -= 1
        piece, joined = forest.journal[count[JOURNAL]]
        if joined:
            _set_free(forest, piece)
            count[FREE] = (count[FREE] - 1) % ring
            forest.free[count[FREE]] = piece
            count[FREE_COUNT] += 1
        else:
            for k in range(parts_of(forest, piece)):
                _hide(forest, forest.parts[piece, k])
            show(forest, piece)
            count[FREE_COUNT] -= 1
    forest.due[:] = NEVER
