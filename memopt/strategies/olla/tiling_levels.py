"""Compiled search for tilings: its data, and what keeps both sides of a boundary able to meet."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from memopt.strategies.olla.buffers import Ints

Floats = npt.NDArray[np.float64]

ALL = -1
MOST_SUBSETS = 7
"""Boundaries with more unplaced buffers on a side are not looked at."""


class Tiling(NamedTuple):
    """The buffers: sections first[b] to last[b] (excluded), those that begin and end at each
    boundary, and the position of each among them."""

    size: Ints
    first: Ints
    last: Ints
    twin: Ints
    start_at: Ints
    starts: Ints
    end_at: Ints
    ends: Ints
    start_bit: Ints
    end_bit: Ints
    code: Ints
    """Random numbers: a set of buffers is known by the exclusive or of their codes."""


class Ground(NamedTuple):
    """What is placed so far."""

    offset: Ints
    floor: Ints
    crossing: Ints
    """Unplaced buffers that cross each boundary."""
    starts_allowed: Ints
    ends_allowed: Ints
    """Bit masks by boundary, of what may be placed next."""


class Search(NamedTuple):
    """What a search keeps beside the ground.

    A level has the first and the end of its sections, the parts still pending, the length of the
    trail, the code of what is left, its next and its last candidate among `options`.
    """

    preference: Floats
    """Candidates with larger values are tried first."""
    weight: Floats
    """Of sections: grows where branches die; the heavier are filled first."""
    failed: Ints
    """The table of sets without a tiling, by their codes; 0: empty."""
    ends_only: Ints
    level: Ints
    parts: Ints
    """Parts still to search: first section, last section (excluded), level of the owner."""
    trail: Ints
    options: Ints
    chosen: Ints
    scratch: Ints
    sums: Ints
    masks: Ints


@njit(cache=True)
def _subset_sums(
    tiling: Tiling, ground: Ground, items: Ints, begin: int, end: int, sums: Ints, masks: Ints
) -> int:
    """Sorted sums of the subsets of the unplaced of items[begin:end], equal ones once, each with
    the mask of all items in any such subset. Returns how many; -1 for too many buffers."""
    half = sums.shape[0] // 2
    sums[0], masks[0] = 0, 0
    count, used = 1, 0
    for k in range(begin, end):
        item = items[k]
        if ground.offset[item] >= 0:
            continue
        used += 1
        if used > MOST_SUBSETS:
            return -1
        size, bit = tiling.size[item], np.int64(1) << np.int64(k - begin)
        sums[half : half + count] = sums[:count]
        masks[half : half + count] = masks[:count]
        left, right, found = 0, 0, 0
        # Merge the sums without the item and those with it.
        while right < count:
            low = sums[half + left] if left < count else sums[half + right] + size + 1
            high = sums[half + right] + size
            if low < high:
                sums[found], masks[found] = low, masks[half + left]
                left += 1
            elif low > high:
                sums[found], masks[found] = high, masks[half + right] | bit
                right += 1
            else:
                sums[found] = low
                masks[found] = masks[half + left] | masks[half + right] | bit
                left += 1
                right += 1
            found += 1
        count = found
    return count


@njit(cache=True)
def refresh(tiling: Tiling, ground: Ground, search: Search, boundary: int) -> tuple[bool, int, int]:
    """(whether both sides of a boundary can become level, masks of what may begin and what may end
    there on the ground)."""
    if ground.crossing[boundary] == 0:
        return True, ALL, ALL
    sums, masks = search.sums, search.masks
    count = _subset_sums(
        tiling, ground, tiling.starts, tiling.start_at[boundary], tiling.start_at[boundary + 1],
        sums[0], masks[0],
    )  # fmt: skip
    if count < 0:
        return True, ALL, ALL
    other = _subset_sums(
        tiling, ground, tiling.ends, tiling.end_at[boundary], tiling.end_at[boundary + 1],
        sums[1], masks[1],
    )  # fmt: skip
    if other < 0:
        return True, ALL, ALL
    difference = ground.floor[boundary - 1] - ground.floor[boundary]
    level, may_start, may_end = False, 0, 0
    i, j = 0, 0
    while i < count and j < other:
        over = sums[0, i] - sums[1, j] - difference
        if over == 0:
            level = True
            may_start |= masks[0, i]
            may_end |= masks[1, j]
        if over <= 0:
            i += 1
        if over >= 0:
            j += 1
    return level, may_start, may_end


@njit(cache=True)
def is_allowed(tiling: Tiling, ground: Ground, buffer: int) -> bool:
    """Whether an unplaced buffer may lie on the ground."""
    twin = tiling.twin[buffer]
    if ground.offset[buffer] >= 0 or (twin >= 0 and ground.offset[twin] < 0):
        return False
    may_start = ground.starts_allowed[tiling.first[buffer]]
    may_end = ground.ends_allowed[tiling.last[buffer]]
    starts = may_start == ALL or (may_start >> tiling.start_bit[buffer]) & 1 == 1
    return bool(starts and (may_end == ALL or (may_end >> tiling.end_bit[buffer]) & 1 == 1))
