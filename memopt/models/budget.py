"""Budgets as users write them: bytes, shares of the baseline's peak, "6GiB", "min"."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral
from typing import TypeAlias

from memopt.models.checks import MOST_BYTES, check_time_limit

_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]+)\s*")
_SHARE = re.compile(r"\d*\.\d+")
_HINT = (
    "a budget is a whole number of bytes, a share of the baseline peak in (0, 1] such as 0.5, "
    'a string with a unit such as "6GiB" (2^30) or "6GB" (10^9), "min", or None for no limit; '
    '"6GiB reserved" limits what CUDA\'s caching allocator reserves'
)

MINIMUM = "min"
RESERVED = "reserved"

WrittenBudget: TypeAlias = int | float | str | None
"""A budget as users write it; `parse_budget` converts it to bytes."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that a plan may take.

    Attributes:
        device_bytes: on the device, in all, resident memory included; None: no limit.
        host_bytes: on the host at once, for tensors that were moved there; None: no limit.
    """

    device_bytes: int | None = None
    host_bytes: int | None = None


NO_LIMIT = Budget()


def parse_budget(budget: object, baseline_peak_bytes: int) -> int | None:
    """Return a budget in bytes; None: no limit. `"min"` is not handled here (it needs a strategy).

    Args:
        budget: the value that the user passed.
        baseline_peak_bytes: peak of the unplanned step, for shares.

    Raises:
        ValueError: it cannot be read; the message lists valid forms.
    """
    if budget is None:
        return None
    if isinstance(budget, str) and _SHARE.fullmatch(budget):
        budget = float(budget)
    if isinstance(budget, str) and budget.strip().isdecimal():
        budget = int(budget)
    if isinstance(budget, str):
        match = _SIZE.fullmatch(budget)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"cannot read the budget {budget!r}: {_HINT}")
        return _whole(math.floor(Fraction(match[1]) * _UNITS[match[2].lower()]), budget)
    if isinstance(budget, bool) or not isinstance(budget, (Integral, float)):
        raise ValueError(f"cannot read the budget {budget!r}: {_HINT}")
    if isinstance(budget, Integral):
        if int(budget) <= 0:
            raise ValueError(f"the budget must be positive, got {budget} bytes: {_HINT}")
        return _whole(int(budget), budget)
    if not 0 < budget <= 1:
        raise ValueError(f"the budget {budget!r} is neither bytes nor a share in (0, 1]: {_HINT}")
    return math.floor(float(budget) * baseline_peak_bytes)


def is_share(budget: object) -> bool:
    """Return whether a budget, as the user passed it, is a share of the baseline's peak."""
    return isinstance(budget, float) or (isinstance(budget, str) and bool(_SHARE.fullmatch(budget)))


def _whole(budget_bytes: int, written: object) -> int:
    if budget_bytes > MOST_BYTES:
        raise ValueError(
            f"the budget {written!r} is more than {MOST_BYTES} bytes (8 PiB), which nothing that "
            "can be planned needs: pass None for no limit"
        )
    return budget_bytes


def check_budget(budget: object, time_limit_s: object = None) -> None:
    """Refuse a budget or a time limit that cannot be read, before the work and not after it.

    Raises:
        ValueError: as `parse_budget` and `check_time_limit`.
    """
    check_time_limit(time_limit_s)
    budget, of_reserved = split_reserved(budget)
    parse_budget(None if budget == MINIMUM and not of_reserved else budget, 1)


def split_reserved(budget: object) -> tuple[object, bool]:
    """Return a budget without the word "reserved", and whether it had it: "6GiB reserved" limits
    what CUDA's caching allocator reserves, "6GiB" what is allocated."""
    if isinstance(budget, str):
        size, _, word = budget.strip().rpartition(" ")
        if word.lower() == RESERVED:
            return int(size) if size.isdecimal() else size.strip(), True
    return budget, False


def format_bytes(size_bytes: float) -> str:
    """Format bytes for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.2f} TiB"


def exact_bytes(size_bytes: int) -> str:
    """Format bytes for messages, exactly and in binary units."""
    return f"{size_bytes} bytes ({format_bytes(size_bytes)})"
