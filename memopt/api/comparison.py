"""Comparison: several strategies at several budgets of one model, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from memopt.api.plan import Plan
from memopt.comparison_record import CellRecord, ComparisonRecord
from memopt.report.comparison_text import data_frame, html, markdown, text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from pandas import DataFrame


@dataclass(frozen=True)
class Cell(CellRecord):
    """One strategy at one budget; see `memopt.comparison_record.CellRecord`."""

    plan: Plan | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Comparison(ComparisonRecord[Cell]):
    """Strategies × budgets; `print` and notebooks show a table."""

    def to_dataframe(self) -> DataFrame:
        """One row per cell, columns as Cell's attributes (without the plan).

        Raises:
            ImportError: pandas is missing; names the extra to install.
        """
        names = tuple(one.name for one in fields(Cell) if one.name != "plan")
        return data_frame(self, names)

    def to_markdown(self) -> str:
        """The table in Markdown."""
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
        return html(self)

    def __str__(self) -> str:
        return text(self)
