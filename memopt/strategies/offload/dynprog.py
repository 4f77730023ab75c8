"""The paper's own strategies: Greedy (Offloading §4) and DynProg (§5), with its recurrence.

That is optimal for ordered schedules whose transfers may be interrupted, when nothing is rounded
(`slots=None`); with slots, the paper's heuristic of §5.3.2.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from memopt.solvers.running import Deadline
from memopt.strategies.offload.chain_offload import ChainOffload, OffloadChoice
from memopt.strategies.offload.ordered import (
    Flag,
    eager_amounts,
    greedy_amounts,
    searched_amounts,
    stopped_at,
)
from memopt.strategies.offload.problem import Bytes, OffloadProblem
from memopt.strategies.offload.program import ordered_transfers
from memopt.strategies.offload.rounding import RecurrenceData, bump, recurrence_data


@dataclass(frozen=True)
class DynProg(ChainOffload):
    """Moves activations to the host, chosen to slow the step least; plans in seconds.

    Algorithm 1 in slots of memory, then the no-wait ordered schedule of its set.

    Attributes:
        slots: slots of the capacity (§5.3.2); None: nothing is rounded, for short chains.
        refine: improve the set by local search for whole transfers, which is what a program
            does; False: exactly the paper's set.
    """

    slots: int | None = 500
    refine: bool = True

    name: ClassVar[str] = "dynprog"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots is not None and self.slots < 1:
            raise ValueError(f"DynProg: slots must be at least 1 or None, got {self.slots}")

    def choose(self, problem: OffloadProblem, deadline: Deadline) -> OffloadChoice:
        result = stopped_at(
            deadline,
            lambda stop: solve_dynprog(problem, self.slots, self.host_budget_bytes, stop),
        )
        amounts = result.amounts
        # The rounded problem may have no schedule where the real one has.
        fallback = amounts is None
        if amounts is None:
            eager = greedy_amounts(problem)
            amounts = eager if self.within_host(int(eager.sum())) else None
        if amounts is None:
            self.refuse_host(problem, problem.excess_bytes + 1)
        planned = np.flatnonzero(amounts).tolist()
        if self.refine:
            refined, time_s = stopped_at(
                deadline,
                lambda stop: searched_amounts(problem, amounts, self.host_budget_bytes, stop),
            )
            amounts = refined if np.isfinite(time_s) else amounts
        return OffloadChoice(
            ordered_transfers(np.flatnonzero(amounts).tolist()),
            stats={
                "dynprog_set": tuple(planned),
                "rounds": result.rounds,
                "labels": result.labels,
                "labels_cut": result.cut,
                "greedy_fallback": fallback,
            },
        )


@dataclass(frozen=True)
class Greedy(ChainOffload):
    """Moves the first activations to the host, as many as the budget asks for; plans at once.

    The first k activations, k the smallest with Σ|x_i| ≥ M_peak - M (Theorem 2,
    rounded up). Without rounding it is the optimum of the fractional problem, which is part of
    every Solution's statistics (`fractional_optimum_s`)."""

    name: ClassVar[str] = "greedy"

    def choose(self, problem: OffloadProblem, deadline: Deadline) -> OffloadChoice:
        amounts = greedy_amounts(problem)
        size = int(amounts.sum())
        if not self.within_host(size):
            self.refuse_host(problem, size)
        return OffloadChoice(ordered_transfers(np.flatnonzero(amounts).tolist()))


LABELS_PER_STATE = 48
"""Labels with equal kept data that are followed; the stats count the sets cut off."""


@dataclass(frozen=True, slots=True)
class DynProgResult:
    """The result of the dynamic program.

    Attributes:
        amounts: bytes of each x_j to offload; None: nothing was found.
        idle_s: idle time of the recurrences, seconds (of the rounded data).
        rounds: how often sizes had to be rounded up more (§5.3.2), plus one.
        labels: labels made in the last round.
        cut: labels cut off by LABELS_PER_STATE.
    """

    amounts: Bytes | None
    idle_s: float
    rounds: int
    labels: int
    cut: int


def solve_dynprog(
    problem: OffloadProblem,
    slots: int | None,
    host_budget_bytes: int | None = None,
    stop: Flag | None = None,
) -> DynProgResult:
    """Run Algorithm 1, and with slots the iterative correction of the rounded sizes.

    Args:
        problem: a problem whose capacity is at least its floor.
        slots: slots of the capacity; None: nothing is rounded, at a cost that grows fast.
        host_budget_bytes: the most that may be offloaded.
        stop: one flag; when another thread sets it, nothing is found.
    """
    n = problem.stages
    problem = _finite(problem)
    data = recurrence_data(problem, slots)
    exact = problem.sizes[:n] / data.unit_bytes
    host = np.inf if host_budget_bytes is None else host_budget_bytes / data.unit_bytes
    rounds = 0
    flag = np.zeros(1, np.bool_) if stop is None else stop
    while True:
        rounds += 1
        offloaded, idle, labels, cut = _run(problem, data, slots is None, host, flag)
        if not np.isfinite(idle):
            return DynProgResult(None, idle, rounds, labels, cut)
        amounts = problem.amounts(np.flatnonzero(offloaded))
        over = host_budget_bytes is not None and int(amounts.sum()) > host_budget_bytes
        if problem.fits(amounts) and not over:
            idle_s = float(idle) * data.unit_bytes / problem.to_host_bytes_per_s
            return DynProgResult(amounts, idle_s, rounds, labels, cut)
        if over:
            host -= 1
            continue
        sizes = data.sizes.copy()
        # The paper corrects one size a round; twice as many each round needs few rounds.
        bumped = [bump(sizes, exact, ~offloaded) for _ in range(2 ** min(rounds - 1, 10))]
        if not bumped[0]:
            return DynProgResult(None, float("inf"), rounds, labels, cut)
        data = data.with_sizes(sizes)


def _finite(problem: OffloadProblem) -> OffloadProblem:
    """Replace infinite rates by very fast ones, which the recurrences can multiply."""
    fast = 1e9 * (1.0 + float(problem.sizes.sum()))
    return replace(
        problem,
        to_host_bytes_per_s=min(problem.to_host_bytes_per_s, fast),
        from_host_bytes_per_s=min(problem.from_host_bytes_per_s, fast),
    )


def _run(
    problem: OffloadProblem, data: RecurrenceData, exact: bool, host: float, stop: Flag
) -> tuple[npt.NDArray[np.bool_], float, int, int]:
    """Run the dynamic program once, bounded by the first eager set that fits the units."""
    from memopt.strategies.offload import dynprog_kernels as kernels

    limit = np.inf
    for slack in (0.0, 1.0, 4.0, 16.0):
        size = problem.excess_bytes + slack * data.unit_bytes
        eager = eager_amounts(problem, int(size))[: problem.stages] > 0
        if data.sizes[eager].sum() > host:
            break
        limit = kernels.evaluate(data, eager & data.movable)
        if np.isfinite(limit):
            break
    # A relative allowance for the order in which times are added up.
    limit += 1e-9 * (1.0 + abs(limit)) if np.isfinite(limit) else 0.0
    return kernels.solve(data, limit, host, LABELS_PER_STATE, exact, stop)
