"""The result of a strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from memopt.models.bounds import relative_gap
from memopt.models.status import Status
from memopt.models.steps import ChainStep
from memopt.programs.instructions import Program


@dataclass(frozen=True, slots=True)
class Solution:
    """The result of a strategy. Byte figures are totals, resident included.

    Attributes:
        status: see Status.
        steps: a chain strategy's schedule; None otherwise or when there is no plan.
        program: a graph strategy's program; None otherwise or when there is no plan.
        peak_bytes: the strategy's own figure of the peak (planning replays it again).
        time_s: the strategy's own figure of the step's time.
        lower_bound_s: no schedule of the strategy's class within the budget is faster.
        gap: (time_s - lower_bound_s) / lower_bound_s; None if unknown.
        smallest_budget_bytes: without a plan, the smallest budget known to be feasible.
        smallest: a solution within that budget, so that a named budget always has a plan.
        stats: counts and timings worth showing ("slots", "solve_s", ...).
    """

    status: Status
    steps: tuple[ChainStep, ...] | None = None
    program: Program | None = None
    peak_bytes: int | None = None
    time_s: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    smallest_budget_bytes: int | None = None
    smallest: Solution | None = None
    stats: Mapping[str, object] = field(default_factory=dict)

    def bounded(self, bound_s: float, optimal: bool) -> Solution:
        """Return the plan with a lower bound, and whether it is optimal in its class."""
        status = Status.OPTIMAL if optimal else Status.FEASIBLE
        gap = relative_gap(self.time_s or bound_s, bound_s)
        return replace(self, status=status, lower_bound_s=bound_s, gap=gap)

    @property
    def plans(self) -> bool:
        """Whether there is a plan."""
        return self.steps is not None or self.program is not None
