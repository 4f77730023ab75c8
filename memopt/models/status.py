"""The outcome of a solve."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """The outcome of a solve."""

    OPTIMAL = "optimal"
    """Best in the strategy's own class of schedules."""
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"
    """Stopped before a plan or a proof was found."""
