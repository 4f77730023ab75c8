"""Checks of numbers, shared by the frozen dataclasses of the cost model.

Limits keep sums of sizes exact in floats and 64-bit integers, and keep sums of times, and a
solver's products of two times, from overflowing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

MOST_BYTES = 2**53
"""Limit of all sizes of a cost model together: 8 PiB, up to which floats are exact."""
MOST_SECONDS = 1e15
"""Limit of all times of a cost model together."""
LEAST_RATE = 1e-9
"""Least rate of a device, bytes or operations per second."""


def check_bytes(owner: str, **values: int) -> None:
    """Raise ValueError unless every value is a non-negative whole number of bytes."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise ValueError(f"{owner}: {name} must be a whole number of bytes, got {value!r}")
        if value < 0:
            raise ValueError(f"{owner}: {name} must be at least 0 bytes, got {value}")


def check_seconds(owner: str, **values: float) -> None:
    """Raise ValueError unless every value is a finite, non-negative number of seconds."""
    for name, value in values.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if not number or not math.isfinite(value) or value < 0:
            raise ValueError(
                f"{owner}: {name} must be a finite number of seconds, at least 0, got {value!r}"
            )


def check_rate(owner: str, name: str, value: float) -> None:
    """Raise ValueError unless a rate, per second, is positive and large enough that times computed
    from it do not overflow; it may be infinite."""
    if isinstance(value, bool) or not isinstance(value, Real) or not value > 0:
        raise ValueError(f"{owner}: {name} must be positive, got {value!r}")
    if value < LEAST_RATE:
        raise ValueError(f"{owner}: {name} must be at least {LEAST_RATE:g} per second: {value!r}")


def check_figures(
    record: Any, kind: str, sizes: Iterable[str] = (), times: Iterable[str] = ()
) -> None:
    """Check a frozen record's sizes and times, and convert them to Python's own numbers, whose sums
    are exact: those of NumPy wrap around. Messages name its kind and, if it has one, its name.

    Raises:
        ValueError: see `check_bytes` and `check_seconds`.
    """
    for name in sizes:
        value = getattr(record, name)
        if type(value) is int and value >= 0:
            continue  # nearly all of them; models have a hundred thousand
        check_bytes(_owner(record, kind), **{name: value})
        if type(value) is not int:
            object.__setattr__(record, name, int(value))
    for name in times:
        value = getattr(record, name)
        if type(value) in (int, float) and 0 <= value < math.inf:
            continue
        check_seconds(_owner(record, kind), **{name: value})
        if type(value) not in (int, float):
            object.__setattr__(record, name, float(value))


def _owner(record: Any, kind: str) -> str:
    name = getattr(record, "name", "")
    return f"{kind} {name!r}" if name else kind


def check_sums(owner: str, sizes: Iterable[int], times: Iterable[float]) -> None:
    """Raise ValueError if the figures of a whole cost model are too large to add up."""
    total_bytes, total_s = sum(sizes), sum(times)
    if total_bytes > MOST_BYTES:
        raise ValueError(
            f"{owner}: its sizes add up to {total_bytes} bytes, and at most {MOST_BYTES} (8 PiB) "
            "can be planned; are they in bytes?"
        )
    if not total_s <= MOST_SECONDS:
        raise ValueError(
            f"{owner}: its times add up to {total_s:g} s, and at most {MOST_SECONDS:g} can be "
            "planned; are they in seconds?"
        )


def check_time_limit(time_limit_s: object) -> None:
    """Raise ValueError unless a time limit is None or a finite number of seconds, at least 0."""
    if time_limit_s is None:
        return
    number = isinstance(time_limit_s, Real) and not isinstance(time_limit_s, bool)
    if not number or not 0 <= float(time_limit_s) < math.inf:  # type: ignore[arg-type]
        raise ValueError(
            f"time_limit_s must be a finite number of seconds, at least 0, or None for no limit, "
            f"got {time_limit_s!r}"
        )
