"""Hand-made chains, and the instances of the NP-hardness proofs of Offloading."""

from __future__ import annotations

from collections.abc import Sequence

from memopt.models.chain import Chain, Stage
from memopt.models.device import Device
from tests.strategies.offload.oracle import paper_link


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


def three_partition(values: Sequence[int], parts: int) -> tuple[Chain, int, Device]:
    """Figure 2 as corrected: makespan 2·parts if and only if the values split into equal parts.

    |x_i| = u_i for i < 3m; u_F = 1 and the output empty for i = 3m + 2k, k < m;
    |x_{3m+2k+2}| = V; B_{3m} takes m. β = V, M = mV.
    """
    assert len(values) == 3 * parts
    total = sum(values)
    assert total % parts == 0
    v = total // parts
    first = len(values)
    sizes = [*values, *([0] * (2 * parts + 1))]
    for k in range(parts):
        sizes[first + 2 * k + 2] = v
    forward = [0.0] * len(sizes)
    for k in range(parts):
        forward[first + 2 * k] = 1.0
    backward = [0.0] * len(sizes)
    backward[first] = float(parts)
    sizes.append(0)
    stages = [stage(forward[i], backward[i], sizes[i + 1]) for i in range(len(sizes) - 1)]
    return Chain(sizes[0], stages), total, paper_link(v)


def two_partition(values: Sequence[int]) -> tuple[Chain, int, Device]:
    """Figure 3: makespan 2 with interruptions if and only if the values split into halves.

    F_n and B_n take 1, |x_{n+2}| = V; β = V, M = 2V.
    """
    v = sum(values) // 2
    n = len(values)
    sizes = [*values, 0, 0, v, 0, 0]
    times = [1.0 if i == n else 0.0 for i in range(n + 4)]
    stages = [stage(times[i], times[i], sizes[i + 1]) for i in range(n + 4)]
    return Chain(sizes[0], stages), 2 * v, paper_link(v)


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
