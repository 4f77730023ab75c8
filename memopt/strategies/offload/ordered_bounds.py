"""Lower bounds on the time of ordered schedules: Proposition 3, one per operation, Theorem 2."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from memopt.strategies.offload.ordered import eager_amounts, makespan_s
from memopt.strategies.offload.problem import OffloadProblem


def proposition_3_s(problem: OffloadProblem) -> float:
    """Return LB = max(Σ u_F + u_B, 2·max(0, M_peak - M)/β) (Proposition 3), seconds.

    The excess crosses the link once each way; with two rates, one term for each.
    """
    excess = problem.excess_bytes
    transfers = excess / problem.to_host_bytes_per_s + excess / problem.from_host_bytes_per_s
    return max(problem.compute_time_s, transfers)


def per_operation_s(problem: OffloadProblem) -> float:
    """Return a bound at least as good: what an operation lacks leaves before and returns after it.

    max over operations of max(time before, need/β) + its own time + max(time after, need/β). It
    holds for every schedule, unordered ones and links that work both ways at once included.
    """
    need = np.maximum(problem.need_bytes, 0)
    ends = np.cumsum(problem.durations_s)
    before = np.maximum(ends - problem.durations_s, need / problem.to_host_bytes_per_s)
    after = np.maximum(ends[-1] - ends, need / problem.from_host_bytes_per_s)
    return max(problem.compute_time_s, float((before + problem.durations_s + after).max()))


def fractional_optimum_s(problem: OffloadProblem) -> float:
    """Return the optimum when activations may be offloaded in part (Theorem 2), seconds.

    The no-wait eager ordered schedule of exactly M_peak - M bytes. Partial transfers only relax the
    problem, so this bounds every schedule on a link that does one transfer at a time; a latency is
    left out, as a schedule of fewer, larger activations pays it less often. Infinite if the
    capacity is below the floor.
    """
    relaxed = replace(problem, latency_s=0.0)
    return makespan_s(relaxed, eager_amounts(problem, problem.excess_bytes))


def lower_bound_s(problem: OffloadProblem, *, duplex: bool) -> float:
    """Return the best bound known for every integral schedule, seconds.

    Args:
        problem: a feasible problem.
        duplex: both directions overlap; then unordered schedules may beat Theorem 2.
    """
    bound = max(proposition_3_s(problem), per_operation_s(problem))
    if duplex:
        return bound
    return max(bound, fractional_optimum_s(problem))
