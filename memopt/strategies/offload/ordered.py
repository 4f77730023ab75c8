"""The paper's own model: no-wait ordered schedules of a set of offloads.

There are two readings of when memory moves. Whole transfers (Problem 1, §3.1 E): the device copy is
free when the copy is complete, and a prefetch takes its room when it begins. Interruptible (Problem
2, and the fractional relaxation): continuously, at the rate of the link. The program that memopt
runs is replayed separately, by `memopt.programs.replay`.

The local search over sets of offloads is not in the paper. The dynamic program takes transfers as
interruptible; programs move whole activations, for which another set is often much better where
activations are large.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from memopt.solvers.running import Deadline, call_in_thread
from memopt.strategies.offload.problem import Bytes, OffloadProblem, Seconds

EVALUATIONS = 20_000
"""The most schedules that the local search replays, a few microseconds each."""
Flag: TypeAlias = npt.NDArray[np.bool_]
"""One flag, which a thread sets to stop another's search."""
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class OrderedSchedule:
    """Times of a no-wait ordered schedule, seconds.

    Attributes:
        starts_s: of the 2n operations.
        offloads_s: (start, end) of the copy of each x_j to the host; (0, 0) if it stays.
        prefetches_s: (start, end) of each copy back.
        makespan_s: end of B_0; infinite if the amounts do not make room for every operation.
    """

    starts_s: Seconds
    offloads_s: Seconds
    prefetches_s: Seconds
    makespan_s: float


def ordered_schedule(
    problem: OffloadProblem, amounts: Bytes, *, whole: bool = False
) -> OrderedSchedule:
    """Make the no-wait ordered schedule that offloads `amounts[j]` bytes of each x_j.

    Args:
        problem: chain, capacity and link.
        amounts: bytes of x_0..x_n to offload, 0 where it may not move.
        whole: whole transfers (Problem 1) instead of interruptible ones (Problem 2).
    """
    from memopt.strategies.offload import ordered_kernels

    return OrderedSchedule(*ordered_kernels.replay(problem.arrays, amounts, whole))


def makespan_s(problem: OffloadProblem, amounts: Bytes, *, whole: bool = False) -> float:
    """Return the makespan of `ordered_schedule`, seconds; infinite if it does not fit."""
    from memopt.strategies.offload import ordered_kernels

    return float(ordered_kernels.makespan(problem.arrays, amounts, whole))


def eager_amounts(problem: OffloadProblem, size_bytes: int) -> Bytes:
    """Return the bytes of each activation if the first `size_bytes` of movable ones are offloaded.

    The last one may be partial (§4.1). Fewer bytes are returned if not that many may move.
    """
    sizes = np.where(problem.movable, problem.sizes, 0)
    before = np.cumsum(sizes) - sizes
    amounts: Bytes = np.clip(size_bytes - before, 0, sizes)
    return amounts


def greedy_amounts(problem: OffloadProblem) -> Bytes:
    """Return Greedy's set: the first activations whose sizes reach the excess."""
    return problem.amounts(np.flatnonzero(eager_amounts(problem, problem.excess_bytes)))


def searched_amounts(
    problem: OffloadProblem,
    planned: Bytes | None,
    host_budget_bytes: int | None = None,
    stop: Flag | None = None,
) -> tuple[Bytes, float]:
    """Search for the best set by flips and exchanges that each make whole transfers faster.

    There are five starts: a planned set, Greedy's, every other activation (from the first, from the
    second), and all activations. The last three pause between copies; where activations are large,
    such sets are another local optimum. Of equally fast sets the first found is returned.

    Args:
        problem: chain, capacity and link.
        planned: bytes of each x_j, whole activations; None: no plan.
        host_budget_bytes: the most that may be offloaded.
        stop: one flag, which ends the search when another thread sets it.

    Returns:
        The amounts, all 0 if nothing fits, and the makespan of their no-wait ordered schedule,
        seconds; infinite then.
    """
    from memopt.strategies.offload import ordered_kernels

    movable = np.flatnonzero(problem.movable)
    starts = [] if planned is None else [planned]
    starts.append(greedy_amounts(problem))
    starts += map(problem.amounts, (movable[::2], movable[1::2], movable))
    host = np.inf if host_budget_bytes is None else float(host_budget_bytes)
    flag = np.zeros(1, np.bool_) if stop is None else stop
    best, best_s = np.zeros_like(problem.sizes), np.inf
    for start in starts:
        if start.sum() > host or not problem.fits(start):
            continue
        chosen, time_s = ordered_kernels.improve(problem.arrays, start > 0, host, EVALUATIONS, flag)
        if time_s < best_s:
            best, best_s = np.where(chosen, problem.sizes, 0), float(time_s)
    return best, best_s


def stopped_at(deadline: Deadline, search: Callable[[Flag], T]) -> T:
    """Run a compiled search in a thread of its own, and stop it at the deadline or at Ctrl-C; then
    return what it has."""
    stop = np.zeros(1, np.bool_)
    found = call_in_thread(
        lambda: search(stop),
        deadline.progress,
        lambda: "what to move",
        limit_s=None if math.isinf(deadline.at_s) else deadline.left_s,
        stop=lambda: stop.fill(True),
    )
    assert found is not None
    return found


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
