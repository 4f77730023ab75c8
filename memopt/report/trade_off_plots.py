"""Pictures of memory–time trade-offs, one curve for each strategy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from memopt.report.style import new_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from memopt.report.rotor_plots import CURVE_COLOURS, MIB

MARKERS = "os^Dv*x"


class Point(Protocol):
    """A schedule's cost, an element of a strategy's `curve`."""

    @property
    def peak_bytes(self) -> int:
        """Return the peak memory, total bytes."""

    @property
    def time_s(self) -> float:
        """Return the step time, seconds."""


def plot_curves(
    curves: Mapping[str, Iterable[Point]], least_time_s: float, ax: Axes | None = None
) -> Axes:
    """Draw step time, as a multiple of `least_time_s` (no recomputation), against peak in MiB.

    Args:
        curves: name → trade-off, for example {"rotor": Rotor().curve(chain)}.
        least_time_s: `chain.compute_time_s`.
        ax: where to draw.
    """
    axes = new_axes(ax)
    for number, (name, points) in enumerate(curves.items()):
        ordered = sorted(points, key=lambda point: point.peak_bytes)
        axes.step(
            [point.peak_bytes / MIB for point in ordered],
            [point.time_s / least_time_s for point in ordered],
            where="post",
            color=CURVE_COLOURS[number % len(CURVE_COLOURS)],
            marker=MARKERS[number % len(MARKERS)],
            markersize=3,
            label=name,
        )
    axes.set(xlabel="peak memory (MiB)", ylabel="step time / without recomputation")
    axes.legend(fontsize="small")
    return axes
