"""Local search over sets of offloads, by what whole transfers cost.

The dynamic program takes transfers as interruptible; programs move whole activations, for which
another set is often much better where activations are large. Not in the paper.
"""

from __future__ import annotations

import numpy as np

from memopt.strategies.offload.bounds import greedy_amounts
from memopt.strategies.offload.problem import Bytes, OffloadProblem

EVALUATIONS = 20_000
"""Schedules replayed at most, a few microseconds each."""


def improved_amounts(
    problem: OffloadProblem, amounts: Bytes, host_budget_bytes: int | None = None
) -> tuple[Bytes, float]:
    """A set reached by flips and exchanges from another, each faster in whole transfers.

    Args:
        problem: chain, capacity and link.
        amounts: bytes of each x_j, whole activations.
        host_budget_bytes: the most that may be offloaded.

    Returns:
        The amounts and the makespan of their no-wait ordered schedule, seconds; infinite if
        neither the start nor anything found fits.
    """
    from memopt.strategies.offload import ordered_kernels

    host = np.inf if host_budget_bytes is None else float(host_budget_bytes)
    chosen, time_s = ordered_kernels.improve(problem.arrays, amounts > 0, host, EVALUATIONS)
    return np.where(chosen, problem.sizes, 0), float(time_s)


def searched_amounts(
    problem: OffloadProblem, planned: Bytes | None, host_budget_bytes: int | None = None
) -> tuple[Bytes, float]:
    """The best of `improved_amounts` from a planned set, from Greedy's, and from three with pauses.

    Where activations are large, sets whose copies have pauses between them are another valley: one
    activation in two, either parity, and all less what turns out superfluous. At equal times the
    set that comes first stays.

    Returns:
        The amounts, all 0 if nothing fits, and the time, infinite then.
    """
    movable = np.flatnonzero(problem.movable)
    starts = [] if planned is None else [planned]
    starts.append(greedy_amounts(problem))
    starts += map(problem.amounts, (movable[::2], movable[1::2], movable))
    best, best_s = np.zeros_like(problem.sizes), np.inf
    for start in starts:
        over = host_budget_bytes is not None and start.sum() > host_budget_bytes
        if over or not problem.fits(start):
            continue
        amounts, time_s = improved_amounts(problem, start, host_budget_bytes)
        best, best_s = (amounts, time_s) if time_s < best_s else (best, best_s)
    return best, best_s
