"""Compiled local search for joins of all buffers: dissolve some pieces, join again, keep what has
fewer pieces left."""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.strategies.olla.buffers import Ints
from memopt.strategies.olla.join_choices import SURE_KEY, Scratch, best_beside, best_spiral
from memopt.strategies.olla.join_kernels import (
    JOURNAL,
    NEVER,
    OPEN,
    Forest,
    dissolve,
    join,
    parts_of,
    undo,
)
from memopt.strategies.olla.repair_kernels import random_share

NOISE = 0.5
"""Mean of the random part of a join's key."""
TEMPERATURE = 1.0
"""How many pieces more are taken, on average."""
MOST_PIECES, MOST_DEPTH = 3, 3
"""Pieces that are dissolved at once, and how many one within the other."""
ACROSS = 0.2
"""How often one that lives across the boundary is among them."""


@njit(cache=True)
def _soonest(forest: Forest, random: Ints) -> int:
    """The boundary with the least key, any of equal ones; -1: no join is left."""
    boundary, least, equal = -1, NEVER, 0
    for k in range(1, forest.due.shape[0] - 1):
        key = forest.due[k]
        if key < least:
            boundary, least, equal = k, key, 1
        elif key == least and key < NEVER:
            equal += 1
            if random_share(random) * equal < 1:
                boundary = k
    return boundary


@njit(cache=True)
def rejoin(forest: Forest, scratch: Scratch) -> None:
    """Make the join with the least key until there is none."""
    while True:
        boundary = _soonest(forest, scratch.random)
        if boundary < 0:
            return
        scratch.work[0] += forest.due.shape[0] // 10
        due = forest.due[boundary]
        key = best_beside(forest, scratch, boundary, NOISE)
        key = best_spiral(forest, scratch, boundary, NOISE, key)
        forest.due[boundary] = key
        if key == NEVER or (key > max(due, SURE_KEY) and key > forest.due[1:-1].min()):
            continue
        span = scratch.span
        join(forest, scratch.groups[0], scratch.parts[0], span[0], span[1], span[2])


@njit(cache=True)
def _one_of(forest: Forest, random: Ints, boundary: int, across: bool) -> int:
    """A joined piece that ends or begins at a boundary, or that crosses it; -1: there is none."""
    chosen, equal = -1, 0
    piece = forest.end_head[boundary]
    while piece >= 0:
        if parts_of(forest, piece) > 0:
            equal += 1
            if random_share(random) * equal < 1:
                chosen = piece
        piece = forest.end_next[piece]
    for start in range(0 if across else boundary, boundary + 1):
        piece = forest.start_head[start]
        while piece >= 0:
            if forest.last[piece] > boundary and parts_of(forest, piece) > 0:
                equal += 1
                if random_share(random) * equal < 1:
                    chosen = piece
            piece = forest.start_next[piece]
    return chosen


@njit(cache=True)
def _ruin(forest: Forest, scratch: Scratch) -> None:
    """Dissolve some pieces at one boundary; the first of these joins is not made again now."""
    random = scratch.random
    scratch.forbidden[0] = 0
    boundary = 1 + int(random_share(random) * (forest.due.shape[0] - 2))
    depth = 1 + int(random_share(random) * MOST_DEPTH)
    for _ in range(1 + int(random_share(random) * MOST_PIECES)):
        piece = _one_of(forest, random, boundary, random_share(random) < ACROSS)
        if piece < 0:
            piece = _one_of(forest, random, boundary, True)
        if piece < 0:
            return
        if scratch.forbidden[0] == 0:
            scratch.forbidden[0] = forest.code[piece]
        for _ in range(depth):
            if parts_of(forest, piece) == 0:
                break
            part = forest.parts[piece, int(random_share(random) * parts_of(forest, piece))]
            dissolve(forest, piece)
            piece = part


@njit(cache=True)
def _copy(source: Forest, target: Forest) -> None:
    target.first[:], target.last[:], target.size[:] = source.first, source.last, source.size
    target.code[:], target.groups[:], target.parts[:] = source.code, source.groups, source.parts
    target.start_head[:], target.start_next[:] = source.start_head, source.start_next
    target.start_before[:], target.end_head[:] = source.start_before, source.end_head
    target.end_next[:], target.end_before[:] = source.end_next, source.end_before
    target.due[:], target.free[:], target.tally[:] = source.due, source.free, source.tally


@njit(cache=True)
def improve(forest: Forest, best: Forest, scratch: Scratch, work_limit: int) -> None:
    """Dissolve and join again until an amount of work is done, or all pieces live all the time;
    `best` is the forest with the fewest others."""
    stop_at = scratch.work[0] + work_limit
    pieces = forest.tally[OPEN]
    while scratch.work[0] < stop_at and best.tally[OPEN] > 0:
        forest.tally[JOURNAL] = 0
        scratch.work[0] += 5 + forest.due.shape[0] // 100
        _ruin(forest, scratch)
        rejoin(forest, scratch)
        now = forest.tally[OPEN]
        if now <= pieces - TEMPERATURE * np.log(1e-9 + random_share(scratch.random)):
            pieces = now
            if now < best.tally[OPEN]:
                _copy(forest, best)
        else:
            undo(forest)
