"""Rotor's strategies: one solve gives every budget's schedule of a chain.

The dynamic programs (Rotor, revolve, and those in which the last kept activation may move) share
this code; their tables are over slots of memory, or exact.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from memopt.errors import TableTooLargeError
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.status import Status
from memopt.programs.solution import Solution
from memopt.reductions.chain_replay import replay_chain
from memopt.solvers.recent import RecentAnswers
from memopt.solvers.running import Deadline, Stopped
from memopt.strategies.base import CostModel, Features, Progress, Strategy, solution_of
from memopt.strategies.rotor.model import bytes_of_slot
from memopt.strategies.rotor.plan_sets import CurvePoint, PlanSet, merged, plan_set, replayed
from memopt.strategies.rotor.schedules import (
    SolveLimits,
    TooLarge,
    root_count,
    segment_codes,
    several_counts,
    steps_of,
)
from memopt.strategies.store_all import store_all_bytes

DEFAULT_SLOTS = 500
FEWEST_SLOTS = 15
EXACT_TABLE_BYTES = 2**26
LEAST_STAGES, LEAST_S = 1000, 2e-9
"""Chains of more stages, planned in groups, do without the schedule of least memory, whose length
is the square of theirs; and those that have not so many seconds for each cube of their stages."""

BOUNDS_S = 2.5e-10
"""Seconds for each cube of the stages that revolve's least memory takes, of one core of 2024."""

_RECENT = RecentAnswers[PlanSet](capacity=8)
"""Recent plan sets: many budgets of one chain cost one solve."""

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
    def plan_set(self, chain: Chain, deadline: Deadline | None = None) -> PlanSet:
        """Return schedules of `chain` for every budget."""

    def curve(self, chain: Chain) -> tuple[CurvePoint, ...]:
        """Return the memory–time trade-off, by increasing peak (total bytes), from one solve."""
        return self._plans(chain, Deadline()).points

    def smallest_budget(self, chain: Chain) -> int:
        """Return the smallest budget, total bytes, at which `solve` finds a schedule."""
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
        limit_s = math.inf if time_limit_s is None else time_limit_s
        plans = self._plans(chain, Deadline(started + limit_s, progress))
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

    def _plans(self, chain: Chain, deadline: Deadline) -> PlanSet:
        key = (type(self), self, chain)
        return _RECENT.get(
            key, lambda: self.plan_set(chain, deadline), lambda plans: plans.complete
        )


def _solution(chain: Chain, plans: PlanSet, chosen: int, stats: Mapping[str, object]) -> Solution:
    """Return the solution with the schedule of a plan set's point."""
    steps = steps_of(plans.codes[chosen])
    timeline = replay_chain(chain, steps)
    bound_s = timeline.time_s if plans.optimal else chain.compute_time_s
    # Float sums depend on their order: a plan without recomputation is optimal all the same.
    return solution_of(steps, timeline, bound_s, 1e-12, stats)


@dataclass(frozen=True)
class TableStrategy(ChainStrategy):
    """A dynamic program whose table is over slots of memory, or exact.

    Attributes:
        slots: memory is counted in slots of 1/slots of the store-all memory, sizes rounded up;
            None: exact, with tables of step functions. Whatever the slots, a schedule is
            measured in exact bytes, and the smallest budget is exact.
        exact_stages: chains with at most so many stages are planned exactly in any case.
        table_bytes: largest table. An exact one is also held to 64 MiB unless slots is None;
            past that, slots are used; a slot table that is too large gets fewer slots. The
            solution's stats say so ("mode", "slots", "note").
    """

    slots: int | None = DEFAULT_SLOTS
    exact_stages: int = 40
    table_bytes: int = 2**30

    def __post_init__(self) -> None:
        if self.slots is not None and self.slots < 1:
            raise ValueError(
                f"{type(self).__name__}: slots must be at least 1, or None for exact memory; "
                f"got {self.slots!r}"
            )

    @abstractmethod
    def plan(self, chain: Chain, slot_bytes: int, exact: bool, limits: SolveLimits) -> PlanSet:
        """Return the schedules of one table; raises TooLarge."""

    def plan_set(self, chain: Chain, deadline: Deadline | None = None) -> PlanSet:
        deadline = deadline or Deadline()
        note: dict[str, object] = {}
        if self.slots is None or len(chain) <= self.exact_stages:
            most = self.table_bytes
            if self.slots is not None:
                most = min(most, EXACT_TABLE_BYTES)
            try:
                return self.plan(chain, 1, True, SolveLimits(most, deadline))
            except TooLarge as error:
                note = {"note": f"not exact: {error}"}
        slots = self.slots or DEFAULT_SLOTS
        while True:
            try:
                limits = SolveLimits(self.table_bytes, deadline)
                plans = self.plan(
                    chain, bytes_of_slot(store_all_bytes(chain), slots), False, limits
                )
                return plans.with_stats(None, slots=slots, **note)
            except TooLarge as error:
                note = {"note": f"fewer slots: {error}"}
                if slots <= FEWEST_SLOTS:
                    raise TableTooLargeError(
                        f"{self.name}: a chain of {len(chain)} stages needs tables of at least "
                        f"{error.needed_bytes} bytes, of {self.table_bytes} allowed: "
                        'raise table_bytes, or use strategy="rotor", which groups stages'
                    ) from error
                slots = max(FEWEST_SLOTS, slots // 2)


@dataclass(frozen=True)
class Rotor(TableStrategy):
    """Recomputes layers, chosen for the fastest step of a chain of layers; plans in seconds.

    The fastest memory persistent schedule (Rotor §4.4), with parameter gradients. Neighbouring
    stages of a chain that is too long for a table in the time and memory allowed are planned as
    one ("groups" in the stats); never slower than `sequential`.

    Attributes:
        persistent: False: the fastest weakly persistent schedule (Rotor §4.3, corrected), as
            `RotorOptimal`, in a factor L more time.
    """

    name: ClassVar[str] = "rotor"

    exact_stages: int = 80
    persistent: bool = True

    def plan_set(self, chain: Chain, deadline: Deadline | None = None) -> PlanSet:
        if self.persistent:
            return self._persistent(chain, deadline or Deadline())
        exact_stages = min(self.exact_stages, RotorOptimal.exact_stages)
        return RotorOptimal(self.slots, exact_stages, self.table_bytes).plan_set(chain, deadline)

    def _persistent(self, chain: Chain, deadline: Deadline) -> PlanSet:
        from memopt.strategies.rotor.grouping import (
            group_ends,
            grouped,
            most_stages,
            ungrouped,
            with_segments,
        )

        most = most_stages(deadline, self.slots or DEFAULT_SLOTS, self.table_bytes)
        if len(chain) <= max(most, self.exact_stages) or self.slots is None:
            plans = super().plan_set(chain, deadline)
            return plans if plans.optimal else with_segments(chain, plans)
        ends = group_ends(chain, most)
        coarse = super().plan_set(grouped(chain, ends), deadline)
        plans = with_segments(chain, ungrouped(chain, coarse, ends))
        if len(chain) > LEAST_STAGES or deadline.left_s < LEAST_S * len(chain) ** 3:
            return plans
        # A table that is stopped at once has the schedule of least memory.
        limits = SolveLimits(self.table_bytes, Deadline(-math.inf))
        slot_bytes = bytes_of_slot(store_all_bytes(chain), self.slots)
        return merged(plans, self.plan(chain, slot_bytes, False, limits))

    def plan(self, chain: Chain, slot_bytes: int, exact: bool, limits: SolveLimits) -> PlanSet:
        from memopt.strategies.rotor.tables import persistent_plans

        return persistent_plans(chain, slot_bytes, True, exact, limits)


@dataclass(frozen=True)
class Revolve(TableStrategy):
    """Recomputes from kept layer outputs, every layer right before its backward: classical AD.

    The heterogeneous AD model (Rotor §5.4): only activations are kept, and every backward comes
    right after its own F_all. Rotor's recurrence without the move that keeps ā.
    """

    name: ClassVar[str] = "revolve"

    exact_stages: int = 80

    def plan_set(self, chain: Chain, deadline: Deadline | None = None) -> PlanSet:
        needed_s = BOUNDS_S * len(chain) ** 3
        if deadline is not None and needed_s > max(deadline.left_s, 0.1):
            raise TableTooLargeError(
                f"{self.name}: a chain of {len(chain)} stages takes some {needed_s:.0f} seconds, "
                f"of {max(0.0, deadline.left_s):.3g} allowed: raise time_limit_s, or use "
                'strategy="rotor", which groups stages'
            )
        return super().plan_set(chain, deadline)

    def plan(self, chain: Chain, slot_bytes: int, exact: bool, limits: SolveLimits) -> PlanSet:
        from memopt.strategies.rotor.tables import persistent_plans

        return persistent_plans(chain, slot_bytes, False, exact, limits)


@dataclass(frozen=True)
class FloatingStrategy(TableStrategy):
    """A program of O(L^4) steps per slot.

    Attributes:
        most_stages: longer chains are grouped to this many stages. The grouped chain's schedules
            and Rotor's for the whole chain are weighed together; the stats say "groups".
    """

    kinds: ClassVar[int]

    most_stages: int = 120

    def plan_set(self, chain: Chain, deadline: Deadline | None = None) -> PlanSet:
        rotor = Rotor(self.slots, table_bytes=self.table_bytes)
        if len(chain) <= self.most_stages:
            plans = super().plan_set(chain, deadline)
            if plans.optimal or self.exact_stages >= rotor.exact_stages:
                return plans
            # Rotor may be exact where this table is in slots.
            return merged(plans, rotor.plan_set(chain, deadline))
        from memopt.strategies.rotor.grouping import group_ends, grouped, ungrouped

        persistent = rotor.plan_set(chain, deadline)
        if deadline is not None and deadline.over:
            return persistent
        ends = group_ends(chain, self.most_stages)
        coarse = super().plan_set(grouped(chain, ends), deadline)
        fine = ungrouped(chain, coarse, ends)
        return merged(persistent, fine).with_stats(
            coarse.complete and persistent.complete, **fine.stats
        )

    def plan(self, chain: Chain, slot_bytes: int, exact: bool, limits: SolveLimits) -> PlanSet:
        return floating(chain, slot_bytes, self.kinds, exact, limits)


@dataclass(frozen=True)
class RotorOptimal(FloatingStrategy):
    """Rotor with more freedom in what is dropped when; takes longer to plan.

    The fastest weakly memory persistent schedule (Rotor Definition 4.3; Theorem 4.7, corrected)
    without F_∅^ℓ while ā^ℓ is held: the last kept activation may move.
    """

    name: ClassVar[str] = "rotor-optimal"
    kinds: ClassVar[int] = 1


@dataclass(frozen=True)
class RotorFree(FloatingStrategy):
    """Rotor with the most freedom in what is dropped when; takes longest to plan.

    The fastest schedule when any value may be dropped at any time, beyond the paper: a saved ā
    may wait for its backward while its input is dropped and recomputed later.

    Nothing is recomputed before the next backward lacks it, and every ā is for its own backward.
    """

    name: ClassVar[str] = "rotor-free"
    kinds: ClassVar[int] = 4

    most_stages: int = 50


def floating(
    chain: Chain, slot_bytes: int, kinds: int, exact: bool, limits: SolveLimits
) -> PlanSet:
    """Return schedules of a floating program, and of the smaller classes if it is not exact."""
    from memopt.strategies.rotor.tables import floating_plans, persistent_plans

    if exact:
        try:
            return floating_plans(chain, slot_bytes, kinds, True, limits)
        except Stopped:
            return persistent_plans(chain, slot_bytes, True, True, limits).with_stats(False)
    smaller = (
        persistent_plans(chain, slot_bytes, True, False, limits)
        if kinds == 1
        else floating(chain, slot_bytes, 1, False, limits)
    )
    if not smaller.complete:
        return smaller
    try:
        return merged(floating_plans(chain, slot_bytes, kinds, False, limits), smaller)
    except Stopped:
        return smaller.with_stats(False)


BEST: Literal["best"] = "best"


@dataclass(frozen=True)
class Sequential(ChainStrategy):
    """Recomputes segments of equal length, as PyTorch's checkpoint_sequential does.

    Of every segment only the input is kept; the last one stores all.

    The layers (all stages but the loss) are cut as PyTorch's checkpoint_sequential cuts them:
    every segment but the last has ⌊layers / segments⌋ of them.

    Attributes:
        segments: how many; None: √layers, rounded; "best": the fastest that fits the budget
            of 10 counts from 2 to 2√layers, as in Rotor §5.4.
    """

    name: ClassVar[str] = "sequential"

    segments: int | Literal["best"] | None = None

    def __post_init__(self) -> None:
        if self.segments is None or self.segments == BEST:
            return
        if not isinstance(self.segments, int) or self.segments < 1:
            raise ValueError(
                'Sequential: segments must be None, "best" or a count from 1, '
                f"got {self.segments!r}"
            )

    def plan_set(self, chain: Chain, deadline: Deadline | None = None) -> PlanSet:
        counts = self.counts(len(chain) - 1)
        schedules = (np.array(segment_codes(len(chain), count), np.int64) for count in counts)
        return plan_set(replayed(chain, schedules), optimal=True)

    def counts(self, layers: int) -> tuple[int, ...]:
        """Return the numbers of segments tried on a chain of so many layers, without the loss."""
        most = max(1, layers)
        if self.segments is None:
            wanted = [root_count(most)]
        elif self.segments == BEST:
            wanted = several_counts(most)
        else:
            wanted = [int(self.segments)]
        return tuple(sorted({min(max(1, count), most) for count in wanted}))
