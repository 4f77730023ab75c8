"""Plot of a comparison as in the papers: step time against peak memory, a line per strategy."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from memopt.report.rotor_plots import CURVE_COLOURS
from memopt.report.style import (
    GREY,
    legend_beside,
    memory_unit,
    new_axes,
    text_color,
    time_unit,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from memopt.comparison_record import CellRecord, ComparisonRecord

MARKERS, LINE_STYLES = "os^Dv*x", ("-", "--", ":")
BOUND_OPACITY = 0.3


def plot_comparison(comparison: ComparisonRecord[CellRecord], ax: Axes | None = None) -> Axes:
    """Draw `Comparison.plot`. Lines differ in colour, marker and, past seven, in their dashes.

    Measured figures are drawn if the plans were run. The bound is on predicted times, so it is
    shaded only with those.
    """
    axes = new_axes(ax)
    beside = comparison.measured_baseline
    baseline = beside or comparison.baseline
    points = {name: _points(comparison, name, beside is not None) for name in comparison.strategies}
    drawn = [point for line in points.values() for point in line]
    drawn.append((baseline.peak_bytes, baseline.step_time_s))
    size, size_unit = memory_unit(max(peak for peak, _ in drawn))
    scale, seconds_unit = time_unit(max(time_s for _, time_s in drawn))
    for number, (name, line) in enumerate(points.items()):
        if not line:
            continue
        axes.plot(
            [peak / size for peak, _ in line],
            [time_s * scale for _, time_s in line],
            color=CURVE_COLOURS[number % len(CURVE_COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            linestyle=LINE_STYLES[number // len(CURVE_COLOURS) % len(LINE_STYLES)],
            # Later lines are thinner, so that coinciding lines are all visible.
            linewidth=max(1.2, 3.0 - 0.4 * number),
            markersize=max(4.0, 8.0 - 0.8 * number),
            label=name,
            zorder=3,
        )
    axes.plot(
        [baseline.peak_bytes / size],
        [baseline.step_time_s * scale],
        color=text_color(),
        marker="*",
        markersize=9,
        linestyle="none",
        label=f"without memopt ({'measured' if baseline.measured else 'predicted'})",
        zorder=4,
    )
    if beside is None:
        _shade_bound(comparison, axes, size, scale, baseline.step_time_s)
    how = "measured" if beside is not None else "predicted"
    axes.set_xlabel(f"peak memory, {how} ({size_unit})")
    axes.set_ylabel(f"step time, {how} ({seconds_unit})")
    legend_beside(axes)
    return axes


def _points(
    comparison: ComparisonRecord[CellRecord], name: str, measured: bool
) -> list[tuple[int, float]]:
    """Return (peak in bytes, seconds) of a strategy's plans, sorted by peak, each once."""
    names = (
        ("measured_peak_bytes", "measured_time_s") if measured else ("peak_bytes", "step_time_s")
    )
    cells = (cell for cell in comparison.cells if cell.strategy == name)
    figures = {tuple(getattr(cell, one) for one in names) for cell in cells}
    return sorted((peak, time_s) for peak, time_s in figures if None not in (peak, time_s))


def bounds(comparison: ComparisonRecord[CellRecord]) -> list[tuple[int, float]]:
    """Return (budget in bytes, seconds) by budget: no plan of the compared strategies within the
    budget is faster."""
    found: dict[int, float] = {}
    for cell in comparison.cells:
        if cell.budget_bytes is not None and cell.lower_bound_s is not None:
            least = found.get(cell.budget_bytes, cell.lower_bound_s)
            found[cell.budget_bytes] = min(least, cell.lower_bound_s)
    return sorted(found.items())


def _shade_bound(
    comparison: ComparisonRecord[CellRecord], axes: Axes, size: int, scale: float, baseline_s: float
) -> None:
    steps = bounds(comparison)
    if not steps:
        return
    # A bound for a budget holds for every peak up to it, down to the next smaller budget.
    left = min(axes.get_xlim()[0], steps[0][0] / size)
    right = max(axes.get_xlim()[1], steps[-1][0] / size)
    floor = axes.get_ylim()[0] if baseline_s < min(s for _, s in steps) else math.inf
    lowest = min(time_s for _, time_s in steps) * scale
    bottom = lowest - 0.15 * max(axes.get_ylim()[1] - lowest, 0.1 * lowest)
    edges = [left, *(budget / size for budget, _ in steps), right]
    levels = [time_s * scale for _, time_s in steps]
    # Beyond the largest budget the only known bound is the time of every operator run once.
    levels.append(min(levels[-1], comparison.compute_time_s * scale))
    axes.stairs(
        levels,
        edges,
        baseline=bottom,
        fill=True,
        color=GREY,
        alpha=BOUND_OPACITY,
        label="faster than the bound",
        zorder=1,
    )
    axes.set_xlim(left, right)
    # A measured baseline can lie below: a real step may be faster than the sum of its kernels.
    axes.set_ylim(bottom=min(bottom, floor))
