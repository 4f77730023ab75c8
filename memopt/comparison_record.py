"""The records of a comparison, without its tables and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, Self, TypeVar

from memopt.errors import InfeasibleBudgetError
from memopt.models.bounds import relative_gap, time_lower_bound
from memopt.models.budget import format_bytes, parse_budget
from memopt.plan_record import BaselineFigures, PlanRecord
from memopt.strategies import Status

_ROUNDING = 1e-9

AnyCell = TypeVar("AnyCell", bound="CellRecord", covariant=True)


@dataclass(frozen=True)
class CellRecord:
    """One strategy at one budget. Bytes are totals, resident included.

    Attributes:
        strategy: its name (with its parameters, where two of one name are compared).
        budget_bytes: None: no limit.
        status: OPTIMAL (in the strategy's class), FEASIBLE, INFEASIBLE, or UNKNOWN: stopped
            before it found a plan, or it cannot plan this model.
        solve_time_s: seconds that planning took.
        peak_bytes: replayed peak; this and the next four fields are None without a plan.
        step_time_s: replayed step time, seconds.
        overhead: extra time over running every operator once, as a share of that.
        lower_bound_s: no plan of the strategy's class within the budget is faster; seconds.
        gap: (step_time_s - least) / least, where `least` holds for plans of every kind: each
            operator that the step needs, once, the fastest way.
        smallest_budget_bytes: without a plan, the smallest budget known to be feasible.
        measured_peak_bytes: of a real step; None unless run.
        measured_time_s: median of real steps, seconds; None unless run.
        note: why there is no plan.
        applies: False: the strategy cannot plan this model; `note` says why.
        plan: the plan; None without one.
    """

    strategy: str
    budget_bytes: int | None
    status: Status
    solve_time_s: float
    peak_bytes: int | None = None
    step_time_s: float | None = None
    overhead: float | None = None
    lower_bound_s: float | None = None
    gap: float | None = None
    smallest_budget_bytes: int | None = None
    measured_peak_bytes: int | None = None
    measured_time_s: float | None = None
    note: str = ""
    applies: bool = True
    plan: PlanRecord | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, strategy: str, plan: PlanRecord, solve_time_s: float) -> Self:
        """Make the cell of a plan; `strategy` is the strategy's label in the comparison."""
        return cls(
            strategy,
            plan.budget,
            plan.status,
            solve_time_s,
            plan.peak_bytes,
            plan.step_time_s,
            plan.overhead,
            plan.lower_bound_s,
            max(0.0, relative_gap(plan.step_time_s, time_lower_bound(plan.graph))),
            plan=plan,
        )

    @property
    def verdict(self) -> str:
        """Return the status in a word or two, for people: "optimal" where no plan of any kind is
        faster, "best of class" where none of the strategy's own class is."""
        if not self.applies:
            return "n/a"
        if self.status is Status.OPTIMAL and (self.gap or 0.0) > _ROUNDING:
            return "best of class"
        return self.status.value


@dataclass(frozen=True)
class ComparisonRecord(Generic[AnyCell]):
    """A comparison of strategies × budgets.

    Attributes:
        cells: by strategy, in the order asked, then by budget.
        baseline: the step without memopt.
        compute_time_s: the time of every operator run once, seconds.
        measured_baseline: the step without memopt, measured beside the plans; None unless run.
        complete: False: interrupted, and cells (or measurements) are missing.
        left_out: which strategies are not compared by default, and why, for people.
    """

    cells: tuple[AnyCell, ...]
    baseline: BaselineFigures
    compute_time_s: float
    measured_baseline: BaselineFigures | None = None
    complete: bool = True
    left_out: tuple[str, ...] = ()

    @property
    def budgets(self) -> tuple[int | None, ...]:
        """Return the budgets in bytes, in the order compared."""
        return tuple(dict.fromkeys(cell.budget_bytes for cell in self.cells))

    @property
    def strategies(self) -> tuple[str, ...]:
        """Return the strategies' names, in the order compared."""
        return tuple(dict.fromkeys(cell.strategy for cell in self.cells))

    def best(self, budget: int | float | str | None = None) -> AnyCell:
        """Return the fastest cell whose plan needs at most `budget` (bytes, a share of the
        baseline's peak, "6GiB", None: no limit), whichever budget it was planned for.

        Measured times and peaks decide if every plan was run, predicted ones otherwise. Of
        equally fast plans the one with the smaller peak is taken.

        Raises:
            InfeasibleBudgetError: no compared plan needs so little; names the one that needs least.
            ValueError: the budget cannot be read.
        """
        limit = parse_budget(budget, self.baseline.peak_bytes)
        planned = [cell for cell in self.cells if cell.plan is not None]
        run = all(cell.measured_time_s is not None for cell in planned)
        figures = []
        for cell in planned:
            peak = cell.measured_peak_bytes if run else cell.peak_bytes
            seconds = cell.measured_time_s if run else cell.step_time_s
            assert peak is not None
            assert seconds is not None
            figures.append((seconds, peak, cell))
        fitting = [row for row in figures if limit is None or row[1] <= limit]
        if not fitting:
            raise self._none_within(limit, [(peak, cell.strategy) for _, peak, cell in figures])
        return min(fitting, key=lambda row: row[:2])[2]

    def _none_within(
        self, limit: int | None, peaks: Sequence[tuple[int, str]]
    ) -> InfeasibleBudgetError:
        """Make the error if no plan is within a budget; `peaks`: (bytes, strategy) of each plan."""
        feasible = [c.smallest_budget_bytes for c in self.cells if c.smallest_budget_bytes]
        known = min((*feasible, *(peak for peak, _ in peaks)), default=None)
        what = "no strategy has a plan at any of the compared budgets"
        if peaks and limit is not None:
            peak, strategy = min(peaks)
            what = (
                f"no compared plan needs at most {format_bytes(limit)}: {strategy!r} needs least, "
                f"{format_bytes(peak)}"
            )
        remedy = 'compare with smaller budgets (budgets=["min"]) or other strategies'
        if known is not None:
            remedy = (
                f"the smallest feasible budget known is {known} bytes: raise yours, or {remedy}"
            )
        asked = limit if limit is not None else max((b or 0 for b in self.budgets), default=0)
        return InfeasibleBudgetError(f"{what}; {remedy}", asked, known)
