"""auto: a portfolio of strategies with one incumbent; the default."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from memopt.models.bounds import memory_lower_bound, time_lower_bound
from memopt.models.checks import check_bytes
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.reductions.stage_map import has_updates
from memopt.strategies.auto.portfolio import NOTHING_FASTER, Portfolio
from memopt.strategies.base import CostModel, Features, Improver, Progress, Strategy
from memopt.strategies.budget_search import MANY
from memopt.strategies.host_budget import with_host_budget
from memopt.strategies.joint.strategy import Joint
from memopt.strategies.olla.strategy import Olla
from memopt.strategies.shared.members import Member, MemberOutcome, fitting, for_forward
from memopt.strategies.shared.worth import LEAST_S, MOST_S, STEPS, worth_s
from memopt.strategies.singles import SINGLE_STRATEGIES

ORDER = Olla(place=False)
LEADER = "joint"
"""Alone it is the fastest nearly everywhere, so that it gets the time of a search."""
GRAPH_MEMBERS = ("store-all", "sequential", "rotor", LEADER, "rotor-menus", "monet")
"""Members for the graph of a step, in the order in which they are asked."""
MOVING_MEMBERS = ("offload-graph",)
"""Those after them, over a known link."""
LEFT_OUT = frozenset({"checkmate", "checkmate-rounding"})
"""Not run on anything: slow solvers whose place monet takes."""
MOST_SAVED = 1 / 3
"""The most of a step that a search usually saves of a plan made at once."""
FIRST_S = 5.0
"""Seconds for the first plan of a graph of many operators."""
LONG_CHAIN = 200
"""Stages of a chain beyond which not all strategies plan it in no time."""
BEGIN_S = 2e-4
"""Seconds per operator that the leader takes before it has any plan of its own."""
OWN_S = 60.0
"""Seconds for all members that the user names, where there is no limit."""
SMALL = 60
"""The most operators of a graph for which all members name their smallest budget."""
IN_REACH = 0.8
"""Share of the step's peak above which another order alone may suffice, and is tried early."""


@dataclass(frozen=True)
class Auto(Improver):
    """The fastest plan of all strategies together, in a time that pays back; the default.

    A portfolio with one incumbent. It begins with members that have a plan at once: store-all,
    sequential and rotor. For a step's graph joint follows; it starts from the plans so far and gets
    all the time that is left (with a limit below 10 s it is first). If joint ends early,
    rotor-menus, monet, offload-graph and another order of operators follow. A bare chain is planned
    by all other strategies, too. A step without a backward is planned only by members that may
    lower its memory. The search ends when the plan is within `gap` of a bound, or the time is up.
    Without a limit that time is 500 times the seconds that the best plan is slower than the bound,
    at most 20 s (twice that if a plan is known for hardly more than the budget); if it is below a
    second, the plan made at once is taken.

    All plans are validated and replayed before they are compared. The solution's stats say what
    each member did ("tried"), who won ("chosen"), why ("reason"), and why no more were asked
    ("ended"). Of equally fast plans the one found first is taken. If the time ends without a plan,
    members that have one at once are asked for it ("at_once"). If a time limit stops a member,
    another run may give another plan. The bound holds for joint's class, which excludes plans in
    another order.

    Attributes:
        members: the strategies to ask instead, in this order, each for an even share of the time
            that is left, whatever the gap.
        time_limit_s: seconds for all of them together, where `solve` is given no limit; None: as
            above, and 60 for members of your own.
        gap: share of the bound by which the plan may be slower than it when the search ends.
        host_budget_bytes: the most that may be on the host at once; None: no limit.
        at_once: ask only members that have a plan at once.
        most_s: most seconds for the default members together, if there is no limit.
    """

    members: tuple[Strategy, ...] = ()
    time_limit_s: float | None = None
    gap: float = 0.01
    host_budget_bytes: int | None = None
    at_once: bool = False

    most_s: float = MOST_S

    name: ClassVar[str] = "auto"
    needs: ClassVar[str] = "any"
    features: ClassVar[Features] = Features(
        recompute=True, offload=True, order=True, place=True, implementations=True
    )
    decides_in_place: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.time_limit_s is not None and not self.time_limit_s > 0:
            raise ValueError(f"Auto: time_limit_s must be positive, got {self.time_limit_s!r}")
        if not self.most_s >= 0:
            raise ValueError(f"Auto: most_s must be at least 0, got {self.most_s!r}")
        if not self.gap >= 0:
            raise ValueError(f"Auto: gap must be at least 0, got {self.gap!r}")
        if self.host_budget_bytes is not None:
            check_bytes("Auto", host_budget_bytes=self.host_budget_bytes)
        if any(isinstance(member, Auto) for member in self.members):
            raise ValueError("Auto: an auto cannot be a member of an auto")

    def refines_smallest(self, cost_model: CostModel) -> bool:
        return not isinstance(cost_model, Graph) or len(cost_model.operators) <= SMALL

    def only_exact_implementations(self) -> bool | None:
        return None if self.members else True

    def wants_implementations(self, step_s: float) -> bool:
        return worth_s(MOST_SAVED * step_s) > 0

    def in_search(self, spent_s: float) -> Strategy:
        if self.members or self.time_limit_s is not None:
            # Their seconds are for each solve, as named.
            return self
        return replace(self, most_s=max(0.0, self.most_s - spent_s))

    def at_first(self) -> Strategy | None:
        return None if self.members or self.at_once else replace(self, at_once=True)

    def improved_by(self) -> Strategy | None:
        return replace(self, at_once=False) if self.at_once else None

    def worth_improving(self, step_s: float, bound_s: float, limit_s: float | None) -> bool:
        limited = limit_s is not None or self.time_limit_s is not None
        near = step_s <= bound_s * (1 + self.gap)
        return not near and (limited or worth_s(step_s - bound_s) > 0)

    def candidates(
        self, device: Device | None, cost_model: CostModel | None = None
    ) -> tuple[Strategy, ...]:
        """Return the strategies to ask, in order, before their fit to the cost model is known."""
        if self.members:
            return self.members
        # Over a link of unknown speed every transfer would look free.
        linked = device is not None and device.is_linked
        known = {one.name: one for one in SINGLE_STRATEGIES if one.name not in LEFT_OUT}
        if isinstance(cost_model, Graph) and not cost_model.is_forward:
            names = (*GRAPH_MEMBERS, *(MOVING_MEMBERS if linked else ()))
            return *(known[name] for name in names), ORDER
        apart = (x for name, x in known.items() if name != LEADER)
        others = [x.name for x in apart if linked or not x.features.offload]
        if isinstance(cost_model, Graph):
            return tuple(known[name] for name in others)
        # Of a long chain those that plan at once are asked first, then the leader, then all others;
        # of a short one, which they plan in no time, the leader is last: of as fast plans one of
        # the chain's own schedules is taken.
        long = cost_model is not None and len(cost_model) > LONG_CHAIN
        first = GRAPH_MEMBERS[: GRAPH_MEMBERS.index(LEADER) + 1] if long else ()
        return tuple(known[name] for name in dict.fromkeys((*first, *others, LEADER)))

    def solve_from(
        self,
        known: Sequence[Program],
        cost_model: CostModel,
        budget_bytes: int | None,
        *,
        device: Device | None = None,
        time_limit_s: float | None = None,
        progress: Progress | None = None,
    ) -> Solution:
        # The graph's chain, which members share, is found within the limit, too.
        began_s = time.monotonic()
        candidates = self.candidates(device, cost_model)
        limit_s = self.time_limit_s if time_limit_s is None else time_limit_s
        if not self.members:
            leader = Joint(gap=self.gap, pays=limit_s is None)
            candidates = tuple(leader if one.name == LEADER else one for one in candidates)
        limited = tuple(with_host_budget(one, self.host_budget_bytes) for one in candidates)
        members, refused = fitting(cost_model, limited)
        forward = isinstance(cost_model, Graph) and cost_model.is_forward
        if not self.members and forward:
            members, without = for_forward(members)
            refused += without
        if not self.members and isinstance(cost_model, Graph) and not forward:
            members = _in_order(members, cost_model, budget_bytes)
        if self.at_once:
            members = tuple(member for member in members if member.quick)
        graph = isinstance(cost_model, Graph)
        step = isinstance(cost_model, Graph) and not has_updates(cost_model)
        count = len(cost_model.operators) if isinstance(cost_model, Graph) else 2 * len(cost_model)
        # Without a budget the step as it is ends no search: within one, a faster plan is found.
        search = Portfolio(
            budget_bytes,
            device or Device(),
            progress,
            time_lower_bound(cost_model),
            cost_model.compute_time_s,
            impossible=isinstance(cost_model, Graph)
            and memory_lower_bound(cost_model) > (budget_bytes or math.inf),
            gap=NOTHING_FASTER if self.members or (budget_bytes is None and forward) else self.gap,
            limit_s=OWN_S if limit_s is None and self.members else limit_s,
            most_s=self.most_s,
            leader_s=BEGIN_S * count,
            quick_s=FIRST_S if graph and count >= MANY else math.inf,
            leader="" if self.members else LEADER,
            bounding=frozenset({LEADER} if step and not self.members else ()),
            one_graph=graph,
        )
        if search.leads_at_once:
            members = _led(members)
        search.began_s, search.known = began_s, tuple(known)
        search.run(members)
        return _solution(search, members, refused)


def _in_order(
    members: Sequence[Member], graph: Graph, budget_bytes: int | None
) -> tuple[Member, ...]:
    """Return the members in the order in which they are asked. Where no plan is possible for a
    graph that is not small, only those are that name the smallest budget soon. Where another order
    may suffice alone, it is looked for behind the members that plan at once."""
    impossible = budget_bytes is not None and memory_lower_bound(graph) > budget_bytes
    if impossible and len(graph.operators) > SMALL:
        soon = (LEADER, ORDER.name)
        return tuple(one for one in members if one.quick or one.strategy.name in soon)
    if budget_bytes is None:
        # It has the fastest program at once.
        return tuple(sorted(members, key=lambda member: member.strategy.name != LEADER))
    peak_bytes = replay(graph, store_all(graph)).peak_bytes
    if budget_bytes < IN_REACH * peak_bytes:
        return tuple(members)
    rank = {member.strategy.name: 0 if member.quick else 2 for member in members}
    rank[ORDER.name] = 1
    return tuple(sorted(members, key=lambda member: rank[member.strategy.name]))


def _led(members: tuple[Member, ...]) -> tuple[Member, ...]:
    """Return the members with the leader first, unless a member before it does not plan at once:
    that one may find what the leader cannot."""
    names = [member.strategy.name for member in members]
    place = names.index(LEADER) if LEADER in names else 0
    if not all(member.quick for member in members[:place]):
        return members
    return members[place], *members[:place], *members[place + 1 :]


def _solution(search: Portfolio, members: Sequence[Member], refused: tuple[str, ...]) -> Solution:
    """Return the search's solution, with what each member did."""
    asked = {outcome.name for outcome in search.outcomes}
    left = tuple(m.strategy.name for m in members if m.strategy.name not in asked)
    tried = tuple(outcome.line for outcome in search.outcomes)
    stats: dict[str, object] = {"tried": tried, "not_tried": left, "refused": refused}
    if search.at_once:
        stats["at_once"] = tuple(outcome.line for outcome in search.at_once)
    stats["ended"] = search.ended
    stats["solve_s"] = time.monotonic() - search.began_s
    best = search.best
    if best is None:
        return _without_plan(search, bool(left), stats)
    return _with_plan(best, search, bool(left), stats)


def _without_plan(search: Portfolio, left: bool, stats: dict[str, object]) -> Solution:
    found = [outcome.solution for outcome in (*search.outcomes, *search.at_once)]
    known = [x for x in found if x.smallest is not None and x.smallest_budget_bytes is not None]
    least = min(known, key=lambda x: x.smallest_budget_bytes or 0, default=None)
    proved = search.impossible or (
        not left and all(solution.status is Status.INFEASIBLE for solution in found)
    )
    return Solution(
        Status.INFEASIBLE if proved and known else Status.UNKNOWN,
        smallest_budget_bytes=None if least is None else least.smallest_budget_bytes,
        smallest=None if least is None else least.smallest,
        stats=stats,
    )


def _with_plan(
    best: MemberOutcome, search: Portfolio, left: bool, stats: dict[str, object]
) -> Solution:
    """Return the winner's plan; the bound holds for the members' classes together."""
    outcomes, least_s = (*search.outcomes, *search.at_once), search.least_s
    known = [outcome.solution.lower_bound_s for outcome in outcomes]
    bounds = [bound_s for bound_s in known if bound_s is not None]
    complete = not left and len(bounds) == len(known)
    bound_s = min(best.time_s, max(least_s, min(bounds)) if complete else least_s)
    proved = best.time_s <= bound_s * (1 + 1e-12)
    return replace(
        best.solution.bounded(bound_s, proved),
        stats={
            "chosen": best.name,
            "reason": _reason(best, outcomes, search, left),
            **stats,
            **{f"{best.name}_{key}": value for key, value in best.solution.stats.items()},
        },
    )


def _reason(
    best: MemberOutcome, outcomes: Sequence[MemberOutcome], search: Portfolio, left: bool
) -> str:
    """Say why the plan is the best one's, and why the search ended."""
    if best.time_s <= search.least_s * (1 + NOTHING_FASTER):
        return f"{best.name}: nothing runs twice or waits, so no plan is faster"
    slower = sorted(
        (one for one in outcomes if one.plans and one is not best), key=lambda one: one.time_s
    )
    if not slower:
        reason = f"{best.name}: the only one with a plan within the budget"
    elif slower[0].time_s > best.time_s:
        ratio = slower[0].time_s / best.time_s - 1
        reason = f"{best.name}: the fastest; next is {slower[0].name}, {ratio:.2%} slower"
    else:
        reason = f"{best.name}: the fastest, as is {slower[0].name}"
    could_s = best.time_s - search.least_s
    if left and search.done:
        return f"{reason}; at most {could_s / search.least_s:.2%} slower than any plan"
    if left and search.limit_s is None and not worth_s(could_s):
        return (
            f"{reason}; a search for a faster one would take more than {LEAST_S:g} s, which "
            f"{STEPS} steps could not gain (time_limit_s= searches all the same)"
        )
    return reason
