"""A program read as stages, for a solver to start from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from memopt.models.graph import Graph
from memopt.programs.instructions import Compute, Free, Program


@dataclass
class Stage:
    """The runs up to the first run of an operator, and what is in memory before them."""

    live: frozenset[int]
    runs: dict[int, str | None] = field(default_factory=dict)
    """Operator → implementation, the last where it runs twice."""


def stages(graph: Graph, program: Program) -> Iterator[Stage]:
    """One stage for each first run of an operator, in the program's order."""
    live: set[int] = set()
    begun: set[int] = set()
    stage: Stage | None = None
    for instruction in program:
        if isinstance(instruction, Free):
            live.discard(instruction.tensor)
        elif isinstance(instruction, Compute):
            stage = stage or Stage(frozenset(live))
            stage.runs[instruction.op] = instruction.implementation
            live.discard(-1 if instruction.in_place is None else instruction.in_place)
            live.update(instruction.outputs or graph.operators[instruction.op].writes)
            if instruction.op not in begun:
                begun.add(instruction.op)
                yield stage
                stage = None
