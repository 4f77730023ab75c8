"""Comparison: several strategies at several budgets of one model, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from memopt.models.budget import parse_budget
from memopt.plan import BaselineFigures, Plan
from memopt.strategies import Status

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


@dataclass(frozen=True)
class Cell:
    """One strategy at one budget. Bytes are totals, resident included.

    Attributes:
        strategy: its name (with its parameters, where two of one name are compared).
        budget_bytes: None: no limit.
        status: OPTIMAL (in the strategy's class), FEASIBLE, INFEASIBLE, or UNKNOWN: stopped
            before it found a plan, or it cannot plan this model (`note` says why).
        solve_time_s: seconds that planning took.
        peak_bytes: replayed peak; this and the next four are None without a plan.
        step_time_s: replayed step time, seconds.
        overhead: extra time over running every operator once, as a share of that.
        lower_bound_s: no plan of the strategy's class within the budget is faster.
        gap: (step_time_s - lower_bound_s) / lower_bound_s.
        smallest_budget_bytes: without a plan, the smallest budget known to be feasible.
        measured_peak_bytes: of a real step; None unless run.
        measured_time_s: median of real steps, seconds; None unless run.
        note: why there is no plan.
        plan: the plan itself.
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
    plan: Plan | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Comparison:
    """Strategies × budgets; `print` and notebooks show a table.

    Attributes:
        cells: by strategy, in the order asked, then by budget.
        baseline: the step without memopt.
        compute_time_s: every operator once, seconds.
        measured_baseline: the step without memopt, measured beside the plans; None unless run.
        complete: False: interrupted, and cells (or measurements) are missing.
    """

    cells: tuple[Cell, ...]
    baseline: BaselineFigures
    compute_time_s: float
    measured_baseline: BaselineFigures | None = None
    complete: bool = True

    @property
    def budgets(self) -> tuple[int | None, ...]:
        """The budgets in bytes, in the order compared."""
        return tuple(dict.fromkeys(cell.budget_bytes for cell in self.cells))

    @property
    def strategies(self) -> tuple[str, ...]:
        """The strategies' names, in the order compared."""
        return tuple(dict.fromkeys(cell.strategy for cell in self.cells))

    def best(self, budget: int | float | str | None = None) -> Cell | None:
        """The fastest cell whose plan needs at most `budget` (bytes, a share of the baseline's
        peak, "6GiB", None: no limit), whichever budget it was planned for; None if there is none.

        Measured times and peaks decide where every plan was run, predicted ones elsewhere; of
        equally fast plans the one with the smaller peak is taken.

        Raises:
            ValueError: a budget that cannot be read.
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
        return min(fitting, key=lambda row: row[:2], default=(0.0, 0, None))[2]

    def to_dataframe(self) -> DataFrame:
        """One row per cell, columns as Cell's attributes (without the plan).

        Raises:
            ImportError: pandas is missing; names the extra to install.
        """
        from memopt.report.comparison_text import data_frame

        names = tuple(one.name for one in fields(Cell) if one.name != "plan")
        return data_frame(self, names)

    def to_markdown(self) -> str:
        """The table in Markdown."""
        from memopt.report.comparison_text import markdown

        return markdown(self)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Step time against peak memory: a line per strategy, the baseline as a point, and shaded
        what no compared strategy can reach. Measured figures where the plans were run.

        Args:
            ax: where to draw; None: a new figure.

        Raises:
            ImportError: matplotlib is missing; names the extra to install.
        """
        from memopt.report.comparison_plot import plot_comparison

        return plot_comparison(self, ax)

    def _repr_html_(self) -> str:
        from memopt.report.comparison_text import html

        return html(self)

    def __str__(self) -> str:
        from memopt.report.comparison_text import text

        return text(self)
