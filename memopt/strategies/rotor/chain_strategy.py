"""What Rotor's strategies share: one solve gives every budget's schedule of a chain."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.reductions.chain_replay import replay_chain
from memopt.strategies.base import CostModel, Features, Progress, Solution, Status, Strategy
from memopt.strategies.rotor.codes import steps_of
from memopt.strategies.rotor.curve import CurvePoint, PlanSet, RecentPlanSets

_RECENT = RecentPlanSets(capacity=8)

ROTOR_PAPER = (
    "Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: Optimal Re-Materialization Strategies "
    "for Heterogeneous Chains, ACM TOMS 2024"
)


class ChainStrategy(Strategy):
    """A strategy that plans chains, every budget from one set of schedules."""

    needs: ClassVar[str] = "chain"
    features: ClassVar[Features] = Features(recompute=True)
    references: ClassVar[tuple[str, ...]] = (ROTOR_PAPER,)

    @abstractmethod
    def plan_set(
        self, chain: Chain, deadline_s: float | None = None, progress: Progress | None = None
    ) -> PlanSet:
        """Schedules of `chain` for every budget; `deadline_s` is on time.monotonic's clock."""

    def curve(self, chain: Chain) -> tuple[CurvePoint, ...]:
        """The whole memory–time trade-off, by increasing peak (total bytes), from one solve."""
        return self._plans(chain, None, None).points

    def smallest_budget(self, chain: Chain) -> int:
        """The smallest budget, total bytes, at which `solve` finds a schedule."""
        return self.curve(chain)[0].peak_bytes

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        chain = self.taken(cost_model, Chain)
        started = time.monotonic()
        deadline = None if time_limit_s is None else started + time_limit_s
        plans = self._plans(chain, deadline, progress)
        stats = {**plans.stats, "solve_s": time.monotonic() - started}
        chosen = plans.at(budget_bytes)
        if chosen is None:
            return Solution(
                Status.INFEASIBLE if plans.complete else Status.UNKNOWN,
                smallest_budget_bytes=plans.points[0].peak_bytes,
                smallest=_solution(chain, plans, 0, stats),
                stats=stats,
            )
        return _solution(chain, plans, chosen, stats)

    def _plans(self, chain: Chain, deadline_s: float | None, progress: Progress | None) -> PlanSet:
        return _RECENT.get(
            (type(self), self, chain), lambda: self.plan_set(chain, deadline_s, progress)
        )


def _solution(chain: Chain, plans: PlanSet, chosen: int, stats: Mapping[str, object]) -> Solution:
    """The schedule of a plan set's point."""
    steps = steps_of(plans.codes[chosen])
    timeline = replay_chain(chain, steps)
    least = chain.compute_time_s
    bound = timeline.time_s if plans.optimal else min(least, timeline.time_s)
    # Sums of floats in another order: a plan without recomputation is optimal all the same.
    optimal = plans.optimal or timeline.time_s <= least * (1 + 1e-12)
    return Solution(
        Status.OPTIMAL if optimal else Status.FEASIBLE,
        steps=steps,
        peak_bytes=timeline.peak_bytes,
        time_s=timeline.time_s,
        lower_bound_s=bound,
        gap=(timeline.time_s - bound) / bound if bound > 0 else 0.0,
        stats=stats,
    )
