"""Uses memory that the chain's accounting leaves free: plans of larger chain budgets that still
fit.

A chain counts every stage's overheads at their worst, so the program lowered from a chain schedule
needs at most the schedule's memory, and often less. A schedule planned for more than the budget may
therefore fit it once lowered: the fastest such schedule is searched here, by bisection over the
chain's budget.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.chain_view import ChainView
from memopt.solvers.running import Deadline
from memopt.strategies.store_all import chain_steps

PROBES, FEWER_PROBES, MANY = 10, 3, 8000
"""Larger chain budgets tried; fewer where there are so many operators that each takes long."""

Attempt = Callable[[int | None], Solution]
"""attempt(total bytes; None: no limit): a strategy's solution of its cost model."""


def lowered_peak(view: ChainView, solution: Solution) -> int | None:
    """Return the replayed peak, total bytes, of a chain solution's program; None without one."""
    if solution.steps is None:
        return None
    return replay(view.graph, view.lower(solution.steps)).peak_bytes


def smallest_plan(answer: Solution, attempt: Attempt) -> Solution | None:
    """Return the plan of the smallest budget that a solution names; its own plan, if it has one."""
    if answer.plans:
        return answer
    if answer.smallest is None and answer.smallest_budget_bytes is not None:
        again = attempt(answer.smallest_budget_bytes)
        return again if again.plans else again.smallest
    return answer.smallest


def smallest_budget(view: ChainView, attempt: Attempt) -> tuple[int, Solution] | None:
    """Return (total bytes of the strategy's smallest chain schedule once lowered; its solution)."""
    least = smallest_plan(attempt(1), attempt)
    peak_bytes = None if least is None else lowered_peak(view, least)
    return None if least is None or peak_bytes is None else (peak_bytes, _looser(view.graph, least))


def best_that_fits(
    view: ChainView,
    attempt: Attempt,
    budget_bytes: int,
    probes: int = PROBES,
    deadline: Deadline | None = None,
) -> Solution:
    """Return the fastest solution found whose program fits the budget.

    Args:
        view: the chain, and the graph that it stands for.
        attempt: solves the chain for a budget.
        budget_bytes: total bytes.
        probes: larger chain budgets to try; 0 where a solve is slow.
        deadline: no more are tried after it.

    Returns:
        A solution with a schedule, or none with the smallest budget known. Unless nothing is
        recomputed it is FEASIBLE and carries the trivial bound: the chain's own optimum at the
        budget does not bound programs, which need less memory than their schedules.
    """
    best = attempt(budget_bytes)
    if best.steps is not None:
        best = _looser(view.graph, best)
    low = budget_bytes
    if best.steps is None:
        smallest = smallest_plan(best, attempt)
        peak_bytes = None if smallest is None else lowered_peak(view, smallest)
        if smallest is None or peak_bytes is None:
            return replace(best, smallest_budget_bytes=None)
        smallest = _looser(view.graph, smallest)
        if peak_bytes > budget_bytes:
            return replace(best, smallest_budget_bytes=peak_bytes, smallest=smallest)
        if best.status is Status.UNKNOWN:
            return smallest
        best, low = smallest, best.smallest_budget_bytes or budget_bytes
    high = replay_chain(view.chain, chain_steps(view.chain)).peak_bytes
    took_s = 0.0
    for _ in range(probes):
        # What is found is validated and replayed once more.
        if deadline is not None and (not deadline.left_s or deadline.left_s < 2 * took_s):
            break
        if high - low <= max(1, budget_bytes // 2000) or _free(view.graph, best):
            break
        middle, begin_s = (low + high) // 2, time.monotonic()
        probe = attempt(middle)
        peak_bytes = lowered_peak(view, probe)
        took_s = time.monotonic() - begin_s
        if peak_bytes is None or peak_bytes > budget_bytes:
            high = middle
            continue
        low = middle
        if probe.time_s is not None and best.time_s is not None and probe.time_s < best.time_s:
            best = _looser(view.graph, probe)
    return best


def _free(graph: Graph, solution: Solution) -> bool:
    """Tell whether nothing is recomputed: no schedule is faster."""
    return solution.time_s is not None and solution.time_s <= graph.compute_time_s * (1 + 1e-12)


def _looser(graph: Graph, solution: Solution) -> Solution:
    bound_s = min(graph.compute_time_s, solution.time_s or graph.compute_time_s)
    return solution.bounded(bound_s, _free(graph, solution))
