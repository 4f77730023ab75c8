"""Greedy placements: a portfolio of orders, first fit and best fit (and OLLA Function 5)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from memopt.passes.place.buffers import Ints, Layout


def pyramid(layout: Layout) -> Ints:
    """Nest buffers by OLLA Function 5, longest first, to be stacked from offset 0.

    Each next one is the longest whose lifetime lies within the previous one's. First and last use
    are those of the *chosen* buffer; as printed, the function takes the last one looked at.
    """
    chosen: list[int] = []
    duration = layout.duration
    inside = np.ones(len(layout), dtype=bool)
    while inside.any():
        # argmax takes the first of equals, so the result depends on the given order only.
        longest = int(np.argmax(np.where(inside, duration, -1)))
        chosen.append(longest)
        inside &= (layout.lower >= layout.lower[longest]) & (layout.upper <= layout.upper[longest])
        inside[chosen] = False
    return np.array(chosen, dtype=np.int64)


def orders(layout: Layout) -> Iterator[tuple[str, Ints]]:
    """Yield named orders: decreasing size, area, duration, fullest section; start; the pyramid."""
    duration = layout.duration
    yield "size", np.lexsort((-duration, -layout.size))
    yield "area", np.lexsort((-layout.size, -duration * layout.size))
    yield "duration", np.lexsort((-layout.size, -duration))
    yield "fullest", np.lexsort((-layout.size, -layout.fullest))
    yield "start", np.lexsort((-layout.size, layout.lower))
    stacked = pyramid(layout)
    rest = np.lexsort((-duration, -layout.size))
    yield "pyramid", np.concatenate((stacked, rest[~np.isin(rest, stacked)]))


def greedy_placement(
    layout: Layout, good_enough: int = 0, stop: Callable[[], bool] = lambda: False
) -> tuple[str, Ints]:
    """Return the best greedy placement: (its name, offsets).

    Args:
        layout: buffers of positive size.
        good_enough: stop at a peak of at most this many bytes.
        stop: checked between two orders; the first order is always tried.
    """
    from memopt.passes.place.greedy_kernels import place_in_order

    best: tuple[int, str, Ints] | None = None
    for name, order in orders(layout):
        for best_fit in (False, True):
            if best is not None and (best[0] <= good_enough or stop()):
                return best[1], best[2]
            offsets: Ints = place_in_order(order, *layout.columns, best_fit)
            peak = int((offsets + layout.size).max())
            if best is None or peak < best[0]:
                best = peak, f"{name}, {'best' if best_fit else 'first'} fit", offsets
    assert best is not None
    return best[1], best[2]


def promoted_placement(
    layout: Layout,
    target: int,
    *,
    rounds: int = 60,
    seed: int = 0,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[str, Ints]:
    """Return the best of repeated first fits: buffers ending above the target go earlier next time.

    Args:
        layout: buffers of positive size.
        target: bytes; a placement of at most this peak ends it.
        rounds: repetitions for each order of the portfolio.
        seed: of how much earlier a buffer goes.
        stop: checked between two repetitions.
    """
    from memopt.passes.place.greedy_kernels import place_in_order

    starts = [(name, np.argsort(order).astype(float)) for name, order in orders(layout)]
    rngs = [np.random.default_rng((seed, index)) for index in range(len(starts))]
    best_peak, best_name, best = np.iinfo(np.int64).max, "", np.zeros(0, dtype=np.int64)
    for _ in range(rounds):
        for (name, rank), rng in zip(starts, rngs, strict=True):
            offsets: Ints = place_in_order(np.argsort(rank, kind="stable"), *layout.columns, False)
            tops = offsets + layout.size
            if tops.max() < best_peak:
                best_peak, best_name, best = tops.max(), f"{name}, promoted", offsets
            if best_peak <= target or stop():
                return best_name, best
            above = np.flatnonzero(tops > target)
            # Some buffers go to the very front, the others part of the way.
            rank[above] *= 0.7 * rng.random(len(above))
            rank[above] -= rng.random(len(above)) < 0.3
    return best_name, best
