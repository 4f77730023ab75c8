"""Compiled search for the buffers to leave out of an arena of a given size."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memopt.passes.place.buffers import Ints
from memopt.solvers.compiled import compiled

Flags = npt.NDArray[np.bool_]


@compiled
def _fits(level: Ints, begin: int, end: int, size: int, limit: int) -> bool:
    """Tell whether this many more bytes keep a limit at every point of a lifetime."""
    point = begin
    while point < end and level[point] + size <= limit:
        point += 1
    return point >= end


@compiled
def leave_out(
    lower: Ints,
    upper: Ints,
    size: Ints,
    fixed: Ints,
    inside: Ints,
    capacity: int,
    room: int,
    shortest: bool,
) -> tuple[Flags, bool]:
    """Choose the buffers of the arena; return (which stay, whether that keeps both limits).

    While the arena is too full, leave out a buffer of its fullest point that fits outside for all
    its life: the one that relieves the most overfull points per byte; with `shortest`, the one with
    the shortest life of those that are large enough (of all, if none is). Then bring back buffers
    that fit again, largest first.

    Args:
        lower, upper: lifetimes, as time points.
        size: bytes.
        fixed: bytes always outside at each point.
        inside: bytes of all buffers at each point.
        capacity: bytes of the arena.
        room: the most bytes outside at any point.
        shortest: leave out the buffer with the shortest life.
    """
    count, points = size.shape[0], fixed.shape[0]
    placed = np.ones(count, np.bool_)
    inside, outside = inside.copy(), fixed.copy()
    full = np.zeros(points + 1, np.int64)
    while True:
        most, worst = 0, -1
        for point in range(points):
            excess = inside[point] - capacity
            full[point + 1] = full[point] + (1 if excess > 0 else 0)
            if excess > most:
                most, worst = excess, point
        if worst < 0:
            break
        best, best_score = -1, -1.0
        for i in range(count):
            there = placed[i] and lower[i] <= worst < upper[i] and size[i] > 0
            if there and _fits(outside, lower[i], upper[i], size[i], room):
                share = min(size[i], most) / size[i]
                if shortest:
                    score = (size[i] >= most) + share / (upper[i] - lower[i])
                else:
                    score = (full[upper[i]] - full[lower[i]]) * share
                if score > best_score:
                    best, best_score = i, score
        if best < 0:
            return placed, False
        placed[best] = False
        inside[lower[best] : upper[best]] -= size[best]
        outside[lower[best] : upper[best]] += size[best]
    _bring_back(lower, upper, size, inside, placed, capacity)
    return placed, True


@compiled
def _bring_back(
    lower: Ints, upper: Ints, size: Ints, inside: Ints, placed: Flags, capacity: int
) -> None:
    """Bring back buffers that were left out and fit after all."""
    for i in np.argsort(-size):
        if not placed[i] and _fits(inside, lower[i], upper[i], size[i], capacity):
            placed[i] = True
            inside[lower[i] : upper[i]] += size[i]
