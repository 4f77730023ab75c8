"""Finds the largest size (batch, sequence) whose step fits: memory is nearly affine in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping


def largest_size(
    needed: Callable[[int], int],
    first: int,
    limit_bytes: int,
    may_try: Callable[[int], bool],
    known: Mapping[int, int],
) -> tuple[int | None, bool]:
    """Find the largest size that fits, and whether it is proved, by secant search.

    Args:
        needed: the bytes that a size needs.
        first: a size to begin with.
        limit_bytes: what fits.
        may_try: whether one more size may be tried.
        known: bytes of sizes that are known already, the first among them or not.

    Returns:
        The size, None if none fits; and whether one more was found not to fit.
    """
    sizes = dict(known) or {first: needed(first)}
    while True:
        fitting = [one for one, size in sizes.items() if size <= limit_bytes]
        failing = [one for one, size in sizes.items() if size > limit_bytes]
        low, high = max(fitting, default=0), min(failing, default=None)
        if high == low + 1:
            return (low or None), bool(low)
        following = _guess(sizes, low, high, limit_bytes)
        if not may_try(following):
            return (low or None), False
        sizes[following] = needed(following)


def _guess(sizes: dict[int, int], low: int, high: int | None, limit_bytes: int) -> int:
    """Return the next size to try, strictly between low and high."""
    if len(sizes) == 1:
        (only,) = sizes
        return 2 * only if high is None else max(1, only // 2)
    near = sorted(sizes, key=lambda one: abs(sizes[one] - limit_bytes))[:2]
    slope = (sizes[near[0]] - sizes[near[1]]) / (near[0] - near[1])
    guess = 2 * low
    if slope > 0:
        guess = int(near[0] + (limit_bytes - sizes[near[0]]) / slope)
    if guess == low:
        # The secant names low as the largest: try one more, to prove it.
        guess = low + 1
    upper = 4 * low if high is None else high - 1
    return max(low + 1, min(guess, upper))
