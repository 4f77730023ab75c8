"""Replay of the paper's own model: no-wait ordered schedules of a set of offloads.

Two readings of when memory moves. Whole transfers (Problem 1, §3.1 E): the device copy is free
when the copy is complete, and a prefetch takes its room when it begins. Interruptible (Problem 2,
and the fractional relaxation): continuously, at the rate of the link. The program that memopt runs
is replayed apart, by `memopt.programs.replay`.
"""

from __future__ import annotations

from dataclasses import dataclass

from memopt.strategies.offload.problem import Bytes, OffloadProblem, Seconds


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
    """The no-wait ordered schedule that offloads `amounts[j]` bytes of each x_j.

    Args:
        problem: chain, capacity and link.
        amounts: bytes of x_0..x_n to offload, 0 where it may not move.
        whole: whole transfers (Problem 1) instead of interruptible ones (Problem 2).
    """
    from memopt.strategies.offload import ordered_kernels

    return OrderedSchedule(*ordered_kernels.replay(problem.arrays, amounts, whole))


def makespan_s(problem: OffloadProblem, amounts: Bytes, *, whole: bool = False) -> float:
    """Makespan of `ordered_schedule`, seconds; infinite if it does not fit."""
    from memopt.strategies.offload import ordered_kernels

    return float(ordered_kernels.makespan(problem.arrays, amounts, whole))
