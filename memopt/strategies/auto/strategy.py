"""auto: runs the strategies that fit, one after the other, and keeps the fastest valid plan."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import ClassVar

from memopt.models.bounds import relative_gap, time_lower_bound
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.solution import Solution
from memopt.solvers.running import Deadline
from memopt.strategies.base import CostModel, Features, Progress, Strategy
from memopt.strategies.shared.members import Member, MemberOutcome, fitting, for_forward
from memopt.strategies.singles import SINGLE_STRATEGIES

DEFAULT_TIME_LIMIT_S = 60.0
LEFT_OUT = frozenset({"checkmate", "checkmate-rounding", "joint"})
"""Not run by auto: slow solvers whose place monet takes, and joint, which starts from other
members' plans itself and wants all of the time."""


@dataclass(frozen=True)
class Auto(Strategy):
    """Tries the others within one time limit and keeps the fastest plan within the budget.

    All plans are validated and replayed with the same semantics before they are compared, and no
    plan is slower than that of a single strategy in the time it had here. The solution's stats
    say what each of them did ("tried"), who won ("chosen") and why ("reason"). A plan in which
    nothing runs twice or waits ends the search: there is no faster one. Of equally fast plans
    the one of the strategy asked first is taken. Where the time ends without a plan, members that
    have one at once are asked for it ("at_once"). Where there is no backward only those are
    asked whose plans may lower its memory, monet before those that only move or reorder.

    With a time limit that stops a member, another run may give another plan; "tried" says how
    long each took.

    Attributes:
        members: what to try, in this order; empty: all strategies of `memopt.strategies()` but
            checkmate, its rounding and joint, those that move data only over a link of known speed.
        time_limit_s: seconds for all of them together, where `solve` is given no limit.
    """

    members: tuple[Strategy, ...] = ()
    time_limit_s: float = DEFAULT_TIME_LIMIT_S

    name: ClassVar[str] = "auto"
    needs: ClassVar[str] = "any"
    features: ClassVar[Features] = Features(
        recompute=True, offload=True, order=True, place=True, implementations=True
    )
    decides_in_place: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.time_limit_s > 0:
            raise ValueError(f"Auto: time_limit_s must be positive, got {self.time_limit_s!r}")
        if any(isinstance(member, Auto) for member in self.members):
            raise ValueError("Auto: an auto cannot be a member of an auto")

    def candidates(self, device: Device | None) -> tuple[Strategy, ...]:
        """Return the strategies to try, in order, before their fit to the cost model is known."""
        if self.members:
            return self.members
        # Over a link of unknown speed every transfer would look free.
        linked = device is not None and device.is_linked
        return tuple(
            member
            for member in SINGLE_STRATEGIES
            if member.name not in LEFT_OUT and (linked or not member.features.offload)
        )

    def solve(
        self,
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        started = time.monotonic()
        end_s = started + (self.time_limit_s if time_limit_s is None else time_limit_s)
        members, refused = fitting(cost_model, self.candidates(device))
        if not self.members and isinstance(cost_model, Graph) and cost_model.is_forward:
            members, without = for_forward(members)
            refused += without
        if budget_bytes is None and not self.members:
            members = tuple(sorted(members, key=_without_a_budget))
        least_s = time_lower_bound(cost_model)
        outcomes: list[MemberOutcome] = []
        at_once: list[MemberOutcome] = []
        for index, member in enumerate(members):
            report = _part(progress, index, len(members), member.strategy.name)
            deadline = Deadline(end_s, report)
            over = deadline.passed(0.0, "begins")
            planned = any(outcome.plans for outcome in (*outcomes, *at_once))
            if over and (planned or (index > 0 and not member.quick)):
                # Without a plan so far, ask the members that have one at once all the same.
                continue
            # Members share the time that those before them leave over.
            share_s = deadline.left_s / (len(members) - index)
            try:
                outcome = member.run(budget_bytes, device or Device(), share_s, report)
            except KeyboardInterrupt:
                break
            (at_once if over else outcomes).append(outcome)
            if outcome.plans and outcome.time_s <= least_s * (1 + 1e-12):
                break
        tried = tuple(outcome.line for outcome in outcomes)
        asked = {outcome.name for outcome in outcomes}
        left = tuple(m.strategy.name for m in members if m.strategy.name not in asked)
        stats: dict[str, object] = {"tried": tried, "not_tried": left, "refused": refused}
        if at_once:
            stats["at_once"] = tuple(outcome.line for outcome in at_once)
        stats["solve_s"] = time.monotonic() - started
        outcomes += at_once
        best = min((o for o in outcomes if o.plans), key=lambda o: o.time_s, default=None)
        if best is None:
            return _without_plan(outcomes, bool(left), stats)
        return _with_plan(best, outcomes, bool(left), least_s, stats)


def _without_a_budget(member: Member) -> int:
    """Rank a member without a budget: the step as it is, then the fastest implementations, which
    are found at once, then the others."""
    features = member.strategy.features
    return 0 if features == Features() else 1 if features.implementations else 2


def _part(progress: Progress | None, index: int, count: int, name: str) -> Progress | None:
    if progress is None:
        return None
    whole = progress
    return lambda fraction, what: whole((index + fraction) / count, f"{name}: {what}")


def _without_plan(outcomes: list[MemberOutcome], left: bool, stats: dict[str, object]) -> Solution:
    found = [outcome.solution for outcome in outcomes]
    known = [x for x in found if x.smallest is not None and x.smallest_budget_bytes is not None]
    least = min(known, key=lambda x: x.smallest_budget_bytes or 0, default=None)
    proved = not left and all(solution.status is Status.INFEASIBLE for solution in found)
    return Solution(
        Status.INFEASIBLE if proved and known else Status.UNKNOWN,
        smallest_budget_bytes=None if least is None else least.smallest_budget_bytes,
        smallest=None if least is None else least.smallest,
        stats=stats,
    )


def _with_plan(
    best: MemberOutcome,
    outcomes: list[MemberOutcome],
    left: bool,
    least_s: float,
    stats: dict[str, object],
) -> Solution:
    """Return the winner's plan; the bound holds for the members' classes together."""
    known = [outcome.solution.lower_bound_s for outcome in outcomes]
    bounds = [bound_s for bound_s in known if bound_s is not None]
    complete = not left and len(bounds) == len(known)
    bound_s = min(best.time_s, max(least_s, min(bounds)) if complete else least_s)
    slower = sorted(
        (o for o in outcomes if o.plans and o is not best), key=lambda outcome: outcome.time_s
    )
    if best.time_s <= least_s * (1 + 1e-12):
        reason = f"{best.name}: nothing runs twice or waits, so no plan is faster"
    elif slower and slower[0].time_s > best.time_s:
        ratio = slower[0].time_s / best.time_s - 1
        reason = f"{best.name}: the fastest; next is {slower[0].name}, {ratio:.2%} slower"
    elif slower:
        reason = f"{best.name}: the fastest, as is {slower[0].name}"
    else:
        reason = f"{best.name}: the only one with a plan within the budget"
    proved = best.time_s <= bound_s * (1 + 1e-12)
    return replace(
        best.solution,
        status=Status.OPTIMAL if proved else Status.FEASIBLE,
        lower_bound_s=bound_s,
        gap=relative_gap(best.time_s, bound_s),
        stats={
            "chosen": best.name,
            "reason": reason,
            **stats,
            **{f"{best.name}_{key}": value for key, value in best.solution.stats.items()},
        },
    )
