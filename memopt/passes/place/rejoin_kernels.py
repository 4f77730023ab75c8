"""Compiled local search for joins: dissolve some pieces, join again, keep it if fewer are left."""

from __future__ import annotations

import numpy as np

from memopt.passes.place.buffers import Ints
from memopt.passes.place.join_kernels import (
    CHILD,
    CODE,
    FIRST,
    LAST,
    NEVER,
    NEXT,
    OPEN,
    SIBLING,
    SURE_KEY,
    Forest,
    Scratch,
    best_join,
    dissolve,
    join,
)
from memopt.passes.place.repair_kernels import random_share
from memopt.solvers.compiled import compiled

MOST_DISSOLVED, MOST_DEPTH, ACROSS = 3, 3, 0.2
"""The most pieces dissolved at once, the most nested ones of them, and how often a piece that lives
across the boundary is among them."""


@compiled
def rejoin(forest: Forest, scratch: Scratch) -> None:
    """Join pieces until no join is left: each time by a join with the least key, drawn among equal
    ones."""
    while True:
        boundary, least, equal = -1, NEVER, 0
        for k in range(1, len(forest.due) - 1):
            if forest.due[k] < least:
                boundary, least, equal = k, forest.due[k], 1
            elif forest.due[k] == least and least < NEVER:
                equal += 1
                if random_share(scratch.random) * equal < 1:
                    boundary = k
        if boundary < 0:
            return
        scratch.work[0] += len(forest.due) // 10
        key = best_join(forest, scratch, boundary)
        forest.due[boundary] = key
        if key < NEVER and (key <= max(least, SURE_KEY) or key <= forest.due[1:-1].min()):
            join(forest, scratch)


@compiled
def _one_of(forest: Forest, random: Ints, boundary: int, across: bool) -> int:
    """Draw a joined piece that begins or ends at a boundary, or crosses it; -1 if there is none."""
    chosen, equal = -1, 0
    for start in range(-1, boundary + 1):
        if 0 <= start < boundary and not across:
            continue
        side = LAST if start < 0 else FIRST
        piece = forest.head[side, boundary if start < 0 else start]
        while piece >= 0:
            meets = side == LAST or forest.piece[LAST, piece] > boundary
            if meets and forest.piece[CHILD, piece] >= 0:
                equal += 1
                if random_share(random) * equal < 1:
                    chosen = piece
            piece = forest.piece[NEXT + side, piece]
    return chosen


@compiled
def _ruin(forest: Forest, scratch: Scratch) -> None:
    """Dissolve some pieces at one boundary, and forbid the first of these joins for now."""
    random = scratch.random
    scratch.forbidden[0] = 0
    boundary = 1 + int(random_share(random) * (len(forest.due) - 2))
    depth = 1 + int(random_share(random) * MOST_DEPTH)
    for _ in range(1 + int(random_share(random) * MOST_DISSOLVED)):
        piece = _one_of(forest, random, boundary, random_share(random) < ACROSS)
        if piece < 0:
            piece = _one_of(forest, random, boundary, True)
        if piece < 0:
            return
        if scratch.forbidden[0] == 0:
            scratch.forbidden[0] = forest.piece[CODE, piece]
        for _ in range(depth):
            if forest.piece[CHILD, piece] < 0:
                break
            part, chosen, equal = forest.piece[CHILD, piece], -1, 0
            while part >= 0:
                equal += 1
                if random_share(random) * equal < 1:
                    chosen = part
                part = forest.piece[SIBLING, part]
            dissolve(forest, piece)
            piece = chosen


@compiled
def _copy(source: Forest, target: Forest) -> None:
    target.piece[:], target.head[:] = source.piece, source.head
    target.due[:], target.tally[:] = source.due, source.tally


@compiled
def improve(forest: Forest, kept: Forest, best: Forest, scratch: Scratch, work_limit: int) -> None:
    """Dissolve and join again for an amount of work, or until all pieces live all the time.

    `kept` is the last accepted forest (it may have one piece more than the one before), `best` the
    one with the fewest pieces that do not live all the time.
    """
    stop_at = scratch.work[0] + work_limit
    while scratch.work[0] < stop_at and best.tally[OPEN] > 0:
        scratch.work[0] += 5 + len(forest.due) // 100 + forest.piece.shape[1] // 60
        _ruin(forest, scratch)
        rejoin(forest, scratch)
        more = forest.tally[OPEN] - kept.tally[OPEN]
        if more > -np.log(1e-9 + random_share(scratch.random)):
            _copy(kept, forest)
            continue
        _copy(forest, kept)
        if forest.tally[OPEN] < best.tally[OPEN]:
            _copy(forest, best)
