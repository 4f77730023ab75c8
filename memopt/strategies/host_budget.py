"""Applies a limit on host memory to any strategy that moves data."""

from __future__ import annotations

import dataclasses

from memopt.models.budget import parse_budget
from memopt.strategies.base import Strategy

FIELD = "host_budget_bytes"


def parse_host_budget(host_budget: int | str | None) -> int | None:
    """Parse bytes, or a string with a unit such as "6GiB", into bytes; 0 forbids every copy.

    Raises:
        ValueError: an unreadable or negative host budget.
    """
    if not isinstance(host_budget, int | str | None):
        raise ValueError(f"host_budget is bytes or a string such as '6GiB', got {host_budget!r}")
    is_zero = host_budget == 0 and not isinstance(host_budget, bool)
    try:
        return 0 if is_zero else parse_budget(host_budget, 1)
    except ValueError as error:
        raise ValueError(f"host_budget: {error}") from None


def host_limit(strategy: Strategy, host_budget_bytes: int | None) -> int | None:
    """Return the most bytes that a strategy's plans may have on the host at once: the smaller of
    its own limit, if it has one, and the caller's. None: no limit."""
    own: int | None = getattr(strategy, FIELD, None)
    limits = [limit for limit in (own, host_budget_bytes) if limit is not None]
    return min(limits, default=None)


def with_host_budget(strategy: Strategy, host_budget_bytes: int | None) -> Strategy:
    """Return the strategy under a host budget; unchanged if it moves nothing or there is none.

    Raises:
        ValueError: the strategy moves data and takes no host budget.
    """
    if host_budget_bytes is None or not strategy.features.offload:
        return strategy
    fields = {field.name for field in dataclasses.fields(strategy)}  # type: ignore[arg-type]  # strategies are dataclasses
    if FIELD not in fields:
        raise ValueError(
            f"{strategy.name} takes no host_budget; name a strategy that moves data itself, such "
            'as "offload-graph" or "dynprog"'
        )
    limit = {FIELD: host_limit(strategy, host_budget_bytes)}
    return dataclasses.replace(strategy, **limit)  # type: ignore[type-var]  # a dataclass
