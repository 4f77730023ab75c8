"""Programs to start from: the step as it is, and those of the graph's chain."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memopt.models.graph import Graph
from memopt.models.steps import ChainStep
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.reductions.linearize import linearize
from memopt.reductions.stage_map import has_updates
from memopt.strategies.monet.alternatives_table import SLOTS, AlternativesTable
from memopt.strategies.monet.graph_model import Allowed
from memopt.strategies.rotor import Rotor
from memopt.strategies.solvers.running import Deadline


def stored(graph: Graph) -> Program:
    """The framework's own order, nothing recomputed, in place where it may be."""
    return with_in_place(graph, store_all(graph))


def programs_of_chain(
    graph: Graph, budgets: Iterable[int], deadline: Deadline
) -> Iterator[Program]:
    """Rotor's programs within some budgets, total bytes: the fastest of each that needs no more,
    or that of least memory. One table has them all, unless it takes longer than there is time:
    then only the program of least memory and store-all are known. None where the graph has no
    chain."""
    if has_updates(graph):
        return
    view = linearize(graph)
    known = set[tuple[ChainStep, ...]]()
    for budget_bytes in budgets:
        found = Rotor().solve(
            view.chain,
            budget_bytes,
            time_limit_s=deadline.left_s,
            progress=deadline.progress,
        )
        steps = found.steps if found.smallest is None else found.smallest.steps
        if steps is not None and steps not in known:
            known.add(steps)
            yield view.lower(steps)


def programs_of_stages(
    graph: Graph, most_bytes: int, count: int, deadline: Deadline, allowed: Allowed
) -> Iterator[Program]:
    """Rotor-menus' programs within `count` budgets up to one, total bytes. Stages that are alike
    are solved once, and one table has them all. None where the graph has no chain, or the table
    takes longer than there is time."""
    if has_updates(graph):
        return
    view = linearize(graph)
    # A table is for twice the budget that it is given.
    table = AlternativesTable(view, -(-most_bytes // 2), SLOTS, deadline, allowed)
    if table.complete:
        yield from table.programs(count)
