"""Pictures of a placement: the address map of a step, what it wastes, lifetimes before and after.

The horizontal axis counts the instructions that compute or move something; frees lie between
them. Every function draws on `ax` (a new figure's if None) and returns it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from memopt.models.graph import Graph, TensorKind
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import lifetimes
from memopt.programs.replay import replay
from memopt.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    memory_unit,
    new_axes,
    text_color,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KIND_COLOURS = {
    TensorKind.ACTIVATION: SKY,
    TensorKind.GRADIENT: ORANGE,
    TensorKind.OUTPUT: GREEN,
}
TRANSIENT_COLOUR = GREY
RELOADED_COLOUR = PURPLE


class Rectangle(NamedTuple):
    """One lifetime: [begin, end) in steps of the axis, its place if it has one, its colour."""

    tensor: int
    begin: int
    end: int
    offset: int | None
    size_bytes: int
    label: str
    colour: str


def blocks(graph: Graph, program: Program) -> tuple[Rectangle, ...]:
    """Every lifetime of a valid program that begins at a Compute or SwapIn, transient ones where
    they have a place, by their beginnings."""
    places = {(i, tensor): offset for i, tensor, offset in program.offsets or ()}
    runs, steps = dict(program.computes), program.steps_before
    found: list[Rectangle] = []
    seen: set[int] = set()
    for lifetime in lifetimes(graph, program).device:
        tensor, offset = lifetime.tensor, places.get(lifetime.key)
        if lifetime.begin == program.boundary or (lifetime.transient and offset is None):
            continue
        kind = graph.tensors[tensor].kind
        label, colour = str(kind), KIND_COLOURS.get(kind, BLUE)
        if lifetime.transient:
            label, colour = "transient", TRANSIENT_COLOUR
        elif lifetime.begin not in runs:
            label, colour = "back from the host", RELOADED_COLOUR
        elif tensor in seen:
            label, colour = "computed again", RELOADED_COLOUR
        else:
            seen.add(tensor)
        begin, end = steps[lifetime.begin], steps[lifetime.end]
        size = graph.tensors[tensor].size_bytes
        found.append(Rectangle(tensor, begin, end, offset, size, label, colour))
    return tuple(sorted(found, key=lambda block: (block.begin, block.tensor)))


def plot_addresses(graph: Graph, program: Program, ax: Axes | None = None) -> Axes:
    """The address map: each lifetime a rectangle, steps × addresses, coloured by kind.

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
    _mark_boundary(program, axes)
    axes.set(xlabel="step", ylabel=f"address, {unit_name}", ylim=(0, top / unit * 1.02))
    axes.legend(loc="upper left", fontsize="small")
    return axes


def plot_fragmentation(graph: Graph, program: Program, ax: Axes | None = None) -> Axes:
    """The arena's bytes that are live at each step, and its extent up to the highest live one.

    The extent's maximum is the size of the arena; where it equals the maximum of what is live,
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


def plot_orders(graph: Graph, before: Program, after: Program, ax: Axes | None = None) -> Axes:
    """Memory over the steps of two programs: before and after reordering."""
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
    """Each lifetime a line from its begin to its end, the largest tensors thickest."""
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
    _mark_boundary(program, axes)
    axes.set(xlabel="step", ylabel="lifetimes in order of their begin")
    axes.invert_yaxis()
    axes.legend(fontsize="small")
    return axes


def _mark_boundary(program: Program, axes: Axes) -> None:
    """A dotted line where the forward ends."""
    if program.boundary is not None:
        step = program.steps_before[program.boundary]
        axes.axvline(step, color=text_color(), linewidth=0.6, linestyle=":")
