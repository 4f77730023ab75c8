"""Pictures of lifetimes, and of memory before and after reordering.

Every function draws on `ax` (None: a new figure's) and returns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.report.style import (
    BLUE,
    GREY,
    memory_unit,
    new_axes,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from memopt.report.address_plots import mark_boundary
from memopt.report.placed_blocks import blocks


def plot_orders(graph: Graph, before: Program, after: Program, ax: Axes | None = None) -> Axes:
    """Draw memory over the steps of two programs: before and after reordering."""
    axes = new_axes(ax)
    timelines = [replay(graph, program) for program in (before, after)]
    unit, unit_name = memory_unit(max(timeline.peak_bytes for timeline in timelines))
    names = ("before", "after")
    for program, timeline, name, colour in zip(
        (before, after), timelines, names, (GREY, BLUE), strict=True
    ):
        during = [timeline.step_bytes[position] / unit for position in program.steps]
        label = f"{name}: peak {timeline.peak_bytes / unit:.1f} {unit_name}"
        axes.plot(during, color=colour, label=label, linestyle="--" if name == "before" else "-")
    axes.set(xlabel="step", ylabel=f"memory, {unit_name}", ylim=(0, None))
    axes.legend(fontsize="small")
    return axes


def plot_lifetimes(graph: Graph, program: Program, ax: Axes | None = None) -> Axes:
    """Draw each lifetime as a line from its begin to its end, the largest tensors thickest."""
    axes = new_axes(ax, 4.2)
    listed = blocks(graph, program)
    largest = max((block.size_bytes for block in listed), default=1) or 1
    shown: set[str] = set()
    for row, block in enumerate(listed):
        axes.plot(
            [block.begin, block.end],
            [row, row],
            color=block.colour,
            linewidth=0.4 + 3.0 * block.size_bytes / largest,
            solid_capstyle="butt",
            label=None if block.label in shown else block.label,
        )
        shown.add(block.label)
    mark_boundary(program, axes)
    axes.set(xlabel="step", ylabel="lifetimes in order of their begin")
    axes.invert_yaxis()
    axes.legend(fontsize="small")
    return axes
