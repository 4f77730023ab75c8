"""Local search for a placement within a capacity: attempts, their settings and limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np

from memopt.strategies.olla.buffers import Ints, Layout
from memopt.strategies.olla.search import Outcome, luby

EXPONENTS = (0.6, 0.4, 0.5, 0.75)
"""Of a buffer's area, bytes times sections, in its first weight, one attempt after another."""
TENURES = (0, 1)
"""Moves for which a buffer just placed is dear to eject."""
GRIDS = (None, 32, 128, 1)
"""Powers of two that divide a size divide its offset, too, up to this part of the bound; None: they
need not. Where the memory is full most of the time, as with much moved in and out, buffers of
equal sizes in the same places leave fewer gaps between them."""
HEAVIEST = 1_000_000
"""The first weight of the buffer with the largest area."""
WORK_PER_OVERLAP = 800
"""Units of work of the shortest attempts, for each pair of buffers that overlap: enough for every
buffer to move about 12 times; few do."""

MOST_WORK = 300_000_000
"""Of an attempt, some tenths of a second."""


def repaired_placement(
    layout: Layout,
    capacity: int,
    *,
    seed: int = 0,
    turn: int = 0,
    work_limit: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Search for a placement of peak ≤ `capacity` bytes.

    It proves nothing. Attempts begin with nothing placed (good placements above the capacity are
    worse to begin with), with settings in turn and lengths by Luby's sequence.

    Args:
        layout: buffers of positive size.
        capacity: bytes.
        seed: of the random choices.
        turn: how often this was tried before.
        work_limit: units of work in all (about 10⁹ in some seconds); None: no limit.
        stop: looked at every few tenths of a second.
    """
    from memopt.strategies.olla.repair_kernels import Buffers, repair

    if layout.bound > capacity:
        return Outcome(None, True, 0, 0)
    grids = [Buffers(layout.size, _on_grid(layout, part), *layout.overlaps) for part in GRIDS]
    area = layout.size * (layout.last - layout.first).astype(float)
    base = WORK_PER_OVERLAP * (len(grids[0].overlaps) + 1)
    rng = np.array([np.random.default_rng((seed, turn)).integers(1, 2**31 - 1)], dtype=np.int64)
    offset = np.full(len(layout), -1, dtype=np.int64)
    choices = list(itertools.product(EXPONENTS, TENURES, grids))
    settings = itertools.islice(itertools.cycle(choices), turn % len(choices), None)
    work = 0
    for attempt in itertools.count(1):
        most = min(base * luby(attempt), MOST_WORK)
        left = most if work_limit is None else min(most, work_limit - work)
        if left <= 0 or stop():
            return Outcome(None, False, 0, work)
        exponent, tenure, buffers = next(settings)
        weight = (1 + HEAVIEST * (area / area.max()) ** exponent).astype(np.int64)
        work += repair(buffers, weight, offset, rng, capacity, tenure, left)
        if offset.min() >= 0:
            return Outcome(offset, False, 0, work)
    raise AssertionError("endless")


def _on_grid(layout: Layout, part: int | None) -> Ints:
    """Alignments for which placements are valid for the layout's own, see `GRIDS`."""
    if part is None:
        return layout.alignment
    largest = 1 << max(0, (layout.bound // part).bit_length() - 1)
    grid = np.minimum(layout.size & -layout.size, largest)
    return np.where(grid % layout.alignment == 0, grid, layout.alignment)
