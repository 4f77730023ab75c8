"""Programs that are there at once: the step as it is, and the chain's of least memory."""

from __future__ import annotations

from memopt.models.graph import Graph
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.reductions.linearize import linearize
from memopt.reductions.stage_map import has_updates
from memopt.strategies.rotor import Rotor


def stored(graph: Graph) -> Program:
    """The framework's own order, nothing recomputed, in place where it may be."""
    return with_in_place(graph, store_all(graph))


def least_of_chain(graph: Graph) -> Program | None:
    """Rotor's program of least memory; None where the graph has no chain."""
    if has_updates(graph):
        return None
    view = linearize(graph)
    least = Rotor().solve(view.chain, 1).smallest
    if least is None or least.steps is None:
        return None
    return view.lower(least.steps)
