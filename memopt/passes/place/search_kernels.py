"""Compiled depth-first search for offsets within a capacity (after the minimalloc paper, 2023).

Every placement can be brought to a form in which each buffer rests on another one (or on 0) by
letting buffers sink. So the search only puts a buffer at its `least` offset: the top of the
placed buffers that overlap it. Two things differ from the paper. A node is a yes/no question:
buffer b is at its least offset, or it is above (then it rests on an unplaced buffer), which
removes every symmetry of the order of placement without fixing that order; so the next buffer
can be taken where memory is tightest. Bounds on each buffer's offset are propagated:

* `reach[b]` ≥ least[b] is the least offset that b can still have. A section (a maximal live set)
  has its floor at the least reach of its unplaced buffers and must fit the remaining bytes
  above it (section inference).
* A section may waste at most capacity - floor - remaining bytes. A buffer that cannot start
  within that slack of the floor lies above one that does: its reach rises.
* b can be placed only if no unplaced buffer that overlaps it fits below (dominance), and no
  identical buffer of lower index is unplaced (symmetry).

Unplaced buffers that no longer interact fall apart into independent components, searched one
after the other; when one has no solution the decision that split them is undone at once.

The search is iterative and its state is in arrays: it stops after an amount of work (array
elements looked at: proportional to time, but the same on every machine) and goes on from there
when called again, so that the caller can look at the clock and at interrupts.

Indices that are read from arrays are taken as unsigned, and divisions unchecked
(`error_model="numpy"`): looking at each index's sign and each divisor took half of the time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from memopt.passes.place.buffers import Ints
from memopt.solvers.compiled import compiled_as_numpy

FOUND, EXHAUSTED, STOPPED, FULL = 1, 0, -1, -2
INFINITE = np.int64(1) << np.int64(60)

# Columns of `frames`, one row per decision level.
LOW, HIGH, CHOSEN, TRAIL, PENDING, FRAME_FIELDS = 0, 1, 2, 3, 4, 5
# Kinds of trail entries: what to restore.
PLACED, LEAST, FLOOR, REACH = 0, 1, 2, 3
# Entries of `counters`.
DEPTH, PENDING_COUNT, TRAIL_COUNT, NODES, WORK, COUNTERS = 0, 1, 2, 3, 4, 5


class Instance(NamedTuple):
    """Buffers, most preferred first. Sections of buffer b: first[b] to last[b] (excluded)."""

    size: Ints
    alignment: Ints
    first: Ints
    last: Ints
    twin: Ints
    """The preceding identical buffer, or -1."""
    overlap_start: Ints
    overlaps: Ints
    member_start: Ints
    members: Ints


class State(NamedTuple):
    """The state of a search as arrays, which `_fresh` in `memopt.passes.place.search` makes."""

    counters: Ints
    frames: Ints
    pending: Ints
    """Components still to search: first section, last section (excluded), level of the owner."""
    touched: Ints
    """Sections to look at again, during propagation."""
    offset: Ints
    """Offset of each buffer; -1: not placed."""
    least: Ints
    reach: Ints
    floor: Ints
    remaining: Ints
    """Bytes still to place, by section."""
    crossing: Ints
    """Unplaced buffers that are in this section and the next."""


@compiled_as_numpy
def _push(state: State, trail: Ints, kind: int, index: int | np.uintp, old: int) -> None:
    position = state.counters[TRAIL_COUNT]
    trail[position, 0], trail[position, 1], trail[position, 2] = kind, index, old
    state.counters[TRAIL_COUNT] = position + 1


@compiled_as_numpy
def _undo(instance: Instance, state: State, trail: Ints, mark: int) -> None:
    position = state.counters[TRAIL_COUNT]
    while position > mark:
        position -= 1
        kind, index, old = trail[position, 0], trail[position, 1], trail[position, 2]
        if kind == PLACED:
            state.offset[index] = -1
            for section in range(instance.first[index], instance.last[index]):
                state.remaining[section] += instance.size[index]
                if section + 1 < instance.last[index]:
                    state.crossing[section] += 1
        elif kind == LEAST:
            state.least[index] = old
        elif kind == FLOOR:
            state.floor[index] = old
        else:
            state.reach[index] = old
    state.counters[TRAIL_COUNT] = mark


@compiled_as_numpy
def _rests_free(instance: Instance, state: State, buffer: int) -> bool:
    """Tell whether no unplaced buffer that overlaps `buffer` fits below its least offset."""
    for k in range(instance.overlap_start[buffer], instance.overlap_start[buffer + 1]):
        other = np.uintp(instance.overlaps[k])
        if (
            state.offset[other] < 0
            and state.reach[other] + instance.size[other] <= state.least[buffer]
        ):
            return False
    return True


@compiled_as_numpy
def _select(
    instance: Instance, state: State, low: int, high: int, capacity: int, slack_weight: int
) -> int:
    """Choose the buffer of sections [low, high) to decide on; -1 if there is none. Prefer the least
    4·offset + slack_weight·slack, then the least slack (of its tightest section), then the
    index."""
    best, best_key, best_slack = -1, INFINITE, INFINITE
    state.counters[WORK] += 2 * instance.size.shape[0]
    lowest_top = INFINITE
    for buffer in range(instance.size.shape[0]):
        inside = instance.first[buffer] >= low and instance.last[buffer] <= high
        if inside and state.offset[buffer] < 0:
            lowest_top = min(lowest_top, state.reach[buffer] + instance.size[buffer])
    for buffer in range(instance.size.shape[0]):
        if state.offset[buffer] >= 0:
            continue
        if instance.first[buffer] < low or instance.last[buffer] > high:
            continue
        offset, twin = state.least[buffer], instance.twin[buffer]
        if state.reach[buffer] > offset or 4 * offset > best_key:
            continue
        if twin >= 0 and state.offset[twin] < 0:
            continue
        slack = INFINITE
        if slack_weight >= 0:
            for section in range(instance.first[buffer], instance.last[buffer]):
                rest = capacity - state.floor[section] - state.remaining[section]
                slack = min(slack, rest)
        key = 4 * offset + max(slack_weight, 0) * slack
        if key > best_key or (key == best_key and slack >= best_slack):
            continue
        if offset >= lowest_top and not _rests_free(instance, state, buffer):
            continue
        best, best_key, best_slack = buffer, key, slack
    return best


@compiled_as_numpy
def _place(instance: Instance, state: State, trail: Ints, chosen: int) -> None:
    """Put `chosen` at its least offset; the buffers that overlap it lie above."""
    base = state.least[chosen]
    top = base + instance.size[chosen]
    state.offset[chosen] = base
    _push(state, trail, PLACED, chosen, 0)
    state.counters[WORK] += instance.overlap_start[chosen + 1] - instance.overlap_start[chosen]
    for section in range(instance.first[chosen], instance.last[chosen]):
        state.remaining[section] -= instance.size[chosen]
        state.touched[section] = 1
        if section + 1 < instance.last[chosen]:
            state.crossing[section] -= 1
    for k in range(instance.overlap_start[chosen], instance.overlap_start[chosen + 1]):
        other = np.uintp(instance.overlaps[k])
        if state.offset[other] < 0 and state.least[other] < top:
            _push(state, trail, LEAST, other, state.least[other])
            step = instance.alignment[other]
            state.least[other] = -(-top // step) * step
            if state.least[other] > state.reach[other]:
                _push(state, trail, REACH, other, state.reach[other])
                state.reach[other] = state.least[other]
                state.counters[WORK] += instance.last[other] - instance.first[other]
                for section in range(instance.first[other], instance.last[other]):
                    state.touched[section] = 1


@compiled_as_numpy
def _lift(instance: Instance, state: State, trail: Ints, chosen: int) -> bool:
    """Lift `chosen` above its least offset, onto an unplaced buffer; False if there is none."""
    top = INFINITE
    state.counters[WORK] += instance.overlap_start[chosen + 1] - instance.overlap_start[chosen]
    for k in range(instance.overlap_start[chosen], instance.overlap_start[chosen + 1]):
        other = np.uintp(instance.overlaps[k])
        if state.offset[other] < 0:
            top = min(top, state.reach[other] + instance.size[other])
    if top == INFINITE:
        return False
    step = instance.alignment[chosen]
    _push(state, trail, REACH, chosen, state.reach[chosen])
    state.reach[chosen] = max(state.reach[chosen], -(-top // step) * step)
    for section in range(instance.first[chosen], instance.last[chosen]):
        state.touched[section] = 1
    return True


@compiled_as_numpy
def _infer(
    instance: Instance, state: State, trail: Ints, section: int, capacity: int, room: bool
) -> int:
    """Infer over one section: raise its floor and the buffers that cannot be lowest.

    Return -1 when it does not fit, 1 when some reach rose, else 0. Without room on the trail, only
    check whether the section fits.
    """
    begin, end = instance.member_start[section], instance.member_start[section + 1]
    state.counters[WORK] += 3 * (end - begin)
    highest_start = capacity - state.remaining[section]
    lowest, least_top, highest = INFINITE, INFINITE, np.int64(-1)
    for k in range(begin, end):
        other = np.uintp(instance.members[k])
        if state.offset[other] < 0:
            reach = state.reach[other]
            lowest, highest = min(lowest, reach), max(highest, reach)
            if reach <= highest_start:
                least_top = min(least_top, reach + instance.size[other])
    if room and lowest > state.floor[section]:
        _push(state, trail, FLOOR, section, state.floor[section])
        state.floor[section] = lowest
    if lowest > highest_start:
        return -1
    if not room or highest <= highest_start:
        return 0
    rose = 0
    for k in range(begin, end):
        other = np.uintp(instance.members[k])
        if state.offset[other] < 0 and highest_start < state.reach[other] < least_top:
            _push(state, trail, REACH, other, state.reach[other])
            step = instance.alignment[other]
            state.reach[other] = -(-least_top // step) * step
            state.counters[WORK] += instance.last[other] - instance.first[other]
            for inner in range(instance.first[other], instance.last[other]):
                state.touched[inner] = 1
            rose = 1
    return rose


@compiled_as_numpy
def _propagate(
    instance: Instance, state: State, trail: Ints, low: int, high: int, capacity: int
) -> bool:
    """Infer over the touched sections of [low, high) to a fixed point; False: they cannot fit."""
    again, fits = True, True
    while again:
        again = False
        state.counters[WORK] += high - low
        for section in range(low, high):
            if not state.touched[section]:
                continue
            state.touched[section] = 0
            # Each inference adds at most one entry per member and one floor.
            room = trail.shape[0] - state.counters[TRAIL_COUNT] > 2 * instance.size.shape[0]
            if fits and state.remaining[section] > 0:
                outcome = _infer(instance, state, trail, section, capacity, room)
                fits = outcome >= 0
                again = again or outcome > 0
    return fits


@compiled_as_numpy
def _split(state: State, low: int, high: int, owner: int) -> None:
    """Add the independent components of sections [low, high) to the pending list."""
    start = low
    for section in range(low, high):
        if section + 1 < high and state.crossing[section] > 0:
            continue
        for inner in range(start, section + 1):
            if state.remaining[inner] > 0:
                position = state.counters[PENDING_COUNT]
                state.pending[position, 0] = start
                state.pending[position, 1] = section + 1
                state.pending[position, 2] = owner
                state.counters[PENDING_COUNT] = position + 1
                break
        start = section + 1


@compiled_as_numpy
def _start(state: State, capacity: int) -> bool:
    """Set the search up; False when some section exceeds the capacity by itself."""
    for section in range(state.remaining.shape[0]):
        if state.remaining[section] > capacity:
            return False
    state.counters[DEPTH] = -1
    _split(state, 0, state.remaining.shape[0], -1)
    return True


@compiled_as_numpy
def _descend(state: State) -> None:
    """Open the next pending component as a new level."""
    state.counters[PENDING_COUNT] -= 1
    position = state.counters[PENDING_COUNT]
    depth = state.pending[position, 2] + 1
    state.frames[depth, LOW] = state.pending[position, 0]
    state.frames[depth, HIGH] = state.pending[position, 1]
    state.frames[depth, TRAIL] = state.counters[TRAIL_COUNT]
    state.frames[depth, PENDING] = position
    state.counters[DEPTH] = depth


@compiled_as_numpy
def _backtrack(instance: Instance, state: State, trail: Ints, depth: int, capacity: int) -> bool:
    """Answer "above" at the deepest level that can; False when none can."""
    while depth >= 0:
        frame = state.frames[depth]
        _undo(instance, state, trail, frame[TRAIL])
        state.counters[PENDING_COUNT] = frame[PENDING]
        lifted = _lift(instance, state, trail, frame[CHOSEN])
        if lifted and _propagate(instance, state, trail, frame[LOW], frame[HIGH], capacity):
            frame[TRAIL] = state.counters[TRAIL_COUNT]
            state.counters[DEPTH] = depth
            return True
        depth -= 1
    return False


@compiled_as_numpy
def search(
    instance: Instance,
    state: State,
    trail: Ints,
    capacity: int,
    slack_weight: int,
    work_limit: int,
    node_limit: int,
) -> int:
    """Go on searching for about `work_limit` units of work, or until `node_limit` nodes in all.

    A fresh search has zero counters.
    `slack_weight` steers the choice of the next buffer, see `_select`; -1: slack is ignored.
    Returns FOUND (offsets are in `state.offset`), EXHAUSTED (no placement within `capacity`),
    STOPPED (call again to go on) or FULL (call again with a longer trail).
    """
    counters = state.counters
    if counters[NODES] == 0:
        if not _start(state, capacity):
            return EXHAUSTED
        if counters[PENDING_COUNT] == 0:
            return FOUND
        _descend(state)
    stop_at = counters[WORK] + work_limit
    while counters[WORK] < stop_at and counters[NODES] < node_limit:
        if trail.shape[0] - counters[TRAIL_COUNT] < 6 * instance.size.shape[0] + 8:
            return FULL
        counters[NODES] += 1
        depth = counters[DEPTH]
        low, high = state.frames[depth, LOW], state.frames[depth, HIGH]
        chosen = _select(instance, state, low, high, capacity, slack_weight)
        if chosen < 0:
            if not _backtrack(instance, state, trail, depth - 1, capacity):
                return EXHAUSTED
            continue
        state.frames[depth, CHOSEN] = chosen
        _place(instance, state, trail, chosen)
        if _propagate(instance, state, trail, low, high, capacity):
            _split(state, low, high, depth)
            if counters[PENDING_COUNT] == 0:
                return FOUND
            _descend(state)
        elif not _backtrack(instance, state, trail, depth, capacity):
            return EXHAUSTED
    return STOPPED
