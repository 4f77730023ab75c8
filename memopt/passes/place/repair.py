"""Local search for a placement within a capacity: attempts, their settings and limits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memopt.passes.place.buffers import Ints, Layout
from memopt.passes.place.search import Outcome, luby

if TYPE_CHECKING:
    from memopt.passes.place.repair_kernels import Buffers

EXPONENTS = (0.6, 0.4, 0.5, 0.75)
"""Exponents of a buffer's area (bytes times sections) in its first weight, attempt by attempt."""
TENURES = (0, 1)
"""Moves for which a buffer just placed is expensive to eject."""
GRIDS = (None, 32, 128, 1)
"""A power of two that divides a size also divides its offset, up to this part of the bound; None:
no such rule. Where memory is full most of the time, as with many transfers, buffers of equal sizes
in the same places leave fewer holes between them."""
HEAVIEST = 1_000_000
"""The first weight of the buffer with the largest area."""
STACK_EXPONENTS = ((0.6, 0.6), (0.4, 0.4), (0.5, 0.0), (0.5, 0.25))
"""Exponents of a buffer's bytes and sections in its first weight, when results are stacked."""
STACK_GRIDS = GRIDS[:3]
STACKED_SHARE, LARGEST_SHARE = 0.15, 0.1
"""Results are stacked if they are at least this share of the bound, and each at most that share."""
FEWEST_STACKED = 100
"""Fewer results are not stacked: a few dozen can be placed with the other buffers."""
WORK_PER_OVERLAP = 800
"""Units of work of the shortest attempts, for each pair of buffers that overlap: enough to move
every buffer about 12 times; few buffers need it."""
MOST_WORK = 300_000_000
"""Work limit of the longest attempts, some tenths of a second."""


def repaired_placement(
    layout: Layout,
    capacity: int,
    *,
    seed: int = 0,
    turn: int = 0,
    work_limit: int | None = None,
    stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Search for a placement of peak ≤ `capacity` bytes. It proves nothing.

    Attempts begin with nothing placed (good placements above the capacity are worse starts) or,
    every other one, above `stacked_results`. Settings take turns; lengths follow Luby's sequence.

    Args:
        layout: buffers of positive size.
        capacity: bytes.
        seed: of the random choices.
        turn: how often this was tried before.
        work_limit: units of work in all (about 10⁹ in some seconds); None: no limit.
        stop: checked every few tenths of a second.
    """
    from memopt.passes.place.repair_kernels import repair

    if layout.bound > capacity:
        return Outcome(None, True, 0, 0)
    problems = [_Problem(layout, capacity, np.full(len(layout), -1, dtype=np.int64))]
    stacked = stacked_results(layout)
    if stacked is not None:
        above = _Problem(layout, capacity, stacked)
        problems += [above] if above.fits() else []
    choices = _settings(problems)
    settings = itertools.islice(itertools.cycle(choices), turn % len(choices), None)
    base = WORK_PER_OVERLAP * (len(layout.overlaps[1]) + 1)
    rng = np.array([np.random.default_rng((seed, turn)).integers(1, 2**31 - 1)], dtype=np.int64)
    work = 0
    for attempt in itertools.count(1):
        most = min(base * luby(attempt), MOST_WORK)
        left = most if work_limit is None else min(most, work_limit - work)
        if left <= 0 or stop():
            return Outcome(None, False, 0, work)
        setting = next(settings)
        offset = np.empty(len(setting.problem.chosen), dtype=np.int64)
        work += repair(*setting.arguments(), offset, rng, capacity, setting.tenure, left)
        if offset.min(initial=0) >= 0:
            return Outcome(setting.problem.completed(offset), False, 0, work)
    raise AssertionError("endless")


class _Problem:
    """The buffers that attempts place: those that are not in the stack, above it. `stacked` has the
    offsets of the stacked ones and -1 for the others."""

    def __init__(self, layout: Layout, capacity: int, stacked: Ints) -> None:
        self.layout = layout
        self.capacity = capacity
        self.stacked = stacked
        self.chosen: Ints = np.flatnonzero(stacked < 0)
        self.size = layout.size[self.chosen]
        self.sections = (layout.last - layout.first)[self.chosen].astype(float)
        self.floor = _floor(layout, stacked)[self.chosen]

    def fits(self) -> bool:
        """Tell whether the stack, and each buffer alone above it, is within the capacity."""
        top = (self.stacked + self.layout.size)[self.stacked >= 0].max(initial=0)
        alone = _up(self.floor, self.layout.alignment[self.chosen]) + self.size
        return int(max(top, alone.max(initial=0))) <= self.capacity

    @cached_property
    def overlaps(self) -> tuple[Ints, Ints]:
        """Return `Layout.overlaps` of the chosen buffers."""
        start, other = self.layout.overlaps
        if len(self.chosen) == len(self.layout):
            return start, other
        number = np.full(len(self.layout), -1, dtype=np.int64)
        number[self.chosen] = np.arange(len(self.chosen))
        owner = np.repeat(number, np.diff(start))
        kept = (owner >= 0) & (number[other] >= 0)
        counts = np.bincount(owner[kept], minlength=len(self.chosen))
        return np.concatenate(([0], np.cumsum(counts))), number[other[kept]]

    def buffers(self, grid: int | None) -> Buffers:
        """Return the compiled search's buffers, on a grid (see `GRIDS`) where that leaves room."""
        from memopt.passes.place.repair_kernels import Buffers

        own, step = self.layout.alignment[self.chosen], _on_grid(self.layout, grid)[self.chosen]
        room = self.capacity - self.size
        step = np.where(_up(self.floor, step) <= room, step, own)
        return Buffers(self.size, step, _up(self.floor, step), *self.overlaps)

    def completed(self, offset: Ints) -> Ints:
        """Return offsets of all buffers of the layout."""
        found = self.stacked.copy()
        found[self.chosen] = offset
        return found


@dataclass
class _Setting:
    """The settings of an attempt: first weights are products of powers of a buffer's bytes and its
    number of sections (`exponents`); a placed buffer is expensive to eject for `tenure` moves;
    `grid` is the part of the bound of which offsets are multiples, see `GRIDS`."""

    problem: _Problem
    exponents: tuple[float, float]
    tenure: int
    grid: int | None

    def arguments(self) -> tuple[Buffers, Ints]:
        """Return (buffers, first weights) for the compiled search."""
        of_bytes, of_sections = self.exponents
        area = self.problem.size * self.problem.sections ** (of_sections / of_bytes)
        weight: Ints = (1 + HEAVIEST * (area / area.max(initial=1)) ** of_bytes).astype(np.int64)
        return self.problem.buffers(self.grid), weight


def _settings(problems: list[_Problem]) -> list[_Setting]:
    """Return the settings of attempts; those above a stack alternate with the others."""
    free = [
        _Setting(problems[0], (exponent, exponent), tenure, grid)
        for exponent, tenure, grid in itertools.product(EXPONENTS, TENURES, GRIDS)
    ]
    if len(problems) == 1:
        return free
    choices = itertools.product(reversed(TENURES), STACK_EXPONENTS, STACK_GRIDS)
    stacked = itertools.cycle(
        [_Setting(problems[1], exponents, tenure, grid) for tenure, exponents, grid in choices]
    )
    return [setting for pair in zip(free, stacked, strict=False) for setting in pair]


def stacked_results(layout: Layout) -> Ints | None:
    """Stack the results, which live to the end, in the order of their births; return their offsets,
    and -1 for all other buffers. None if there are few results.

    Results of a step (mostly gradients) are never freed: one in the middle of the arena divides the
    free memory for good, a stack leaves it in one piece.
    """
    size = layout.size
    results = (layout.last == layout.sections) & (layout.first < layout.sections - 1)
    results &= size <= LARGEST_SHARE * layout.bound
    many = np.count_nonzero(results) >= FEWEST_STACKED
    if not many or size[results].sum() < STACKED_SHARE * layout.bound:
        return None
    offset = np.full(len(layout), -1, dtype=np.int64)
    top = 0
    for buffer in np.argsort(layout.lower, kind="stable"):
        if results[buffer]:
            step = int(layout.alignment[buffer])
            offset[buffer] = -(-top // step) * step
            top = int(offset[buffer] + size[buffer])
    return offset


def _up(offset: Ints, step: Ints) -> Ints:
    """Return the next multiples of `step`."""
    return -(-offset // step) * step


def _floor(layout: Layout, stacked: Ints) -> Ints:
    """Return for each buffer the top of the stack while it lives; the stack only grows."""
    results = np.flatnonzero(stacked >= 0)
    results = results[np.argsort(stacked[results])]
    tops = np.concatenate(([0], (stacked + layout.size)[results]))
    return tops[np.searchsorted(layout.first[results], layout.last, side="left")]


def _on_grid(layout: Layout, part: int | None) -> Ints:
    """Return alignments on the grid (see `GRIDS`), each a multiple of the layout's own."""
    if part is None:
        return layout.alignment
    largest = 1 << max(0, (layout.bound // part).bit_length() - 1)
    grid = np.minimum(layout.size & -layout.size, largest)
    return np.where(grid % layout.alignment == 0, grid, layout.alignment)
