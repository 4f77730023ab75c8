"""offload-exact: the integral problem solved by constraint programming (Offloading Problem 1)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from memopt.models.chain import Chain
from memopt.solvers.running import Deadline, SolverOptions
from memopt.strategies.base import CostModel
from memopt.strategies.offload.chain_offload import ChainOffload, OffloadChoice
from memopt.strategies.offload.dynprog import solve_dynprog
from memopt.strategies.offload.exact_model import ExactModel, choose_ticks
from memopt.strategies.offload.ordered import searched_amounts, stopped_at
from memopt.strategies.offload.problem import OffloadProblem
from memopt.strategies.offload.program import Transfers, best_schedule, ordered_transfers


@dataclass(frozen=True)
class OffloadExact(ChainOffload):
    """Moves activations to the host, chosen and timed exactly; for short chains of layers.

    The least makespan of whole transfers in any order.

    It starts from the best ordered schedule that DynProg and a local search know. The optimum is
    that of the paper's model, in which transfers begin at any time; the program keeps the order
    of the transfers, and its time is beside the bound in the Solution.

    Attributes:
        num_workers: of the solver. With one, the same problem gives the same plan; more are
            faster, and agree on the time when it is proved optimal.
        seed: of the solver.
        effort: the solver's deterministic time; 1 is some 2 to 5 seconds.
        resolution: ticks of time in a step, where times have no common measure.
        max_stages: more stages than that are refused.
    """

    num_workers: int = 1
    seed: int = 0
    effort: float = 5.0
    resolution: int = 200_000
    max_stages: int = 64

    name: ClassVar[str] = "offload-exact"
    references: ClassVar[tuple[str, ...]] = (*ChainOffload.references, "CP-SAT (OR-tools)")

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("num_workers", "effort", "resolution", "max_stages"):
            if getattr(self, field) <= 0:
                raise ValueError(f"OffloadExact: {field} must be positive")

    def why_not(self, cost_model: CostModel) -> str | None:
        if isinstance(cost_model, Chain) and len(cost_model) > self.max_stages:
            return (
                f"offload-exact plans up to max_stages={self.max_stages} stages, not "
                f"{len(cost_model)}; use dynprog"
            )
        return super().why_not(cost_model)

    def choose(self, problem: OffloadProblem, deadline: Deadline) -> OffloadChoice:
        host = self.host_budget_bytes
        planned = stopped_at(deadline, lambda stop: solve_dynprog(problem, 500, host, stop)).amounts
        amounts, horizon_s = stopped_at(
            deadline, lambda stop: searched_amounts(problem, planned, host, stop)
        )
        if not np.isfinite(horizon_s):
            horizon_s = 2 * _serial_s(problem)
        ticks = choose_ticks(problem, horizon_s, self.resolution)
        # Rounding up may cost every operation and transfer one tick.
        slack = 0 if ticks.exact else 4 * problem.stages + 2
        model = ExactModel(problem, ticks, ticks.up(horizon_s) + slack, self.host_budget_bytes)
        model.hint(amounts)
        options = SolverOptions(
            time_limit_s=None if math.isinf(deadline.at_s) else deadline.left_s,
            progress=deadline.progress,
            deterministic_s=self.effort,
            workers=self.num_workers,
            seed=self.seed,
        )
        found = model.solve(options)
        known = [ordered_transfers(np.flatnonzero(amounts).tolist())] if amounts.any() else []
        if found is not None:
            known.append(Transfers(found.out, found.back))
            known.append(ordered_transfers(found.out))
        transfers = _fastest(problem, known)
        if transfers is None:
            self.refuse_host(problem, problem.excess_bytes + 1)
        stats: dict[str, object] = {"proved": found is not None and found.proved}
        if found is None:
            return OffloadChoice(transfers, stats=stats)
        stats["exact_time_s"] = found.time_s
        return OffloadChoice(
            transfers,
            lower_bound_s=found.lower_bound_s,
            optimum_s=found.time_s if found.proved else None,
            stats=stats,
        )


def _serial_s(problem: OffloadProblem) -> float:
    """Return the time in which any plan can be done: nothing overlaps."""
    rates = 1 / problem.to_host_bytes_per_s + 1 / problem.from_host_bytes_per_s
    count = int(problem.movable.sum())
    moved = float(problem.sizes[problem.movable].sum()) * rates + 2 * count * problem.latency_s
    return problem.compute_time_s + moved


def _fastest(problem: OffloadProblem, known: list[Transfers]) -> Transfers | None:
    """Return the known decisions whose program is fastest; None if none has one."""
    timed = [(best_schedule(problem, transfers), transfers) for transfers in known]
    built = [(made[1].time_s, transfers) for made, transfers in timed if made is not None]
    return min(built, key=lambda entry: entry[0])[1] if built else None
