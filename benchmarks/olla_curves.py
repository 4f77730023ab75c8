"""What OLLA's searches have found after so many seconds (the paper's figures 10 and 12)."""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import ColorType

from benchmarks.olla_rows import Row

SHOWN = 8
START_S = 1e-3


def saving_curves(rows: list[Row], path: Path) -> None:
    """Share of the framework's peak (without resident bytes) saved by the best order so far."""
    figure, axes = _figure("saved by the order so far, %")
    for row in sorted(rows, key=_share, reverse=True)[:SHOWN]:
        moving = row.framework_bytes - row.resident_bytes
        points = [(START_S, row.framework_bytes), *((t, peak) for t, peak, _ in row.trace)]
        times = [max(START_S, t) for t, _ in points]
        line = _steps(
            axes, row, times, [100 * (row.framework_bytes - p) / moving for _, p in points]
        )
        axes.axhline(100 * _share(row), color=line, linewidth=0.5, linestyle=":")
    _finish(figure, axes, path)


def _share(row: Row) -> float:
    """What any order could save at most."""
    return (row.framework_bytes - row.bound_bytes) / (row.framework_bytes - row.resident_bytes)


def fragmentation_curves(rows: list[Row], path: Path) -> None:
    """(extent - bound) / extent of the best addresses so far, of the framework's own orders."""
    figure, axes = _figure("fragmentation of the addresses so far, %")
    for row in sorted(rows, key=lambda r: -r.own["cpu_s"])[:SHOWN]:
        trace = row.own["trace"]
        times = [max(START_S, t) for t, _, _ in trace]
        _steps(axes, row, times, [100 * (1 - bound / extent) for _, extent, bound in trace])
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(bottom=0)
    _finish(figure, axes, path)


def _figure(label: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel("seconds")
    axes.set_ylabel(label)
    axes.set_xscale("log")
    return figure, axes


def _steps(axes: Axes, row: Row, times: list[float], values: list[float]) -> ColorType:
    """One curve, every improvement marked; its colour."""
    (line,) = axes.step(
        times, values, where="post", label=f"{row.name} b{row.batch}", marker="o", markersize=3
    )
    return line.get_color()


def _finish(figure: Figure, axes: Axes, path: Path) -> None:
    axes.legend(fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=80)
