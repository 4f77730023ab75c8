"""Comparison: several strategies at several budgets of one model, side by side."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field, fields
from os import PathLike
from typing import TYPE_CHECKING

from memopt.api.plan import Plan
from memopt.comparison_record import CellRecord, ComparisonRecord
from memopt.errors import InfeasibleBudgetError
from memopt.models.folders import write_whole
from memopt.report.comparison_text import csv_text, data_frame, html, markdown, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame

    from memopt.report.page.document import Page


@dataclass(frozen=True)
class Cell(CellRecord):
    """One strategy at one budget; see `memopt.comparison_record.CellRecord`."""

    plan: Plan | None = field(default=None, repr=False, compare=False)


_FIGURES = tuple(one.name for one in fields(Cell) if one.name != "plan")


@dataclass(frozen=True)
class Comparison(ComparisonRecord[Cell]):
    """Strategies × budgets; `print` and notebooks show a table."""

    def to_dataframe(self) -> DataFrame:
        """Return a data frame: a row per cell, columns as Cell's attributes (without the plan).

        Raises:
            ImportError: pandas is missing; names the extra to install.
        """
        return data_frame(self, _FIGURES)

    def to_markdown(self) -> str:
        """Return the table in Markdown."""
        return markdown(self)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw step time against peak memory: a line per strategy, the baseline as a point, and
        shaded what no compared strategy can reach. Figures are measured if the plans were run.

        Args:
            ax: where to draw; None: a new figure.

        Raises:
            ImportError: matplotlib is missing; names the extra to install.
        """
        from memopt.report.comparison_plot import plot_comparison

        return plot_comparison(self, ax)

    def to_csv(self, path: str | PathLike[str] | None = None) -> str:
        """Return CSV with one row per cell and Cell's attributes (without the plan) as columns, in
        bytes and seconds; a cell without a figure leaves it empty.

        Args:
            path: also write it to this file, ".csv".
        """
        made = csv_text(self, _FIGURES)
        if path is not None:
            write_whole(path, made.encode())
        return made

    def report(self, path: str | PathLike[str] | None = None, *, title: str | None = None) -> Page:
        """Make one self-contained HTML page of all plans: curve, budget slider, and each plan's
        memory over the step, streams and modules; see docs/explorer.md. It opens with the fastest
        plan that fits the device or, if none does, with the fastest of all.

        Args:
            path: the file, ".html"; None: none is written. A notebook shows the returned page.
            title: heads the page; None: the model's class.

        Raises:
            ImportError: bokeh is missing; the message names the extra to install.
            ValueError: no cell has a plan. OSError: the file cannot be written.
        """
        from memopt.api.pages import page_of_comparison

        capacities = (cell.plan.device.capacity_bytes for cell in self.cells if cell.plan)
        opened = None
        for limit in (next(capacities, None), None):
            with suppress(InfeasibleBudgetError):
                opened = opened or self.best(limit).plan
        page = page_of_comparison(self, opened, title)
        if path is not None:
            page.write(path)
        return page

    def _repr_html_(self) -> str:
        return html(self)

    def __str__(self) -> str:
        return text(self)
