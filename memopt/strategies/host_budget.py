"""A limit on host memory, given to whatever strategy moves data."""

from __future__ import annotations

import dataclasses

from memopt.models.budget import parse_budget
from memopt.strategies.base import Strategy

FIELD = "host_budget_bytes"


def host_limit_bytes(strategy: Strategy) -> int | None:
    """The most that the strategy's plans may have on the host at once; None: no limit."""
    limit = getattr(strategy, FIELD, None)
    return limit if isinstance(limit, int) else None


def with_host_budget(strategy: Strategy, host_budget: int | str | None) -> Strategy:
    """The strategy under a host budget; unchanged if it moves nothing or there is none.

    Args:
        strategy: any.
        host_budget: bytes, or a string with a unit such as "6GiB"; 0 forbids every copy.

    Raises:
        ValueError: an unreadable or negative host budget, or a strategy that moves data and
            takes none.
    """
    if host_budget is None:
        return strategy
    if isinstance(host_budget, float):
        raise ValueError(f"host_budget is bytes or a string such as '6GiB', got {host_budget!r}")
    is_zero = host_budget == 0 and not isinstance(host_budget, bool)
    try:
        size_bytes = 0 if is_zero else parse_budget(host_budget, 1)
    except ValueError as error:
        raise ValueError(f"host_budget: {error}") from None
    if "offload" not in strategy.features:
        return strategy
    fields = {field.name for field in dataclasses.fields(strategy)}  # type: ignore[arg-type]  # strategies are dataclasses
    if FIELD not in fields:
        raise ValueError(
            f"{strategy.name} takes no host_budget; name a strategy that moves data itself, such "
            'as "offload-graph" or "dynprog"'
        )
    return dataclasses.replace(strategy, **{FIELD: size_bytes})  # type: ignore[type-var]  # a dataclass
