"""A program with its figures and bound as a Solution, and a Solution for want of a program."""

from __future__ import annotations

from memopt.models.bounds import time_lower_bound
from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.strategies.base import Solution, Status


def solution(
    graph: Graph, program: Program, bound_s: float, proved: float, stats: dict[str, object]
) -> Solution:
    """The program's solution: optimal where its gap is at most `proved`.

    Args:
        graph: the cost model.
        program: within the budget.
        bound_s: for the strategy's class; programs outside it may be faster.
        proved: share of the bound.
        stats: the solution's.
    """
    timeline = replay(graph, program)
    bound_s = min(timeline.time_s, bound_s)
    gap = (timeline.time_s - bound_s) / bound_s if bound_s > 0 else 0.0
    return Solution(
        Status.OPTIMAL if gap <= proved else Status.FEASIBLE,
        program=program,
        peak_bytes=timeline.peak_bytes,
        time_s=timeline.time_s,
        lower_bound_s=bound_s,
        gap=gap,
        stats=stats,
    )


def without_plan(
    graph: Graph, smallest: Program, proved: bool, stats: dict[str, object]
) -> Solution:
    """No program within the budget, proved or not, and the one of the smallest peak known."""
    least = solution(graph, smallest, time_lower_bound(graph), 0.0, {})
    return Solution(
        Status.INFEASIBLE if proved else Status.UNKNOWN,
        smallest_budget_bytes=least.peak_bytes,
        smallest=least,
        stats=stats,
    )
