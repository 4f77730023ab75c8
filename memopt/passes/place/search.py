"""Depth-first search for a placement within a capacity: preferences, restarts, limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from memopt.passes.place.buffers import Ints, Layout
from memopt.programs.lifetimes import live_bytes

if TYPE_CHECKING:
    from memopt.passes.place.search_kernels import Instance, State

PREFERENCES = ("WAT", "TWA", "A", "BT", "TAW")
"""Orders of preference of buffers: by decreasing lifetime W, area A, bytes of the fullest section T
(letters of the minimalloc paper), area counted in sections B."""
SLACK_WEIGHTS = (0, 4, -1)
"""Weights of a section's slack against a low offset, in quarters; -1: slack is ignored."""

NODES_PER_BUFFER = 8
"""Nodes of the shortest attempts; a placement found without backtracking takes one per buffer."""
RANDOM_PER_FIXED = 5
CHUNK_WORK = 30_000_000
"""Work between two looks at the clock, some tenths of a second."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a search at a capacity.

    Attributes:
        offsets: one per buffer of the layout, or None.
        infeasible: proved that no placement fits.
        nodes: decisions tried.
        work: units of work spent.
    """

    offsets: Ints | None
    infeasible: bool
    nodes: int
    work: int


def find_placement(
    layout: Layout,
    capacity: int,
    *,
    seed: int = 0,
    turn: int = 0,
    work_limit: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Search for a placement of peak ≤ `capacity` bytes.

    Restarts with growing limits alternate between fixed and random preferences, so a bad start
    costs little; a proof that there is none comes from any of them.

    Args:
        layout: buffers of positive size.
        capacity: bytes.
        seed: of the random preferences.
        turn: how often this was tried before; later turns start with longer attempts and other
            random preferences.
        work_limit: units of work in all (about 10⁹ per second or two); None: no limit.
        stop: looked at every few tenths of a second.
    """
    if layout.bound > capacity:
        return Outcome(None, True, 0, 0)
    nodes = work = 0
    for order, weight, limit in _attempts(layout, np.random.default_rng((seed, turn)), turn):
        left = None if work_limit is None else work_limit - work
        if (left is not None and left <= 0) or stop():
            break
        outcome = _attempt(layout, order, weight, capacity, limit, left, stop)
        nodes += outcome.nodes
        work += outcome.work
        if outcome.offsets is not None or outcome.infeasible:
            return Outcome(outcome.offsets, outcome.infeasible, nodes, work)
    return Outcome(None, False, nodes, work)


def _attempts(
    layout: Layout, rng: np.random.Generator, turn: int
) -> Iterator[tuple[Ints, int, int]]:
    """Yield (order of preference, slack weight, node limit) endlessly.

    Each round tries every fixed preference once, with a limit that doubles from round to round.
    Random preferences come between them and get more nodes in all: short ones, whose luck has a
    heavy tail, and among them longer ones by Luby's sequence.
    """
    keys = _keys(layout)
    base = NODES_PER_BUFFER * len(layout)
    lucky = itertools.count(1)
    for round_ in itertools.count(turn):
        for letters, weight in itertools.product(PREFERENCES, SLACK_WEIGHTS):
            order = np.lexsort([-keys[letter] for letter in reversed(letters)])
            yield order, weight, 2 * base << round_
            for _ in range(max(RANDOM_PER_FIXED, 2 << round_)):
                exponents = rng.random(3) * (1.0, 1.0, 4.0)
                score = sum(
                    exponent * np.log(keys[letter])
                    for exponent, letter in zip(exponents, "ZNT", strict=True)
                )
                weight = int(rng.choice((0, 2, 4, 5, 8)))
                attempt = next(lucky)
                limit = base if attempt % 4 else base * luby(attempt // 4)
                yield np.argsort(-np.asarray(score), kind="stable"), weight, limit


def luby(index: int) -> int:
    """Return Luby's sequence 1, 1, 2, 1, 1, 2, 4, 1, ... for index 1, 2, 3, ..."""
    while index & (index + 1):
        index -= (1 << (index.bit_length() - 1)) - 1
    return (index + 1) >> 1


def _keys(layout: Layout) -> dict[str, Ints]:
    sections = layout.last - layout.first
    return {
        "W": layout.duration,
        "A": layout.duration * layout.size,
        "B": sections * layout.size,
        "T": layout.fullest,
        "Z": layout.size,
        "N": sections,
    }


def _attempt(
    layout: Layout,
    order: Ints,
    weight: int,
    capacity: int,
    node_limit: int,
    work_limit: int | None,
    stop: Callable[[], bool],
) -> Outcome:
    """Search once with one order of preference, in chunks."""
    from memopt.passes.place import search_kernels as kernels

    instance, state = _fresh(layout, order)
    trail = np.zeros((16 * len(layout) + 1024, 3), dtype=np.int64)
    counters = state.counters
    while True:
        work = CHUNK_WORK
        if work_limit is not None:
            work = min(work, work_limit - int(counters[kernels.WORK]))
        code = kernels.search(instance, state, trail, capacity, weight, work, node_limit)
        if code == kernels.FULL:
            trail = np.concatenate((trail, np.zeros_like(trail)))
            continue
        nodes, done = int(counters[kernels.NODES]), int(counters[kernels.WORK])
        if code == kernels.FOUND:
            offsets = np.empty_like(state.offset)
            offsets[order] = state.offset
            return Outcome(offsets, False, nodes, done)
        if code == kernels.EXHAUSTED:
            return Outcome(None, True, nodes, done)
        if nodes >= node_limit or (work_limit is not None and done >= work_limit) or stop():
            return Outcome(None, False, nodes, done)


def _fresh(layout: Layout, order: Ints) -> tuple[Instance, State]:
    """Make the kernel's arrays, buffers renumbered in order of preference."""
    from memopt.passes.place import search_kernels as kernels

    count, sections = len(layout), layout.sections
    ordered = layout.reordered(order)
    ones = np.ones(count, dtype=np.int64)
    instance = kernels.Instance(
        *ordered.columns, ordered.twins, *ordered.overlaps, *ordered.members
    )
    state = kernels.State(
        counters=np.zeros(kernels.COUNTERS, dtype=np.int64),
        frames=np.zeros((count + 2, kernels.FRAME_FIELDS), dtype=np.int64),
        pending=np.zeros((count + sections + 2, 3), dtype=np.int64),
        touched=np.zeros(sections, dtype=np.int64),
        offset=np.full(count, -1, dtype=np.int64),
        least=np.zeros(count, dtype=np.int64),
        reach=np.zeros(count, dtype=np.int64),
        floor=np.zeros(sections, dtype=np.int64),
        remaining=ordered.section_bytes.copy(),
        crossing=live_bytes(ordered.first, ordered.last - 1, ones, sections),
    )
    return instance, state
