"""One search of auto: its members one after the other, the fastest plan so far, the time left."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from memopt.models.device import Device
from memopt.models.progress import Progress
from memopt.programs.instructions import Program
from memopt.solvers.running import Deadline
from memopt.strategies.shared.members import Member, MemberOutcome
from memopt.strategies.shared.worth import LEAST_S, MOST_S, STEPS, worth_s

WITHOUT_S, AFTER_S = 5.0, 5.0
"""Seconds: a search without a plan may take at least so many; without a limit, members after the
leader are not asked when so many are over."""
BESIDE = 0.1
"""Share of the time left: a member's before the leader; and, where it is no less than LEAST_S, that
of all others together where the leader begins without a plan."""
LATE = 0.3
"""Share of the time left that is a late beginning of the leader's; then a member's before it."""
NEAR = 1.05
"""Smallest budget known over the one given, where a search without a limit goes on for as long
again: a little more time may find a plan."""
LEAST_SHARE = 0.5
"""Share of a search's seconds for the smallest budget, where no plan is within the one given."""
NOTHING_FASTER = 1e-12
"""Gap at which no plan is faster."""


@dataclass
class Portfolio:
    """The state of one search.

    Attributes:
        budget_bytes, device, progress: as in `Strategy.solve`.
        least_s: a lower bound on every plan's time, seconds; members may raise it.
        base_s: the time of the step as it is, seconds.
        impossible: whether it is proved that no plan is within the budget.
        gap: to the bound, at which the search ends.
        limit_s: seconds for all members; None: as many as the plan found so far may still gain.
        leader: the member that gets all the time left, so that it plans as it would alone (nearly
            all while there is no plan, which others may find); "" for none.
    """

    budget_bytes: int | None
    device: Device
    progress: Progress | None
    least_s: float
    base_s: float
    impossible: bool = False
    gap: float = NOTHING_FASTER
    limit_s: float | None = None
    leader: str = ""
    leader_s: float = 0.0
    """Seconds that the leader, or another member that has no plan at once, takes to begin. Once
    there is a plan, it is not asked with less time left."""
    most_s: float = MOST_S
    """Most seconds for all members together, if there is no limit."""
    quick_s: float = math.inf
    """Seconds in which members that plan at once may begin, once one of them has a plan."""
    bounding: frozenset[str] = frozenset()
    """Members whose bound holds for the plans of all members."""
    known: tuple[Program, ...] = ()
    """Programs to start from that were known before."""
    one_graph: bool = True
    """Whether members' programs are of the same graph, so that one may start from another's."""
    outcomes: list[MemberOutcome] = field(default_factory=list)
    at_once: list[MemberOutcome] = field(default_factory=list)
    """Outcomes of members that were asked when the time was up and there was no plan."""
    interrupted: bool = False
    too_late: bool = False
    """Whether a member was not asked since it could not have begun in the time left."""
    again: bool = False
    """Whether the leader is asked a second time, to lower the least memory that it found."""

    def __post_init__(self) -> None:
        self.began_s = time.monotonic()

    @property
    def best(self) -> MemberOutcome | None:
        """Return the outcome with the fastest plan, of equally fast ones the first."""
        plans = (one for one in (*self.outcomes, *self.at_once) if one.plans)
        return min(plans, key=lambda one: one.time_s, default=None)

    @property
    def programs(self) -> tuple[Program, ...]:
        """Return the programs to start from, the fastest first."""
        if not self.one_graph:
            return ()
        plans = sorted((one for one in self.outcomes if one.plans), key=lambda one: one.time_s)
        known = [one.solution for one in plans]
        if self.again:
            known += [one.solution.smallest for one in self.outcomes if one.solution.smallest]
        found = (solution.program for solution in known)
        return (*(one for one in found if one is not None), *self.known)

    @property
    def leads_at_once(self) -> bool:
        """Tell whether the leader is asked before members that have a plan at once. It begins with
        their plans itself; asked first, they would take a part of its short time."""
        limit_s = self.limit_s
        if limit_s is None or self.leader not in self.bounding:
            return False
        return self.leader_s <= LATE * limit_s and BESIDE * limit_s < LEAST_S

    @property
    def done(self) -> bool:
        """Tell whether no plan can be faster by more than the gap."""
        best = self.best
        return best is not None and best.time_s <= self.least_s * (1 + self.gap)

    @property
    def check_s(self) -> float:
        """Return the most seconds that a member's plan took to be lowered and checked, so far."""
        if self.limit_s is None:
            return 0.0
        return max((one.check_s for one in (*self.outcomes, *self.at_once)), default=0.0)

    @property
    def _least_known(self) -> bool:
        """Tell whether the leader was asked first, and found no plan but a program of the least
        memory that a member finds at once."""
        led = self.outcomes[:1] if self.leads_at_once else []
        return any(one.name == self.leader and one.solution.smallest is not None for one in led)

    @property
    def _nearly(self) -> bool:
        """Tell whether the time is up, nobody limited it, and a plan is known for hardly more than
        the budget, which may be possible."""
        ended = self.best is not None or self.interrupted or self.impossible
        if ended or self.limit_s is not None or self.budget_bytes is None:
            return False
        if time.monotonic() < self.end_s(quick=False):
            return False
        named = (one.solution.smallest_budget_bytes for one in self.outcomes)
        return any(size is not None and size <= NEAR * self.budget_bytes for size in named)

    def end_s(self, *, quick: bool) -> float:
        """Return when the search ends, by time.monotonic's clock; `quick` asks for a member that
        has its plan at once, which the worth of a search does not stop."""
        if self.limit_s is not None:
            return self.began_s + self.limit_s
        best = self.best
        if quick:
            return self.began_s + (self.most_s if best is None else min(self.most_s, self.quick_s))
        if best is None:
            without_s = max(WITHOUT_S, worth_s(self.base_s))
            # Time is left for a search within the least budget that is found.
            share = LEAST_SHARE if self.impossible else 1.0 + self.again
            return self.began_s + share * min(self.most_s, without_s)
        worth = min(self.most_s, worth_s(best.time_s - self.least_s))
        if self.leader and any(one.name == self.leader for one in self.outcomes):
            worth = min(worth, AFTER_S)
        return self.began_s + worth

    def run(self, members: Sequence[Member]) -> None:
        """Ask members in turn, until the gap is closed or the time is up."""
        self._ask(members)
        if self._nearly:
            self.again = True
            self._ask([member for member in members if member.strategy.name == self.leader])

    def _ask(self, members: Sequence[Member]) -> None:
        for index, member in enumerate(members):
            if self.done or self.interrupted:
                return
            name = member.strategy.name
            report = _part(self.progress, index, len(members), name)
            deadline = Deadline(self.end_s(quick=member.quick), report)
            over = deadline.passed(0.0, "begins")
            found = self.best is not None or self._least_known
            if over and (found or (index > 0 and not member.quick)):
                # Without a plan so far, ask the members that have one at once all the same.
                continue
            # The leader leaves time for checks itself.
            leads = name == self.leader
            left_s = deadline.left_s - (0.0 if leads else self.check_s)
            slow = leads or not member.quick
            if self.best is not None and left_s < (self.leader_s if slow else 0.0):
                self.too_late = True
                continue
            share_s = max(0.0, left_s)
            share_s *= self._share(members[index:], share_s)
            try:
                known = self.programs
                outcome = member.run(self.budget_bytes, self.device, share_s, report, known)
            except KeyboardInterrupt:
                self.interrupted = True
                return
            (self.at_once if over else self.outcomes).append(outcome)
            bound_s = outcome.solution.lower_bound_s if name in self.bounding else None
            if bound_s is not None and math.isfinite(bound_s):
                self.least_s = max(self.least_s, bound_s)

    def _share(self, members: Sequence[Member], left_s: float) -> float:
        """Return the share of the seconds left that the first of the members may take."""
        first, names = members[0], [member.strategy.name for member in members]
        if first.quick and self.limit_s is None:
            # Machine code, which the first plan on a machine waits for, is not its to save.
            return 1.0
        if self.leader not in names:
            return 1 / len(members)
        if names[0] == self.leader:
            # In less than a second no other finds a plan that the leader does not.
            others = self.best is None and BESIDE * left_s >= LEAST_S
            return 1 - BESIDE if others and len(members) > 1 else 1.0
        # What comes before the leader must leave it nearly all the time, unless it needs so much
        # of that to begin that it finds little.
        return LATE if self.leader_s > LATE * left_s else BESIDE

    @property
    def ended(self) -> str:
        """Say why no further member was asked."""
        best = self.best
        if self.interrupted:
            return "interrupted"
        if best is not None and best.time_s <= self.least_s * (1 + NOTHING_FASTER):
            return "no plan is faster"
        if best is not None and self.done:
            return f"within {self.gap:.2%} of the bound"
        if self.limit_s is not None and time.monotonic() >= self.began_s + self.limit_s:
            return f"the limit of {self.limit_s:.3g} s"
        if time.monotonic() >= self.end_s(quick=False):
            return f"more time would not come back in {STEPS} steps"
        return "too little time is left for others" if self.too_late else "all were asked"


def _part(progress: Progress | None, index: int, count: int, name: str) -> Progress | None:
    if progress is None:
        return None
    told = progress
    return lambda fraction, what: told((index + fraction) / count, f"{name}: {what}")
