"""What may be claimed of the best program that a search found."""

from __future__ import annotations

from memopt.models.bounds import needed_operators, relative_gap, time_lower_bound
from memopt.models.graph import Graph
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.strategies.base import Solution, Status


def counted_exactly(graph: Graph) -> bool:
    """Whether what MONeT's and Checkmate's programs prove of a graph holds for all its programs
    that run operators again in their way.

    Both papers' operators write one tensor each, into a storage of its own, and all of them run.
    Here, a program may do with less: it may run an operator with several outputs twice between two
    others, once for each output; let an output take over the storage of what dies there; and leave
    out operators whose results nothing needs. A plan of the programs is a plan in any case.
    """
    plain = all(
        len(operator.writes) <= 1
        and not operator.in_place
        and not any(choice.in_place for choice in operator.implementations)
        for operator in graph.operators
    )
    return plain and len(needed_operators(graph)) == len(graph.operators)


def solution(
    graph: Graph, program: Program, bound_s: float, proved: float, stats: dict[str, object]
) -> Solution:
    """Make the solution of a program: optimal where its gap is at most `proved`.

    Args:
        graph: the cost model.
        program: within the budget.
        bound_s: for the strategy's class; programs outside it may be faster.
        proved: share of the bound.
        stats: the solution's.
    """
    timeline = replay(graph, program)
    bound_s = min(timeline.time_s, bound_s)
    # Not by the gap, which is 0 for a bound of 0.
    optimal = timeline.time_s <= bound_s * (1 + proved)
    return Solution(
        Status.OPTIMAL if optimal else Status.FEASIBLE,
        program=program,
        peak_bytes=timeline.peak_bytes,
        time_s=timeline.time_s,
        lower_bound_s=bound_s,
        gap=relative_gap(timeline.time_s, bound_s),
        stats=stats,
    )


def without_plan(
    graph: Graph, smallest: Program, proved: bool, stats: dict[str, object]
) -> Solution:
    """Say that there is no program within the budget, proved or not; name the smallest known."""
    least = solution(graph, smallest, time_lower_bound(graph), 0.0, {})
    return Solution(
        Status.INFEASIBLE if proved else Status.UNKNOWN,
        smallest_budget_bytes=least.peak_bytes,
        smallest=least,
        stats=stats,
    )
