"""Programs that are there at once: the step as it is, and the chain's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memopt.models.graph import Graph
from memopt.models.steps import ChainStep
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.reductions.linearize import linearize
from memopt.reductions.stage_map import has_updates
from memopt.strategies.rotor import Rotor


def stored(graph: Graph) -> Program:
    """The framework's own order, nothing recomputed, in place where it may be."""
    return with_in_place(graph, store_all(graph))


def programs_of_chain(graph: Graph, budgets: Iterable[int]) -> Iterator[Program]:
    """Rotor's programs within some budgets, total bytes: the fastest of each that needs no more,
    or that of least memory. One table has them all. None where the graph has no chain."""
    if has_updates(graph):
        return
    view = linearize(graph)
    known = set[tuple[ChainStep, ...]]()
    for budget_bytes in budgets:
        found = Rotor().solve(view.chain, budget_bytes)
        steps = found.steps if found.smallest is None else found.smallest.steps
        if steps is not None and steps not in known:
            known.add(steps)
            yield view.lower(steps)
