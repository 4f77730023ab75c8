"""How a solve ended."""

from __future__ import annotations

from enum import StrEnum

from memopt.models.progress import Progress as Progress


class Status(StrEnum):
    """How a solve ended."""

    OPTIMAL = "optimal"
    """Best in the strategy's own class of schedules."""
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    UNKNOWN = "unknown"
    """Stopped before a plan or a proof was found."""
