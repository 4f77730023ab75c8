"""Pictures of a placement: the address map of a step, what it wastes, lifetimes before and after.

The horizontal axis counts the instructions that compute or move something; frees lie between
them. Every function draws on `ax` (a new figure's if None) and returns it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from memopt.models.graph import Graph, Phase, TensorKind
from memopt.programs.instructions import Compute, Free, LossBoundary, Program, SwapIn
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


class Block(NamedTuple):
    """One lifetime: [begin, end) in steps of the axis, its place if it has one, its colour."""

    tensor: int
    begin: int
    end: int
    offset: int | None
    size_bytes: int
    label: str
    colour: str


def blocks(graph: Graph, program: Program) -> tuple[Block, ...]:
    """Every lifetime of a valid program that begins at a Compute or SwapIn, transient ones too."""
    return tuple(sorted(_blocks(graph, program), key=lambda block: (block.begin, block.tensor)))


def _blocks(graph: Graph, program: Program) -> Iterator[Block]:
    places = {(i, tensor): offset for i, tensor, offset in program.offsets or ()}
    open_: dict[int, tuple[int, int, str, str]] = {}
    seen: set[int] = set()
    step = 0

    def finish(tensor: int, end: int) -> Block:
        position, begin, label, colour = open_.pop(tensor)
        size = graph.tensors[tensor].size_bytes
        return Block(tensor, begin, end, places.get((position, tensor)), size, label, colour)

    for position, instruction in enumerate(program):
        if isinstance(instruction, Compute):
            if instruction.in_place is not None:
                yield finish(instruction.in_place, step)
            for tensor in instruction.outputs:
                kind = graph.tensors[tensor].kind
                label, colour = str(kind), KIND_COLOURS.get(kind, BLUE)
                if tensor in seen:
                    label, colour = "computed again", RELOADED_COLOUR
                seen.add(tensor)
                open_[tensor] = (position, step, label, colour)
            for (i, tensor), offset in places.items():
                if i == position and tensor not in instruction.outputs:
                    size = graph.tensors[tensor].size_bytes
                    yield Block(tensor, step, step + 1, offset, size, "transient", TRANSIENT_COLOUR)
        elif isinstance(instruction, SwapIn):
            open_[instruction.tensor] = (position, step, "back from the host", RELOADED_COLOUR)
        elif isinstance(instruction, Free):
            if instruction.tensor in open_:
                yield finish(instruction.tensor, step)
            continue
        step += 1
    for tensor in tuple(open_):
        yield finish(tensor, step)


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
    _mark_boundary(graph, program, axes)
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
        during = [
            size / unit
            for instruction, size in zip(program, timeline.step_bytes, strict=True)
            if not isinstance(instruction, Free)
        ]
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
    _mark_boundary(graph, program, axes)
    axes.set(xlabel="step", ylabel="lifetimes in order of their begin")
    axes.invert_yaxis()
    axes.legend(fontsize="small")
    return axes


def _mark_boundary(graph: Graph, program: Program, axes: Axes) -> None:
    """A dotted line where the forward ends."""
    step = 0
    for instruction in program:
        if isinstance(instruction, LossBoundary) or (
            isinstance(instruction, Compute)
            and graph.operators[instruction.op].phase is not Phase.FORWARD
        ):
            axes.axvline(step, color=text_color(), linewidth=0.6, linestyle=":")
            return
        step += not isinstance(instruction, Free)
