"""The fastest program so far, and the step as the framework runs it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import Timeline, replay

SAME = 1e-9
"""Share of a time by which another program must be faster to count as faster."""


@dataclass
class Incumbent:
    """The fastest program known within a budget.

    Attributes:
        graph: the training step.
        budget_bytes: total bytes; None: no limit.
        tolerance: share of the time by which a program must be faster to replace it.
        program: the fastest program; None: none is known.
        source: which search found it.
        time_s: its time, seconds.
        device: link rates, for programs that move tensors.
    """

    graph: Graph
    budget_bytes: int | None
    tolerance: float = SAME
    program: Program | None = None
    source: str = ""
    time_s: float = math.inf
    device: Device | None = None

    def offer(self, program: Program, source: str = "") -> Timeline:
        """Take a program if it keeps the budget and is faster; return its timeline."""
        timeline = replay(self.graph, program, self.device)
        fits = self.budget_bytes is None or timeline.peak_bytes <= self.budget_bytes
        if fits and timeline.time_s < self.time_s * (1 - self.tolerance):
            self.program, self.source, self.time_s = program, source, timeline.time_s
        return timeline

    def near(self, bound_s: float | None, share: float) -> bool:
        """Tell whether the program is within a share of a lower bound."""
        return bound_s is not None and self.time_s <= bound_s * (1 + share)


def stored(graph: Graph) -> Program:
    """Return the framework's own order, nothing recomputed, with in-place outputs where allowed."""
    return with_in_place(graph, store_all(graph))


def smaller(graph: Graph, *programs: Program) -> Program:
    """Return the program of the smallest peak; of several, the first."""
    return min(programs, key=lambda program: replay(graph, program).peak_bytes)
