"""The pictures of a plan, by kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from memopt.report.memory_plot import plot_memory
from memopt.report.schedule_plot import plot_schedule
from memopt.report.timeline_plot import plot_timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from memopt.plan_record import PlanRecord

_KINDS: dict[str, Callable[[PlanRecord, Axes | None], Axes]] = {
    "memory": plot_memory,
    "schedule": plot_schedule,
    "timeline": plot_timeline,
}


def plot_plan(plan: PlanRecord, kind: str = "memory", ax: Axes | None = None) -> Axes:
    """Draw a plan; see `Plan.plot`."""
    if kind not in _KINDS:
        raise ValueError(f"there is no plot {kind!r} of a plan; there are {', '.join(_KINDS)}")
    return _KINDS[kind](plan, ax)
