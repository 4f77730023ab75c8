"""Compiled look-out for joins: stacks of equal heights beside each other, and spirals.

Where no byte stays free, heights that agree are seldom chance, and less so the fewer pieces have
to agree. So the key of a join, the smaller the better, is its number of pieces; a spiral's is three
less, since two heights agree. A random part is added to choose among equals, and sometimes among
others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numba import njit

from memopt.strategies.olla.buffers import Ints
from memopt.strategies.olla.join_kernels import (
    GROUPS,
    HIGH,
    LEFT,
    LOW,
    MIDDLE,
    MOST_PARTS,
    NEVER,
    RIGHT,
    Forest,
)
from memopt.strategies.olla.repair_kernels import random_share

MOST_STACKED = 3
"""Pieces of a stack, unless it is all that lives over its sections."""
MOST_IN_SPIRAL = 5
"""Pieces of a stack that is all that lives over its sections, within a spiral."""
MANY = 14
"""Of more pieces over the same sections only pairs are looked at."""
MANY_IN_SPIRAL = 8
"""The same within a spiral."""
STACKS = 2048
"""Stacks of one group that are looked at."""
SLOTS = 512
"""Lists of stacks by height."""
SURE_KEY = 1.0
"""Key of a join of all that ends at a boundary with all that begins there."""
MOST_KEY = 7.0
SPIRAL_LESS = 2.9


class Scratch(NamedTuple):
    """What a look-out writes. Arrays by group: pieces, and stacks of them."""

    random: Ints
    work: Ints
    """One entry: steps so far, of about half a microsecond."""
    pieces: Ints
    height: Ints
    stack: Ints
    """(group, stack): number of pieces, and their positions among `pieces`, or for more than
    `MOST_STACKED` that of the first."""
    other_end: Ints
    """(group, stack): the boundary where the stack ends, or begins, on its other side."""
    slot: Ints
    same_slot: Ints
    """Lists of the stacks on the right, by height; -1 ends them."""
    stacks: Ints
    """By group: how many, of the spirals looked at."""
    taken: Ints
    """The stack of each group, of the spiral looked at."""
    groups: Ints
    parts: Ints
    """The best join so far."""
    span: Ints
    """Its first section, end of sections and height."""
    forbidden: Ints
    """The code of a join that is not made now; 0: none."""


@njit(cache=True)
def _add_stacks(
    size: Ints,
    pieces: Ints,
    height: Ints,
    stack: Ints,
    count: int,
    begin: int,
    end: int,
    most: int,
    most_whole: int,
) -> int:
    """Add the stacks of pieces[begin:end], which live over the same sections, of up to `most` and
    of all of them, to the `count` of a group; returns how many there are then."""
    many = end - begin
    if count + many * many * many // 6 + many * many + 2 > STACKS:
        most = 1
    if count + many + 1 > STACKS:
        return count
    for a in range(begin, end):
        height[count] = size[pieces[a]]
        stack[count, 0], stack[count, 1] = 1, a
        count += 1
    for a in range(begin, end if most >= 2 else begin):
        for b in range(a + 1, end):
            height[count] = size[pieces[a]] + size[pieces[b]]
            stack[count, 0], stack[count, 1], stack[count, 2] = 2, a, b
            count += 1
    for a in range(begin, end if most >= 3 and many <= MANY else begin):
        for b in range(a + 1, end):
            below = size[pieces[a]] + size[pieces[b]]
            for c in range(b + 1, end):
                height[count] = below + size[pieces[c]]
                stack[count, 0], stack[count, 1], stack[count, 2] = 3, a, b
                stack[count, 3] = c
                count += 1
    if most < many <= most_whole:
        height[count] = 0
        for k in range(begin, end):
            height[count] += size[pieces[k]]
        stack[count, 0], stack[count, 1], stack[count, 2] = many, begin, begin + 1
        stack[count, 3] = begin + 2
        count += 1
    return count


@njit(cache=True)
def _put(scratch: Scratch, group: int, stack: int, count: int) -> int:
    """Append the pieces of a stack to the parts looked at; returns their number."""
    entry = scratch.stack[group, stack]
    for k in range(entry[0]):
        position = entry[1] + k if entry[0] > MOST_STACKED else entry[1 + k]
        scratch.parts[1, count] = scratch.pieces[group, position]
        count += 1
    return count


@njit(cache=True)
def _offer(forest: Forest, scratch: Scratch, first: int, last: int, height: int) -> bool:
    """Keep the join of the taken stacks (-1: none of a group) unless it is forbidden."""
    count, code = 0, 0
    for group in range(GROUPS):
        before = count
        if scratch.taken[group] >= 0:
            count = _put(scratch, group, scratch.taken[group], count)
        scratch.groups[1, group] = count - before
    if scratch.forbidden[0] != 0:
        for k in range(count):
            code ^= forest.code[scratch.parts[1, k]]
        if code == scratch.forbidden[0]:
            return False
    scratch.parts[0, :count] = scratch.parts[1, :count]
    scratch.groups[0] = scratch.groups[1]
    scratch.span[0], scratch.span[1], scratch.span[2] = first, last, height
    return True


@njit(cache=True)
def _gather(
    forest: Forest, scratch: Scratch, group: int, head: int, after: Ints, other: Ints
) -> tuple[int, int]:
    """The stacks of all pieces of a list, those over the same sections together: (pieces,
    stacks)."""
    pieces, many = scratch.pieces[group], 0
    while head >= 0:
        position = many
        while position > 0 and other[pieces[position - 1]] > other[head]:
            pieces[position] = pieces[position - 1]
            position -= 1
        pieces[position] = head
        many += 1
        head = after[head]
    count, begin = 0, 0
    while begin < many:
        end = begin + 1
        while end < many and other[pieces[end]] == other[pieces[begin]]:
            end += 1
        before = count
        count = _add_stacks(
            forest.size, pieces, scratch.height[group], scratch.stack[group],
            count, begin, end, MOST_STACKED, MOST_PARTS - MOST_STACKED - 1,
        )  # fmt: skip
        scratch.other_end[group, before:count] = other[pieces[begin]]
        begin = end
    return many, count


@njit(cache=True)
def _slot(height: int) -> int:
    """Where stacks of a height are listed."""
    return (height * 0x9E3779B97F4A7C1 >> 20) & (SLOTS - 1)


@njit(cache=True)
def _by_height(scratch: Scratch, count: int) -> None:
    """List the stacks on the right by their heights."""
    scratch.slot[:] = -1
    for stack in range(count - 1, -1, -1):
        slot = _slot(scratch.height[RIGHT, stack])
        scratch.same_slot[stack] = scratch.slot[slot]
        scratch.slot[slot] = stack


@njit(cache=True)
def best_beside(forest: Forest, scratch: Scratch, boundary: int, noise: float) -> float:
    """The join with the least key of what ends at a boundary with what begins there; its key."""
    ending, lefts = _gather(
        forest, scratch, LEFT, forest.end_head[boundary], forest.end_next, forest.first
    )
    beginning, rights = _gather(
        forest, scratch, RIGHT, forest.start_head[boundary], forest.start_next, forest.last
    )
    scratch.work[0] += 4 + (lefts + rights) // 16
    _by_height(scratch, rights)
    scratch.taken[:] = -1
    best = NEVER
    for left in range(lefts):
        height = scratch.height[LEFT, left]
        right = scratch.slot[_slot(height)]
        while right >= 0:
            equal, right = right, scratch.same_slot[right]
            if scratch.height[RIGHT, equal] != height:
                continue
            scratch.work[0] += 1
            ends, begins = scratch.stack[LEFT, left, 0], scratch.stack[RIGHT, equal, 0]
            if ends + begins > MOST_PARTS:
                continue
            key = SURE_KEY
            if ends < ending or begins < beginning:
                few = min(float(ends + begins), MOST_KEY)
                key = few - noise * np.log(1e-9 + random_share(scratch.random))
            scratch.taken[LEFT], scratch.taken[RIGHT] = left, equal
            span = scratch.other_end[LEFT, left], scratch.other_end[RIGHT, equal]
            if key < best and _offer(forest, scratch, span[0], span[1], height):
                best = key
    return best


@njit(cache=True)
def _is_first(other: Ints, before: Ints, piece: int) -> bool:
    """Whether no piece before it in a list has the same other end."""
    earlier = before[piece]
    while earlier >= 0:
        if other[earlier] == other[piece]:
            return False
        earlier = before[earlier]
    return True


@njit(cache=True)
def _collect(
    size: Ints,
    pieces: Ints,
    height: Ints,
    stack: Ints,
    head: int,
    after: Ints,
    other: Ints,
    end: int,
    most: int,
) -> int:
    """The stacks of the pieces of a list with a given other end; how many."""
    many = 0
    while head >= 0:
        if other[head] == end:
            pieces[many] = head
            many += 1
        head = after[head]
    if many > MANY_IN_SPIRAL:
        most = min(most, 2)
    return _add_stacks(size, pieces, height, stack, 0, 0, many, most, MOST_IN_SPIRAL)


@njit(cache=True)
def _of_height(heights: Ints, count: int, height: int) -> int:
    """The stack of a height with the fewest pieces; -1: there is none."""
    for stack in range(count):
        if heights[stack] == height:
            return stack
    return -1


@njit(cache=True)
def _spirals_of(
    forest: Forest, scratch: Scratch, begin: int, end: int, noise: float, best: float
) -> float:
    """The spiral with the least key from sections `begin` to `end`, of the stacks collected; its
    key if it is less than the best so far."""
    counts, taken, height = scratch.stacks, scratch.taken, scratch.height
    for middle in range(counts[MIDDLE]):
        scratch.work[0] += 1 + counts[HIGH] * counts[RIGHT] // 64
        for high in range(counts[HIGH]):
            right = _of_height(
                height[RIGHT], counts[RIGHT], height[MIDDLE, middle] + height[HIGH, high]
            )
            if right < 0:
                continue
            for low in range(counts[LOW]):
                left = _of_height(
                    height[LEFT], counts[LEFT], height[MIDDLE, middle] + height[LOW, low]
                )
                if left < 0:
                    continue
                taken[LOW], taken[MIDDLE], taken[HIGH] = low, middle, high
                taken[LEFT], taken[RIGHT] = left, right
                many = 0
                for group in range(GROUPS):
                    many += scratch.stack[group, taken[group], 0]
                if many > MOST_PARTS:
                    continue
                key = many - SPIRAL_LESS - noise * np.log(1e-9 + random_share(scratch.random))
                total = height[LOW, low] + height[MIDDLE, middle] + height[HIGH, high]
                if key < best and _offer(forest, scratch, begin, end, total):
                    best = key
    return best


@njit(cache=True)
def _collect_beginning(
    forest: Forest, scratch: Scratch, group: int, at: int, end: int, most: int
) -> int:
    """The stacks of a group of the pieces from a boundary to another; how many."""
    count = _collect(
        forest.size, scratch.pieces[group], scratch.height[group], scratch.stack[group],
        forest.start_head[at], forest.start_next, forest.last, end, most,
    )  # fmt: skip
    scratch.stacks[group] = count
    scratch.work[0] += 1 + count // 16
    return count


@njit(cache=True)
def _spirals_around(
    forest: Forest, scratch: Scratch, left: int, right: int, noise: float, best: float
) -> float:
    """The same of all spirals around the pieces that live from `left` to `right`."""
    before = forest.end_head[left]
    while before >= 0:
        begin = forest.first[before]
        new = _is_first(forest.first, forest.end_before, before)
        if new and _collect_beginning(forest, scratch, HIGH, begin, right, 2) > 0:
            collected = False
            behind = forest.start_head[right]
            while behind >= 0:
                end = forest.last[behind]
                new = _is_first(forest.last, forest.start_before, behind)
                if new and _collect_beginning(forest, scratch, LOW, left, end, 2) > 0:
                    if not collected:
                        _collect_beginning(forest, scratch, MIDDLE, left, right, 2)
                        _collect_beginning(forest, scratch, LEFT, begin, left, 3)
                        collected = True
                    _collect_beginning(forest, scratch, RIGHT, right, end, 3)
                    best = _spirals_of(forest, scratch, begin, end, noise, best)
                behind = forest.start_next[behind]
        before = forest.end_next[before]
    return best


@njit(cache=True)
def best_spiral(
    forest: Forest, scratch: Scratch, boundary: int, noise: float, best: float
) -> float:
    """The spiral with the least key, whose middle begins or ends at a boundary; its key if it is
    less than the best so far."""
    piece = forest.start_head[boundary]
    while piece >= 0:
        if _is_first(forest.last, forest.start_before, piece):
            best = _spirals_around(forest, scratch, boundary, forest.last[piece], noise, best)
        piece = forest.start_next[piece]
    piece = forest.end_head[boundary]
    while piece >= 0:
        if _is_first(forest.first, forest.end_before, piece):
            best = _spirals_around(forest, scratch, forest.first[piece], boundary, noise, best)
        piece = forest.end_next[piece]
    return best
