"""Compiled greedy placement: buffers in a given order, each into a hole between placed ones."""

from __future__ import annotations

import numpy as np

from memopt.passes.place.buffers import Ints
from memopt.solvers.compiled import compiled


@compiled
def place_in_order(
    order: Ints, size: Ints, alignment: Ints, first: Ints, last: Ints, best_fit: bool
) -> Ints:
    """Return offsets of all buffers. Each goes into the lowest hole it fits in, or with `best_fit`
    into the smallest one (the space above everything counts as the largest)."""
    count = size.shape[0]
    offset = np.full(count, -1, np.int64)
    bottoms = np.empty(count, np.int64)
    tops = np.empty(count, np.int64)
    sorted_by_offset = np.empty(count, np.int64)
    for placed, buffer in enumerate(order):
        found = 0
        for k in range(placed):
            other = sorted_by_offset[k]
            if first[other] < last[buffer] and first[buffer] < last[other]:
                bottoms[found], tops[found] = offset[other], offset[other] + size[other]
                found += 1
        step = alignment[buffer]
        best, best_hole = np.int64(-1), np.iinfo(np.int64).max
        floor = np.int64(0)
        for k in range(found):
            start = -(-floor // step) * step
            hole = bottoms[k] - start
            if hole >= size[buffer] and hole < best_hole:
                best, best_hole = start, hole
                if not best_fit:
                    break
            floor = max(floor, tops[k])
        if best < 0:
            best = -(-floor // step) * step
        offset[buffer] = best
        position = placed
        while position > 0 and offset[sorted_by_offset[position - 1]] > best:
            sorted_by_offset[position] = sorted_by_offset[position - 1]
            position -= 1
        sorted_by_offset[position] = buffer
    return offset
