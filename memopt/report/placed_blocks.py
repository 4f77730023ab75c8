"""The rectangles of a placement: each lifetime's steps, addresses and colour."""

from __future__ import annotations

from typing import NamedTuple

from memopt.models.graph import Graph, TensorKind
from memopt.programs.instructions import Program
from memopt.programs.lifetimes import lifetimes
from memopt.report.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    SKY,
)

KIND_COLOURS = {
    TensorKind.ACTIVATION: SKY,
    TensorKind.GRADIENT: ORANGE,
    TensorKind.OUTPUT: GREEN,
}
TRANSIENT_COLOUR = GREY
RELOADED_COLOUR = PURPLE


class Rectangle(NamedTuple):
    """One lifetime: [begin, end) in steps of the axis, its address if it has one, its colour."""

    tensor: int
    begin: int
    end: int
    offset: int | None
    size_bytes: int
    label: str
    colour: str


def blocks(graph: Graph, program: Program) -> tuple[Rectangle, ...]:
    """List the lifetimes of a valid program by their begins. Left out are those that the loss
    begins, and transient ones without an address."""
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
        elif lifetime.begin >= 0 and lifetime.begin not in runs:
            label, colour = "back from the host", RELOADED_COLOUR
        elif tensor in seen:
            label, colour = "computed again", RELOADED_COLOUR
        else:
            seen.add(tensor)
        begin, end = steps[max(0, lifetime.begin)], steps[lifetime.end]
        size = graph.tensors[tensor].size_bytes
        found.append(Rectangle(tensor, begin, end, offset, size, label, colour))
    return tuple(sorted(found, key=lambda block: (block.begin, block.tensor)))
