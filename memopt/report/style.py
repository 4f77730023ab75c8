"""Helpers to draw with matplotlib, which is imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE = "#0072B2"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
ORANGE = "#E69F00"
VERMILION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"
"""Okabe and Ito's colours, told apart with every kind of colour vision. Their black is left out,
since pictures stand on light and on dark pages: lines take the style's own text colour."""


_MISSING = "plots need matplotlib, which is not installed: pip install matplotlib"
_WIDTH_INCHES, _HEIGHT_INCHES = 7.0, 3.4


def new_axes(ax: Axes | None, height_inches: float = _HEIGHT_INCHES) -> Axes:
    """Return the Axes to draw on: the user's, or those of a new pyplot figure of notebook width.

    Raises:
        ImportError: matplotlib is missing; names the extra to install.
    """
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(_MISSING) from error
    _, made = pyplot.subplots(figsize=(_WIDTH_INCHES, height_inches), layout="constrained")
    return made


def new_figure() -> tuple[Figure, Axes]:
    """Make a figure for a file, with one Axes: it needs no window and pyplot does not keep it.

    Raises:
        ImportError: matplotlib is missing; names the extra to install.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(_MISSING) from error
    figure = Figure(figsize=(_WIDTH_INCHES, _HEIGHT_INCHES), layout="constrained")
    return figure, figure.add_subplot()


def save_figure(draw: Callable[[Axes], object], path: Path) -> None:
    """Draw a figure to a file, without a window."""
    figure, axes = new_figure()
    draw(axes)
    figure.savefig(path, dpi=150)


def picture_types() -> frozenset[str]:
    """Return the file endings that `new_figure`'s figures can be saved with.

    Raises:
        ImportError: matplotlib is missing; names the extra to install.
    """
    figure, _ = new_figure()
    return frozenset(figure.canvas.get_supported_filetypes())


def text_color() -> str:
    """Return the colour of text in the user's matplotlib style: dark on light, light on dark."""
    from matplotlib import rcParams

    return str(rcParams["text.color"])


def time_unit(longest_s: float) -> tuple[float, str]:
    """Choose (units per second, the unit's name) for an axis up to `longest_s`."""
    if longest_s >= 2:
        return 1.0, "s"
    if longest_s >= 2e-3:
        return 1e3, "ms"
    return 1e6, "µs"


def memory_unit(largest_bytes: float) -> tuple[int, str]:
    """Choose (bytes per unit, the unit's name) for an axis up to `largest_bytes`."""
    for power, name in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if largest_bytes >= 2 * 2**power:
            return 2**power, name
    return 1, "bytes"


def legend_beside(ax: Axes) -> None:
    """Add a legend to the right of the Axes, off the data; none if nothing has a label."""
    if not ax.get_legend_handles_labels()[0]:
        return
    ax.legend(
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        borderaxespad=0.0,
        frameon=False,
        fontsize="small",
    )
