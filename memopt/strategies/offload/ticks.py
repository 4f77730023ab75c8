"""Whole ticks of time for the exact model."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from memopt.strategies.offload.problem import OffloadProblem

LARGEST_DENOMINATOR = 10**4
LARGEST_HORIZON = 10**7


@dataclass(frozen=True)
class Ticks:
    """Durations in ticks, rounded up where they are no multiples of one.

    Attributes:
        tick_s: length of a tick, seconds.
        durations: of the 2n operations.
        out: of the copy of each x_j to the host.
        back: of each copy back.
        exact: whether nothing was rounded.
    """

    tick_s: float
    durations: tuple[int, ...]
    out: tuple[int, ...]
    back: tuple[int, ...]
    exact: bool

    def up(self, time_s: float) -> int:
        """The first tick not before a time."""
        return _ceil(time_s / self.tick_s)

    def lower_s(self, ticks: int, events: int) -> float:
        """A bound in ticks as a bound in seconds: a path has at most `events` rounded times."""
        return (ticks if self.exact else ticks - events) * self.tick_s


def choose_ticks(problem: OffloadProblem, horizon_s: float, resolution: int) -> Ticks:
    """Ticks in which all times are whole, if there are few enough of them; else horizon/resolution.

    Args:
        problem: operations and link.
        horizon_s: a makespan that is known.
        resolution: ticks in the horizon when times have to be rounded.
    """
    operations = problem.durations_s.tolist()
    out = [problem.latency_s + x / problem.to_host_bytes_per_s for x in problem.sizes.tolist()]
    back = [problem.latency_s + x / problem.from_host_bytes_per_s for x in problem.sizes.tolist()]
    common = _common_tick([*operations, *out, *back])
    exact = common is not None and horizon_s / common <= LARGEST_HORIZON
    tick_s = common if exact and common is not None else max(horizon_s, 1e-12) / resolution
    return Ticks(
        tick_s,
        tuple(_ceil(x / tick_s) for x in operations),
        tuple(_ceil(x / tick_s) for x in out),
        tuple(_ceil(x / tick_s) for x in back),
        exact,
    )


def _common_tick(times_s: list[float]) -> float | None:
    """The largest time of which all are multiples; None if they are no small fractions."""
    fractions = [Fraction(time_s).limit_denominator(LARGEST_DENOMINATOR) for time_s in times_s]
    for fraction, time_s in zip(fractions, times_s, strict=True):
        if abs(float(fraction) - time_s) > 1e-12 * max(1.0, time_s):
            return None
    denominator = math.lcm(*(fraction.denominator for fraction in fractions))
    if denominator > 10**9:
        return None
    numerator = math.gcd(*(int(fraction * denominator) for fraction in fractions))
    return numerator / denominator if numerator else None


def _ceil(value: float) -> int:
    """Rounded up, but a value that is whole up to rounding errors stays."""
    return math.ceil(value - 1e-6)
