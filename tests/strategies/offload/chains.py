"""Hand-made chains, and whether values split into sets of equal sum."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.models.chain import Chain, Stage


def stage(
    forward_s: float,
    backward_s: float,
    x: int,
    *,
    y: int = 0,
    ex_f: int = 0,
    ex_b: int = 0,
    g: int = 0,
) -> Stage:
    return Stage(forward_s, backward_s, x, x, y, ex_f, None, ex_b, g)


def three_stages() -> Chain:
    """x = 4, 3, 2, 0; all operations take 1 s; M_peak = 9 + ex^B_2 = 10.

    F_2 and B_2 need 9 and 10 bytes; F_1 and B_1 9; F_0 and B_0 7. Only x_0 and x_1 may move.
    """
    return Chain(4, [stage(1, 1, 3), stage(1, 1, 2), stage(1, 1, 0, ex_b=1)])


def splits(values: Sequence[int], parts: int) -> bool:
    """Whether the values fall into `parts` sets of equal sum, by search."""
    target, rest = divmod(sum(values), parts)
    if rest:
        return False
    bins = [0] * parts

    def place(i: int) -> bool:
        if i == len(values):
            return True
        tried = set()
        for b in range(parts):
            if bins[b] + values[i] <= target and bins[b] not in tried:
                tried.add(bins[b])
                bins[b] += values[i]
                if place(i + 1):
                    return True
                bins[b] -= values[i]
        return False

    return place(0)
