"""Compiled depth-first search for placements that leave no byte free: tilings.

Where every section (maximal live set) holds exactly `capacity` bytes, a placement within the
capacity has no gap, so at every moment of the construction from below:

* Sections fill from the bottom: `floor[s]` is the sum of what is placed there. Sections of equal
  floors with higher neighbours form a valley, and the buffers that lie on its ground tile it from
  end to end. Some buffer covers each of its sections: the search branches over which, for the
  section with the fewest candidates.
* At a boundary between two sections that unplaced buffers still cross, the two sides become level
  below the lowest of these. So some buffers that begin there, less some that end there, have
  together the difference D of the two floors. Every buffer that belongs to no such choice cannot
  be placed next (`refresh`); without any choice the branch is dead.
* What is left to do depends only on which buffers are left, so sets that failed are remembered in
  a table (`failed`), across restarts too.
* A boundary that no unplaced buffer crosses is a wall: the parts on both sides are searched one
  after the other, and when one has no tiling the decision that split them is undone at once.

The search stops after a number of nodes, the same on every machine.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from memopt.strategies.olla.buffers import Ints
from memopt.strategies.olla.tiling_levels import Ground, Search, Tiling, is_allowed, refresh

FOUND, EXHAUSTED, STOPPED = 1, 0, -1

# Columns of `Search.level`.
LOW, HIGH, PENDING, TRAIL, CODE, NEXT_OPTION, LAST_OPTION, LEVEL_FIELDS = 0, 1, 2, 3, 4, 5, 6, 7


@njit(cache=True)
def _valley(
    tiling: Tiling, ground: Ground, low: int, high: int, ahead: Ints, behind: Ints, many: Ints
) -> None:
    """Count, for each section of the valley [low, high), the buffers that may cover it, as part
    of a row of allowed buffers from end to end."""
    ahead[low : high + 1] = 0
    behind[low : high + 1] = 0
    many[low : high + 1] = 0
    behind[low] = ahead[high] = 1
    for section in range(high - 1, low - 1, -1):
        for k in range(tiling.start_at[section], tiling.start_at[section + 1]):
            buffer = tiling.starts[k]
            end = tiling.last[buffer]
            if end <= high and ahead[end] and is_allowed(tiling, ground, buffer):
                ahead[section] = 1
                break
    for section in range(low, high):
        if not behind[section]:
            continue
        for k in range(tiling.start_at[section], tiling.start_at[section + 1]):
            buffer = tiling.starts[k]
            end = tiling.last[buffer]
            if end <= high and ahead[end] and is_allowed(tiling, ground, buffer):
                behind[end] = 1
                many[section] += 1
                many[end] -= 1
    for section in range(low + 1, high):
        many[section] += many[section - 1]


@njit(cache=True)
def _section_to_fill(
    tiling: Tiling,
    ground: Ground,
    low: int,
    high: int,
    capacity: int,
    search: Search,
) -> int:
    """Writes the candidates of the section of [low, high) that has the fewest (with `ends_only`
    of those at the ends of valleys) to `search.chosen`, and returns how many there are."""
    ahead, behind, many = search.scratch[0], search.scratch[1], search.scratch[2]
    weight, chosen = search.weight, search.chosen
    best, best_key, best_low, best_high = -1, np.inf, 0, 0
    begin = low
    while begin < high:
        floor = ground.floor[begin]
        end = begin + 1
        while end < high and ground.floor[end] == floor and ground.crossing[end] > 0:
            end += 1
        hole = floor < capacity
        if begin > low and ground.crossing[begin] > 0 and ground.floor[begin - 1] < floor:
            hole = False
        if end < high and ground.crossing[end] > 0 and ground.floor[end] < floor:
            hole = False
        if hole:
            _valley(tiling, ground, begin, end, ahead, behind, many)
            for section in range(begin, end):
                if many[section] == 0:
                    weight[section] += 1
                    return 0
                if search.ends_only[0] and section != begin and section != end - 1:
                    continue
                key = (many[section] - 0.99) / weight[section]
                if key < best_key:
                    best, best_key, best_low, best_high = section, key, begin, end
        begin = end
    _valley(tiling, ground, best_low, best_high, ahead, behind, many)
    count = 0
    for section in range(best_low, best + 1):
        if not behind[section]:
            continue
        for k in range(tiling.start_at[section], tiling.start_at[section + 1]):
            buffer = tiling.starts[k]
            last = tiling.last[buffer]
            if best < last <= best_high and ahead[last] and is_allowed(tiling, ground, buffer):
                chosen[count] = buffer
                count += 1
    return count


@njit(cache=True)
def _remaining(tiling: Tiling, ground: Ground, low: int, high: int) -> int:
    """The code of the set of unplaced buffers of sections [low, high)."""
    code = 0
    for buffer in range(tiling.size.shape[0]):
        inside = tiling.first[buffer] >= low and tiling.last[buffer] <= high
        if inside and ground.offset[buffer] < 0:
            code ^= tiling.code[buffer]
    return code


@njit(cache=True)
def _put(
    tiling: Tiling, ground: Ground, search: Search, buffer: int, count: int
) -> tuple[int, int]:
    """Place a buffer on the ground: (the boundary that cannot become level then or -1, entries of
    the trail). An entry is what was allowed at a boundary; the placed buffer is the last."""
    begin, end, trail = tiling.first[buffer], tiling.last[buffer], search.trail
    floor = ground.floor[begin]
    ground.offset[buffer] = floor
    ground.floor[begin:end] = floor + tiling.size[buffer]
    ground.crossing[begin + 1 : end] -= 1
    failed = -1
    for boundary in range(begin, end + 1):
        if boundary != begin and boundary != end and ground.crossing[boundary] > 0:
            continue
        level, may_start, may_end = refresh(tiling, ground, search, boundary)
        trail[count, 0] = boundary
        trail[count, 1] = ground.starts_allowed[boundary]
        trail[count, 2] = ground.ends_allowed[boundary]
        count += 1
        ground.starts_allowed[boundary] = may_start
        ground.ends_allowed[boundary] = may_end
        if not level:
            failed = boundary
            break
    trail[count, 0], trail[count, 1] = -1, buffer
    return failed, count + 1


@njit(cache=True)
def _take_back(tiling: Tiling, ground: Ground, trail: Ints, count: int, mark: int) -> None:
    """Undo the entries of the trail from `mark` on."""
    while count > mark:
        count -= 1
        if trail[count, 0] >= 0:
            ground.starts_allowed[trail[count, 0]] = trail[count, 1]
            ground.ends_allowed[trail[count, 0]] = trail[count, 2]
            continue
        buffer = trail[count, 1]
        begin, end = tiling.first[buffer], tiling.last[buffer]
        ground.floor[begin:end] = ground.offset[buffer]
        ground.crossing[begin + 1 : end] += 1
        ground.offset[buffer] = -1


@njit(cache=True)
def _split(
    ground: Ground, low: int, high: int, owner: int, capacity: int, parts: Ints, count: int
) -> int:
    """Add the parts of sections [low, high) between walls that are not full; returns their
    number."""
    begin = low
    for section in range(low, high):
        if section + 1 < high and ground.crossing[section + 1] > 0:
            continue
        if ground.floor[begin : section + 1].min() < capacity:
            parts[count, 0], parts[count, 1], parts[count, 2] = begin, section + 1, owner
            count += 1
        begin = section + 1
    return count


@njit(cache=True)
def _prepare(tiling: Tiling, ground: Ground, search: Search) -> bool:
    """Look at every boundary; False when some cannot become level."""
    for boundary in range(1, ground.floor.shape[0]):
        level, may_start, may_end = refresh(tiling, ground, search, boundary)
        ground.starts_allowed[boundary] = may_start
        ground.ends_allowed[boundary] = may_end
        if not level:
            return False
    return True


@njit(cache=True)
def _open(
    tiling: Tiling, ground: Ground, search: Search, pending: int, used: int, capacity: int
) -> int:
    """Open a pending part as a new level, with its candidates; returns its depth."""
    low, high = search.parts[pending, 0], search.parts[pending, 1]
    depth = search.parts[pending, 2] + 1
    code = _remaining(tiling, ground, low, high)
    many = 0
    if search.failed[code & (search.failed.shape[0] - 1)] != code:
        many = _section_to_fill(tiling, ground, low, high, capacity, search)
    base = search.level[depth - 1, LAST_OPTION] if depth > 0 else 0
    options, preference = search.options, search.preference
    for k in range(many):
        buffer, position = search.chosen[k], base + k
        while position > base and preference[options[position - 1]] < preference[buffer]:
            options[position] = options[position - 1]
            position -= 1
        options[position] = buffer
    level = search.level[depth]
    level[LOW], level[HIGH], level[PENDING] = low, high, pending
    level[TRAIL], level[CODE] = used, code
    level[NEXT_OPTION], level[LAST_OPTION] = base, base + many
    return int(depth)


@njit(cache=True)
def _go_on(
    tiling: Tiling, ground: Ground, search: Search, depth: int, used: int, capacity: int
) -> tuple[int, int]:
    """Place the next candidate that can be, of this level or of the last one below it that has
    any: (parts pending, entries of the trail), or (-1, 0) where there is none."""
    while True:
        level = search.level[depth]
        if level[NEXT_OPTION] < level[LAST_OPTION]:
            buffer = search.options[level[NEXT_OPTION]]
            level[NEXT_OPTION] += 1
            dead, used = _put(tiling, ground, search, buffer, used)
            if dead < 0:
                low, high, pending = level[LOW], level[HIGH], level[PENDING]
                return _split(ground, low, high, depth, capacity, search.parts, pending), used
            search.weight[dead] += 1
            search.weight[dead - 1] += 1
        else:
            search.failed[level[CODE] & (search.failed.shape[0] - 1)] = level[CODE]
            depth -= 1
            if depth < 0:
                return -1, 0
        mark = search.level[depth, TRAIL]
        _take_back(tiling, ground, search.trail, used, mark)
        used = mark


@njit(cache=True)
def search_tiling(
    tiling: Tiling, ground: Ground, search: Search, capacity: int, node_limit: int
) -> tuple[int, int]:
    """Search from the start: (FOUND (see `ground.offset`), EXHAUSTED or STOPPED; nodes)."""
    if not _prepare(tiling, ground, search):
        return EXHAUSTED, 0
    pending = _split(ground, 0, ground.floor.shape[0], -1, capacity, search.parts, 0)
    used, nodes = 0, 0
    while pending > 0:
        if nodes >= node_limit:
            return STOPPED, nodes
        nodes += 1
        depth = _open(tiling, ground, search, pending - 1, used, capacity)
        pending, used = _go_on(tiling, ground, search, depth, used, capacity)
    return (EXHAUSTED if pending < 0 else FOUND), nodes
