"""Compiled joins: rectangles of time and memory, made of smaller ones that fit together exactly.

A join makes one piece of five groups of pieces, some of which may be empty. The pieces of a group
live over the same sections and are stacked:

    high  high    right        low: l to e, middle: l to r, high: b to r,
    left  middle  right        left: b to l, as high as low + middle,
    left  low     low          right: r to e, as high as middle + high
    b     l       r     e

With all five it is a spiral, which no straight cut separates; with left and right only (then l = r)
two stacks of the same height beside each other. Equal heights are seldom chance, and less so the
fewer pieces they consist of. So the key of a join, the smaller the better, is its number of pieces
(a spiral's is `SPIRAL_LESS` less, since two heights agree) plus a random part.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from memopt.passes.place.buffers import Ints
from memopt.passes.place.repair_kernels import random_share
from memopt.solvers.compiled import compiled

Floats = npt.NDArray[np.float64]

LOW, MIDDLE, HIGH, LEFT, RIGHT, GROUPS = 0, 1, 2, 3, 4, 5
MOST_PARTS, MOST_WHOLE = 16, 12
"""The most pieces of a join, and of a stack that holds every piece over its sections."""
MANY, MANY_IN_SPIRAL = 14, 8
"""With more pieces over the same sections, only pairs are tried."""
STACKS, SLOTS = 2048, 509
"""Stacks tried for one group; slots of the table of stacks by height (a prime)."""
SURE_KEY, MOST_KEY, SPIRAL_LESS = 1.0, 7.0, 2.9
"""Key of a join of all pieces that end at a boundary with all that begin there; the most that the
number of pieces adds to a key; what is taken off a spiral's key."""
NEVER = np.inf
NOISE = 0.5
"""Mean of the random part of a join's key."""

# Rows of `Forest.piece`; NEXT and BEFORE have one for each side, FIRST and LAST.
FIRST, LAST, SIZE, CODE, CHILD, SIBLING, GROUP, NEXT, BEFORE, ROWS = 0, 1, 2, 3, 4, 5, 6, 7, 9, 11
# Entries of `Forest.tally`: pieces on top that do not live all the time, the first free number.
OPEN, FREE = 0, 1


class Forest(NamedTuple):
    """Pieces by number, buffers first. A piece that no other contains is "on top"."""

    piece: Ints
    """(row, piece): sections FIRST to LAST (excluded), bytes, a random CODE (a join's is the
    exclusive or of its parts'), the first part or -1, the next part of the same join (or the next
    free number), its group there, and the lists of the pieces on top that begin, or end, at the
    same boundary."""
    head: Ints
    """(side, boundary): the first piece that begins (FIRST) or ends (LAST) there, or -1."""
    due: Floats
    """By boundary: the least key that a join there can have; `NEVER` if none is possible."""
    tally: Ints


class Scratch(NamedTuple):
    """Scratch arrays of the search for joins. Stacks by (group, number); the best join so far is
    row 0 of `parts` and `groups`, the one being tried row 1."""

    random: Ints
    work: Ints
    """One entry: steps so far, of about half a microsecond."""
    pieces: Ints
    stacks: Ints
    height: Ints
    members: Ints
    """Bit masks of pieces, counted from position `base`."""
    base: Ints
    many: Ints
    far: Ints
    """The boundary where a stack ends or begins on its other side."""
    slot: Ints
    same_slot: Ints
    """Linked lists of the stacks on the right, by height; -1 ends them."""
    taken: Ints
    """The stack taken for each group of the join being tried; -1: none."""
    parts: Ints
    groups: Ints
    span: Ints
    """Of the best join: first section, end of sections, height, number of parts."""
    forbidden: Ints
    """The code of a join that must not be made now; 0: none."""


@compiled
def _is_open(forest: Forest, piece: int) -> int:
    """Return 1 for a piece that does not live all the time, else 0."""
    whole = forest.piece[FIRST, piece] == 0 and forest.piece[LAST, piece] == len(forest.due) - 1
    return 0 if whole else 1


@compiled
def show(forest: Forest, piece: int) -> None:
    """Put a piece on top."""
    for side in range(2):
        at = forest.piece[side, piece]
        other = forest.head[side, at]
        forest.piece[NEXT + side, piece], forest.piece[BEFORE + side, piece] = other, -1
        if other >= 0:
            forest.piece[BEFORE + side, other] = piece
        forest.head[side, at] = piece
        forest.due[at] = 0
    forest.tally[OPEN] += _is_open(forest, piece)


@compiled
def _hide(forest: Forest, piece: int) -> None:
    """Take a piece off the top."""
    for side in range(2):
        at = forest.piece[side, piece]
        after, before = forest.piece[NEXT + side, piece], forest.piece[BEFORE + side, piece]
        if before >= 0:
            forest.piece[NEXT + side, before] = after
        else:
            forest.head[side, at] = after
        if after >= 0:
            forest.piece[BEFORE + side, after] = before
        forest.due[at] = 0
    forest.tally[OPEN] -= _is_open(forest, piece)


@compiled
def join(forest: Forest, scratch: Scratch) -> None:
    """Join the best join's parts into one piece."""
    piece = forest.tally[FREE]
    forest.tally[FREE] = forest.piece[SIBLING, piece]
    forest.piece[:3, piece] = scratch.span[:3]
    code, child = 0, -1
    for k in range(scratch.span[3]):
        part = scratch.parts[0, k]
        forest.piece[SIBLING, part], forest.piece[GROUP, part] = child, scratch.groups[0, k]
        child = part
        code ^= forest.piece[CODE, part]
        _hide(forest, part)
    forest.piece[CODE, piece], forest.piece[CHILD, piece] = code, child
    show(forest, piece)


@compiled
def dissolve(forest: Forest, piece: int) -> None:
    """Put the parts of a piece on top, in its place."""
    _hide(forest, piece)
    part = forest.piece[CHILD, piece]
    while part >= 0:
        show(forest, part)
        part = forest.piece[SIBLING, part]
    forest.piece[SIBLING, piece], forest.piece[CHILD, piece] = forest.tally[FREE], -1
    forest.tally[FREE] = piece


@compiled
def _add(scratch: Scratch, group: int, height: int, base: int, members: int, many: int) -> None:
    """Add a stack to a group, if the table has room."""
    k = scratch.stacks[group]
    if k < STACKS:
        scratch.height[group, k], scratch.base[group, k] = height, base
        scratch.members[group, k], scratch.many[group, k] = members, many
        scratch.stacks[group] = k + 1


@compiled
def _add_stacks(
    size: Ints, scratch: Scratch, group: int, begin: int, end: int, most: int, whole: int
) -> None:
    """Add the stacks of pieces[begin:end], which live over the same sections: of up to `most`
    pieces and of all of them, fewest pieces first."""
    pieces, many, one = scratch.pieces[group], end - begin, np.int64(1)
    for a in range(many):
        _add(scratch, group, size[pieces[begin + a]], begin + a, 1, 1)
    for a in range(many if most >= 2 else 0):
        for b in range(a + 1, min(many, a + 60)):
            pair = size[pieces[begin + a]] + size[pieces[begin + b]]
            _add(scratch, group, pair, begin + a, int(one | one << np.int64(b - a)), 2)
    for a in range(many if most >= 3 else 0):
        for b in range(a + 1, many):
            pair = size[pieces[begin + a]] + size[pieces[begin + b]]
            for c in range(b + 1, many):
                members = one | one << np.int64(b - a) | one << np.int64(c - a)
                _add(scratch, group, pair + size[pieces[begin + c]], begin + a, int(members), 3)
    if most < many <= whole:
        total = 0
        for a in range(begin, end):
            total += size[pieces[a]]
        _add(scratch, group, total, begin, int((one << np.int64(many)) - 1), many)


@compiled
def _gather(
    forest: Forest, scratch: Scratch, group: int, side: int, at: int, only: int, most: int
) -> int:
    """Write the stacks of the pieces that begin or end at a boundary, of all or of those whose
    other end is `only`; return the number of pieces."""
    far, pieces, many = forest.piece[1 - side], scratch.pieces[group], 0
    piece = forest.head[side, at]
    while piece >= 0:
        if only < 0 or far[piece] == only:
            position = many
            while position > 0 and far[pieces[position - 1]] > far[piece]:
                pieces[position] = pieces[position - 1]
                position -= 1
            pieces[position] = piece
            many += 1
        piece = forest.piece[NEXT + side, piece]
    enough, whole = (MANY, MOST_WHOLE) if only < 0 else (MANY_IN_SPIRAL, 5)
    scratch.stacks[group], begin = 0, 0
    for end in range(1, many + 1):
        if end < many and far[pieces[end]] == far[pieces[begin]]:
            continue
        before, limit = scratch.stacks[group], most if end - begin <= enough else min(most, 2)
        _add_stacks(forest.piece[SIZE], scratch, group, begin, end, limit, whole)
        scratch.far[group, before : scratch.stacks[group]] = far[pieces[begin]]
        begin = end
    scratch.work[0] += 1 + scratch.stacks[group] // 16
    return many


@compiled
def _offer(forest: Forest, scratch: Scratch, begin: int, end: int, height: int) -> bool:
    """Keep the join of the taken stacks unless it has too many parts or is forbidden."""
    count, code = 0, 0
    for group in range(GROUPS):
        stack = scratch.taken[group]
        if stack < 0:
            continue
        members, position = scratch.members[group, stack], scratch.base[group, stack]
        while members > 0:
            if members & 1:
                if count >= MOST_PARTS:
                    return False
                part = scratch.pieces[group, position]
                scratch.parts[1, count], scratch.groups[1, count] = part, group
                code ^= forest.piece[CODE, part]
                count += 1
            members >>= 1
            position += 1
    if code == scratch.forbidden[0]:
        return False
    scratch.parts[0], scratch.groups[0] = scratch.parts[1], scratch.groups[1]
    scratch.span[0], scratch.span[1], scratch.span[2], scratch.span[3] = begin, end, height, count
    return True


@compiled
def _noise(scratch: Scratch) -> float:
    return float(-NOISE * np.log(1e-9 + random_share(scratch.random)))


@compiled
def best_beside(forest: Forest, scratch: Scratch, boundary: int) -> float:
    """Find the join with the least key of pieces that end at a boundary with pieces that begin
    there; return its key."""
    ending = _gather(forest, scratch, LEFT, LAST, boundary, -1, 3)
    beginning = _gather(forest, scratch, RIGHT, FIRST, boundary, -1, 3)
    scratch.work[0] += 2
    scratch.slot[:] = -1
    for stack in range(scratch.stacks[RIGHT] - 1, -1, -1):
        slot = scratch.height[RIGHT, stack] % SLOTS
        scratch.same_slot[stack], scratch.slot[slot] = scratch.slot[slot], stack
    scratch.taken[:] = -1
    best = NEVER
    for left in range(scratch.stacks[LEFT]):
        height = scratch.height[LEFT, left]
        right = scratch.slot[height % SLOTS]
        while right >= 0:
            if scratch.height[RIGHT, right] == height:
                scratch.work[0] += 1
                ends, begins = scratch.many[LEFT, left], scratch.many[RIGHT, right]
                key = SURE_KEY
                if ends < ending or begins < beginning:
                    key = min(float(ends + begins), MOST_KEY) + _noise(scratch)
                scratch.taken[LEFT], scratch.taken[RIGHT] = left, right
                begin, end = scratch.far[LEFT, left], scratch.far[RIGHT, right]
                if key < best and _offer(forest, scratch, begin, end, height):
                    best = key
            right = scratch.same_slot[right]
    return best


@compiled
def _of_height(scratch: Scratch, group: int, height: int) -> int:
    """Return the stack of a height with the fewest pieces; -1 if there is none."""
    for stack in range(scratch.stacks[group]):
        if scratch.height[group, stack] == height:
            return stack
    return -1


@compiled
def _spirals_of(forest: Forest, scratch: Scratch, begin: int, end: int, best: float) -> float:
    """Find the spiral with the least key of the gathered stacks; return its key if below `best`."""
    stacks, taken, height = scratch.stacks, scratch.taken, scratch.height
    for middle in range(stacks[MIDDLE]):
        scratch.work[0] += 1 + stacks[HIGH] * stacks[RIGHT] // 64
        inside = height[MIDDLE, middle]
        for high in range(stacks[HIGH]):
            right = _of_height(scratch, RIGHT, inside + height[HIGH, high])
            if right < 0:
                continue
            for low in range(stacks[LOW]):
                left = _of_height(scratch, LEFT, inside + height[LOW, low])
                if left < 0:
                    continue
                taken[LOW], taken[MIDDLE], taken[HIGH] = low, middle, high
                taken[LEFT], taken[RIGHT] = left, right
                key = _noise(scratch) - SPIRAL_LESS
                for group in range(GROUPS):
                    key += scratch.many[group, taken[group]]
                total = height[LOW, low] + inside + height[HIGH, high]
                if key < best and _offer(forest, scratch, begin, end, total):
                    best = key
    return best


@compiled
def _is_first(forest: Forest, side: int, piece: int) -> bool:
    """Tell whether a piece is the first of its list with its other end."""
    earlier = forest.piece[BEFORE + side, piece]
    while earlier >= 0:
        if forest.piece[1 - side, earlier] == forest.piece[1 - side, piece]:
            return False
        earlier = forest.piece[BEFORE + side, earlier]
    return True


@compiled
def _spirals_around(forest: Forest, scratch: Scratch, left: int, right: int, best: float) -> float:
    """Find the spiral with the least key around the pieces that live from `left` to `right`."""
    before = forest.head[LAST, left]
    while before >= 0:
        begin = forest.piece[FIRST, before]
        new = _is_first(forest, LAST, before)
        if new and _gather(forest, scratch, HIGH, FIRST, begin, right, 2) > 0:
            _gather(forest, scratch, LEFT, FIRST, begin, left, 3)
            behind = forest.head[FIRST, right]
            while behind >= 0:
                end = forest.piece[LAST, behind]
                new = _is_first(forest, FIRST, behind)
                if new and _gather(forest, scratch, LOW, FIRST, left, end, 2) > 0:
                    _gather(forest, scratch, MIDDLE, FIRST, left, right, 2)
                    _gather(forest, scratch, RIGHT, FIRST, right, end, 3)
                    best = _spirals_of(forest, scratch, begin, end, best)
                behind = forest.piece[NEXT + FIRST, behind]
        before = forest.piece[NEXT + LAST, before]
    return best


@compiled
def best_join(forest: Forest, scratch: Scratch, boundary: int) -> float:
    """Find the join with the least key at a boundary, spirals by their middle; return its key."""
    best = best_beside(forest, scratch, boundary)
    for side in range(2):
        piece = forest.head[side, boundary]
        while piece >= 0:
            if _is_first(forest, side, piece):
                left, right = forest.piece[FIRST, piece], forest.piece[LAST, piece]
                best = _spirals_around(forest, scratch, left, right, best)
            piece = forest.piece[NEXT + side, piece]
    return best
