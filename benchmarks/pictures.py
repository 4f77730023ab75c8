"""Figures beside pages: a grid of panels with one legend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure


@contextmanager
def panels(
    path: str | Path,
    count: int = 1,
    *,
    across: int = 1,
    size: tuple[float, float] = (7.0, 4.0),
    dpi: int = 80,
    legend: str = "outside lower center",
) -> Iterator[list[Axes]]:
    """Give the axes to draw on, `size` inches each, `across` of them in a line; then write them."""
    down = -(-count // across)
    figure = Figure(figsize=(size[0] * across, size[1] * down), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False).flat)
    yield axes[:count]
    for one in axes[count:]:
        one.set_axis_off()
    pairs = (zip(*one.get_legend_handles_labels(), strict=True) for one in axes)
    found = {label: handle for each in pairs for handle, label in each}
    columns = 1 if "right" in legend else len(found)
    figure.legend(found.values(), found.keys(), loc=legend, ncols=columns, fontsize="small")
    figure.savefig(path, dpi=dpi)
