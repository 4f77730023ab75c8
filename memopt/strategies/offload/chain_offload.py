"""The base of chain offloading strategies: checks, program, replays, the Solution."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, NoReturn

import numpy as np

from memopt.errors import InfeasibleBudgetError
from memopt.models.chain import Chain
from memopt.models.checks import check_bytes
from memopt.models.device import Device
from memopt.models.status import Status
from memopt.models.steps import ChainStep, Move
from memopt.programs.replay import Timeline
from memopt.programs.solution import Solution
from memopt.solvers.running import Deadline
from memopt.strategies.base import CostModel, Features, Progress, Strategy, solution_of
from memopt.strategies.offload.ordered import (
    fractional_optimum_s,
    greedy_amounts,
    lower_bound_s,
    makespan_s,
    proposition_3_s,
)
from memopt.strategies.offload.problem import OffloadProblem, offload_problem
from memopt.strategies.offload.program import Transfers, best_schedule, ordered_transfers

PAPER = "Optimal GPU-CPU Offloading Strategies (Beaumont, Eyraud-Dubois, Shilova, 2020)"


def linked(strategy: Strategy, device: Device | None) -> Device:
    """Return the device whose link the strategy plans for.

    Raises:
        ValueError: no device is named.
    """
    if device is None:
        raise ValueError(
            f"{strategy.name} moves data: pass device=memopt.Device(to_host_bytes_per_s=...)"
        )
    return device


@dataclass(frozen=True)
class OffloadChoice:
    """A strategy's decision about what to move.

    Attributes:
        transfers: the moved activations, in order.
        lower_bound_s: a proved bound on the time of every whole-transfer schedule, if any.
        optimum_s: the least time of all of them, up to the resolution it was proved with.
        stats: counts for the solution's stats.
    """

    transfers: Transfers
    lower_bound_s: float = 0.0
    optimum_s: float | None = None
    stats: Mapping[str, object] = field(default_factory=dict)


SCHEDULE_S, MOST_KEPT = 3e-4, 0.5
"""Seconds per stage that a choice leaves for making its schedule, and their most of the time left.
"""


@dataclass(frozen=True)
class ChainOffload(Strategy):
    """A strategy that moves saved activations ā^ℓ (and a^0) to the host and back.

    Attributes:
        host_budget_bytes: the most that may be on the host at once; None: no limit.
        offload_input: whether a^0 may move, as in the paper; False where the caller keeps the
            input on the device anyway.
    """

    host_budget_bytes: int | None = None
    offload_input: bool = True

    needs: ClassVar[str] = "chain"
    features: ClassVar[Features] = Features(offload=True)
    references: ClassVar[tuple[str, ...]] = (PAPER,)

    def __post_init__(self) -> None:
        if self.host_budget_bytes is not None:
            check_bytes(type(self).__name__, host_budget_bytes=self.host_budget_bytes)

    @abstractmethod
    def choose(self, problem: OffloadProblem, deadline: Deadline) -> OffloadChoice:
        """Choose what to move, for a problem with an excess and at least the smallest capacity."""

    def smallest_capacity(self, problem: OffloadProblem) -> int:
        """Return the smallest capacity with a plan of the strategy, bytes, resident excluded."""
        return problem.floor_bytes

    def least_choice(self, problem: OffloadProblem) -> OffloadChoice:
        """Choose what to move at the smallest capacity, at once: Greedy's set."""
        return OffloadChoice(ordered_transfers(np.flatnonzero(greedy_amounts(problem)).tolist()))

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        started = time.perf_counter()
        limit_s = math.inf if time_limit_s is None else time_limit_s
        deadline = Deadline(time.monotonic() + limit_s, progress)
        chain = self.taken(cost_model, Chain)
        problem = offload_problem(
            chain, budget_bytes, linked(self, device), offload_input=self.offload_input
        )
        if problem.capacity_bytes < self.smallest_capacity(problem):
            least = replace(problem, capacity_bytes=self._least_feasible(problem))
            return Solution(
                Status.INFEASIBLE,
                smallest_budget_bytes=chain.resident_bytes + least.capacity_bytes,
                smallest=_solution(least, self.least_choice(least), started, deadline),
            )
        if not self.within_host(problem.excess_bytes):
            self.refuse_host(problem, problem.excess_bytes)
        if problem.excess_bytes == 0:
            choice = OffloadChoice(Transfers((), ()))
        else:
            kept_s = min(SCHEDULE_S * len(chain), MOST_KEPT * deadline.left_s)
            choice = self.choose(problem, Deadline(deadline.at_s - kept_s, progress))
        return _solution(problem, choice, started, deadline)

    def refuse_host(self, problem: OffloadProblem, wanted_bytes: int) -> NoReturn:
        """Raise the error that says that the host budget is too small.

        Raises:
            InfeasibleBudgetError: always; it names the host bytes this budget asks for.
        """
        resident = problem.chain.resident_bytes
        budget = resident + problem.capacity_bytes
        raise InfeasibleBudgetError(
            f"{self.name}: host_budget_bytes={self.host_budget_bytes or 0} is too small: a device "
            f"budget of {budget} bytes puts at least {wanted_bytes} bytes on the host; raise "
            "either",
            budget_bytes=budget,
            smallest_budget_bytes=resident + self._least_feasible(problem),
        )

    def _least_feasible(self, problem: OffloadProblem) -> int:
        """Return the smallest capacity with a plan that also keeps the host budget."""
        return max(self.smallest_capacity(problem), self._least_with_host(problem))

    def _least_with_host(self, problem: OffloadProblem) -> int:
        """Return the smallest capacity that Greedy meets within the host budget, bytes: the first
        activations move, whole, as long as the host has room for them."""
        amounts = np.where(problem.movable, problem.sizes, 0)
        if self.host_budget_bytes is not None:
            amounts = np.where(np.cumsum(amounts) <= self.host_budget_bytes, amounts, 0)
        return problem.least_capacity(amounts)

    def within_host(self, amounts_bytes: int) -> bool:
        """Tell whether so many bytes fit the host budget."""
        return self.host_budget_bytes is None or amounts_bytes <= self.host_budget_bytes


def _solution(
    problem: OffloadProblem, choice: OffloadChoice, started: float, deadline: Deadline
) -> Solution:
    built = best_schedule(problem, choice.transfers, deadline)
    if built is None:
        raise AssertionError("a set of offloads that fits has a program")
    steps, timeline = built
    bound = max(lower_bound_s(problem, duplex=problem.device.duplex), choice.lower_bound_s)
    stats = {
        **_replays(problem, choice.transfers, steps, timeline),
        **choice.stats,
        "solve_s": time.perf_counter() - started,
    }
    found = solution_of(steps, timeline, bound, 1e-9, stats)
    if choice.optimum_s is not None and timeline.time_s <= choice.optimum_s * (1 + 1e-9):
        return replace(found, status=Status.OPTIMAL)
    return found


def _replays(
    problem: OffloadProblem,
    transfers: Transfers,
    steps: tuple[ChainStep, ...],
    timeline: Timeline,
) -> dict[str, object]:
    """Replay the same decisions in the paper's model, for comparison with the program's figures."""
    amounts = problem.amounts(np.array(transfers.out, dtype=np.int64))
    return {
        "offloaded": tuple(step.stage for step in steps if step.move is Move.OFFLOAD),
        "chosen": tuple(sorted(transfers.out)),
        "chosen_bytes": int(amounts.sum()),
        "paper_time_s": makespan_s(problem, amounts),
        "paper_whole_time_s": makespan_s(problem, amounts, whole=True),
        "proposition_3_s": proposition_3_s(problem),
        "fractional_optimum_s": fractional_optimum_s(problem),
        "stall_s": timeline.total_stall_s,
        "host_peak_bytes": timeline.host_peak_bytes,
    }
