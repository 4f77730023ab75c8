"""Pictures of a placement: the address map of a step, and its fragmentation.

The horizontal axis counts the instructions that compute or move something; frees lie between
them. Every function draws on `ax` (None: a new figure's) and returns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.report.style import (
    SKY,
    VERMILION,
    memory_unit,
    new_axes,
    text_color,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
from memopt.report.placed_blocks import blocks


def plot_addresses(graph: Graph, program: Program, ax: Axes | None = None) -> Axes:
    """Draw the address map: each lifetime a rectangle, steps × addresses, coloured by kind.

    Raises:
        ValueError: the program has no placement.
    """
    if program.offsets is None:
        raise ValueError("plot_addresses: the program has no placement; plan with place=True")
    axes = new_axes(ax, 4.2)
    drawn = [block for block in blocks(graph, program) if block.offset is not None]
    top = max((block.offset or 0) + block.size_bytes for block in drawn) if drawn else 1
    unit, unit_name = memory_unit(top)
    for label, colour in dict.fromkeys((block.label, block.colour) for block in drawn):
        mine = [block for block in drawn if block.label == label]
        axes.bar(
            [block.begin for block in mine],
            [block.size_bytes / unit for block in mine],
            width=[block.end - block.begin for block in mine],
            bottom=[(block.offset or 0) / unit for block in mine],
            align="edge",
            color=colour,
            edgecolor=text_color(),
            linewidth=0.2,
            label=label,
        )
    mark_boundary(program, axes)
    axes.set(xlabel="step", ylabel=f"address, {unit_name}", ylim=(0, top / unit * 1.02))
    axes.legend(loc="upper left", fontsize="small")
    return axes


def plot_fragmentation(graph: Graph, program: Program, ax: Axes | None = None) -> Axes:
    """Draw the arena's live bytes at each step, and its extent up to the highest live address.

    The extent's maximum is the size of the arena; if it equals the maximum of the live bytes,
    nothing is lost to fragmentation.
    """
    axes = new_axes(ax)
    placed = [block for block in blocks(graph, program) if block.offset is not None]
    steps = max((block.end for block in placed), default=1)
    live, extent = [0] * steps, [0] * steps
    for block in placed:
        for step in range(block.begin, block.end):
            live[step] += block.size_bytes
            extent[step] = max(extent[step], (block.offset or 0) + block.size_bytes)
    unit, unit_name = memory_unit(max(extent, default=1))
    axes.step(range(steps), [x / unit for x in extent], where="post", color=VERMILION,
              label=f"highest address, at most {max(extent) / unit:.1f} {unit_name}")  # fmt: skip
    axes.fill_between(range(steps), [x / unit for x in live], step="post", color=SKY,
                      label=f"live, at most {max(live) / unit:.1f} {unit_name}")  # fmt: skip
    axes.set(xlabel="step", ylabel=unit_name)
    axes.legend(fontsize="small")
    return axes


def mark_boundary(program: Program, axes: Axes) -> None:
    """Draw a dotted line where the forward ends."""
    if program.boundary is not None:
        step = program.steps_before[program.boundary]
        axes.axvline(step, color=text_color(), linewidth=0.6, linestyle=":")
