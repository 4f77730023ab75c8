"""Programs to start from, and the best one so far."""

from __future__ import annotations

import math
from dataclasses import dataclass

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import Timeline, replay
from memopt.reductions.linearize import Linearization, linearize
from memopt.reductions.stage_map import has_updates
from memopt.strategies.base import Solution
from memopt.strategies.budget_search import best_that_fits
from memopt.strategies.rotor import Rotor
from memopt.strategies.solvers.running import Deadline

SAME = 1e-9
"""Share of a time by which another program must be faster to count as faster."""


@dataclass
class Incumbent:
    """The fastest program known within a budget.

    Attributes:
        graph: the training step.
        budget_bytes: total bytes; None: no limit.
        tolerance: share of the time by which a program must be faster to take its place.
        program: it; None: none is known.
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
        """Take a program if it keeps the budget and is faster; give its timeline."""
        timeline = replay(self.graph, program, self.device)
        fits = self.budget_bytes is None or timeline.peak_bytes <= self.budget_bytes
        if fits and timeline.time_s < self.time_s * (1 - self.tolerance):
            self.program, self.source, self.time_s = program, source, timeline.time_s
        return timeline

    def near(self, bound_s: float | None, share: float) -> bool:
        """Whether the program is within a share of a lower bound."""
        return bound_s is not None and self.time_s <= bound_s * (1 + share)


def stored(graph: Graph) -> Program:
    """The framework's own order, nothing recomputed, in place where it may be."""
    return with_in_place(graph, store_all(graph))


def rotor_programs(
    graph: Graph,
    budget_bytes: int | None,
    view: Linearization | None = None,
    deadline: Deadline | None = None,
) -> tuple[Program | None, Program]:
    """Plan the chain with Rotor.

    Args:
        graph: the training step.
        budget_bytes: total bytes; None: no limit.
        view: the graph's linearization, if the caller has it.
        deadline: of Rotor's table; None: none.

    Returns:
        The program within the budget, if there is one, and that of the smallest peak known.
    """
    everything = stored(graph)
    if budget_bytes is None or replay(graph, everything).peak_bytes <= budget_bytes:
        return everything, everything
    if has_updates(graph):
        return None, everything
    chain_view = view or linearize(graph)
    until = deadline or Deadline()

    def attempt(limit_bytes: int | None) -> Solution:
        return Rotor().solve(
            chain_view.chain, limit_bytes, time_limit_s=until.left_s, progress=until.progress
        )

    found = best_that_fits(chain_view, attempt, budget_bytes)
    if found.steps is not None:
        program = chain_view.lower(found.steps)
        return program, program
    assert found.smallest is not None
    assert found.smallest.steps is not None
    return None, smaller(graph, everything, chain_view.lower(found.smallest.steps))


def smaller(graph: Graph, *programs: Program) -> Program:
    """Give the program of the smallest peak; of several, the first."""
    return min(programs, key=lambda program: replay(graph, program).peak_bytes)
