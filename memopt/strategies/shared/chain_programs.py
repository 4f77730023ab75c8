"""Programs of a graph's chain by Rotor: within one or several budgets, and of stages' menus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.steps import ChainStep
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.reductions.linearize import Linearization, linearize
from memopt.reductions.lower import lower_steps
from memopt.reductions.stage_map import has_updates
from memopt.reductions.step_linearization import linearize_step
from memopt.solvers.running import Deadline
from memopt.strategies.budget_search import best_that_fits
from memopt.strategies.moving.planning import fixed_graph
from memopt.strategies.rotor import Rotor
from memopt.strategies.shared.alternatives_table import SLOTS, AlternativesTable
from memopt.strategies.shared.graph_model import Allowed
from memopt.strategies.shared.incumbent import smaller, stored

SHARES = (0.9, 0.6, 0.35, 0.2, 0.1)
"""Shares of the room beside resident bytes for activations; the rest is for parameters."""


def rotor_programs(
    graph: Graph,
    budget_bytes: int | None,
    view: Linearization | None = None,
    deadline: Deadline | None = None,
) -> tuple[Program | None, Program]:
    """Plan the chain with Rotor.

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

    found = best_that_fits(chain_view, attempt, budget_bytes, deadline=until)
    if found.steps is not None:
        program = chain_view.lower(found.steps)
        return program, program
    assert found.smallest is not None
    assert found.smallest.steps is not None
    return None, smaller(graph, everything, chain_view.lower(found.smallest.steps))


def programs_of_chain(
    graph: Graph, budgets: Iterable[int], deadline: Deadline, in_place: bool = True
) -> Iterator[Program]:
    """Yield, for each of some budgets (total bytes), the fastest of Rotor's programs within it, or
    that of least memory if none is; computing in place where possible, unless that is left out."""
    if has_updates(graph):
        return
    view = linearize(graph)
    known = set[tuple[ChainStep, ...]]()
    for budget_bytes in budgets:
        if known and not deadline.left_s:
            return
        found = Rotor().solve(
            view.chain,
            budget_bytes,
            time_limit_s=deadline.left_s,
            progress=deadline.progress,
        )
        steps = found.steps if found.smallest is None else found.smallest.steps
        if steps is not None and steps not in known:
            known.add(steps)
            yield view.lower(steps) if in_place else lower_steps(view, steps)


def orders_of_stages(
    graph: Graph, most_bytes: int, count: int, deadline: Deadline, allowed: Allowed
) -> Iterator[Program]:
    """Yield Rotor-menus' schedules (see `AlternativesTable.order`) within `count` budgets up to
    one, total bytes. Like stages are solved once, and one table has all schedules. Yield none if
    the graph has no chain, or the table takes longer than there is time."""
    if has_updates(graph):
        return
    view = linearize(graph)
    # A table is for twice the budget that it is given.
    table = AlternativesTable(view, -(-most_bytes // 2), SLOTS, deadline, allowed)
    if table.complete:
        yield from table.orders(count)


def programs_of_step(graph: Graph, budget_bytes: int) -> Iterator[Program]:
    """Yield Rotor's programs of a whole step whose activations take some of the room."""
    if not has_updates(graph):
        return
    resident = fixed_graph(graph)
    view = linearize_step(resident)
    room = budget_bytes - (graph.resident_bytes - graph.movable_bytes)
    for share in SHARES:
        found = Rotor().solve(view.chain, graph.resident_bytes + int(share * room))
        steps = found.steps if found.smallest is None else found.smallest.steps
        if steps is not None:
            yield view.lower(steps)


BUDGETS, SWEPT = 10, 32
"""Larger budgets for recomputation by rotor and by stages."""


def rotor_programs_above(
    graph: Graph, whole: Program, limit_bytes: int, until: Deadline
) -> Iterator[Program]:
    """Yield rotor's programs within a limit and within larger budgets, up to what storing
    everything takes; `whole` does that."""
    more_bytes = replay(graph, whole).peak_bytes - limit_bytes
    budgets = [limit_bytes + part * more_bytes // BUDGETS for part in range(BUDGETS)]
    yield from programs_of_chain(graph, budgets, until, in_place=False)


def stage_orders_above(
    graph: Graph, whole: Program, limit_bytes: int, link: Device | None, until: Deadline,
    allowed: Allowed,
) -> Iterator[Program]:  # fmt: skip
    """Yield rotor-menus' schedules within a limit, and larger budgets as far as the link could take
    the difference; None: nothing moves."""
    timeline = replay(graph, whole)
    # It cannot take more during a step of twice the time; it may be infinitely fast.
    moved = 0.0 if link is None else 2 * timeline.time_s * link.to_host_bytes_per_s
    most_bytes = int(min(limit_bytes + moved, timeline.peak_bytes))
    yield from orders_of_stages(graph, most_bytes, SWEPT, until, allowed)
