"""Claims about the best program that a search found: optimal, feasible or infeasible."""

from __future__ import annotations

import math

from memopt.models.bounds import needed_operators, time_lower_bound
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.instructions import Program
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.strategies.base import solution_of


def counted_exactly(graph: Graph) -> bool:
    """Tell whether proofs by MONeT's and Checkmate's programs hold for all programs of a graph that
    run operators again in their way.

    Both papers' operators write one tensor each, into a storage of its own, and all of them run.
    Programs here may need less: they may run an operator with several outputs twice between two
    others, once for each output; let an output take over the storage of a tensor that dies there;
    and leave out operators whose results nothing needs. Plans of the two programs are always valid.
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
    """Return the solution that consists of a program without transfers, see `solution_of` in
    `memopt.strategies.base`."""
    return solution_of(program, replay(graph, program), bound_s, proved, stats)


def unlimited(graph: Graph, program: Program) -> Solution:
    """Return the solution of the fastest program, whatever the memory, that moves nothing."""
    return solution(graph, program, math.inf, 0.0, {"chosen": "no limit"})


def without_plan(
    graph: Graph, smallest: Program, proved: bool, stats: dict[str, object]
) -> Solution:
    """Return a solution without a plan, infeasible if proved; name the smallest plan known."""
    least = solution(graph, smallest, time_lower_bound(graph), 0.0, {})
    return Solution(
        Status.INFEASIBLE if proved else Status.UNKNOWN,
        smallest_budget_bytes=least.peak_bytes,
        smallest=least,
        stats=stats,
    )
