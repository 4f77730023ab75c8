"""auto's portfolio by a clock of the test's own: who gets how much time, and what is said of it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import pytest

from memopt.api.planning import solve
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.report.summary import searched
from memopt.solvers.running import Deadline
from memopt.strategies import Auto, Joint, resolve
from memopt.strategies.auto import strategy
from memopt.strategies.auto.portfolio import BESIDE, LATE, Portfolio
from memopt.strategies.auto.strategy import GRAPH_MEMBERS, LEADER, LONG_CHAIN, ORDER
from memopt.strategies.joint.incumbent import JointIncumbent
from memopt.strategies.shared.members import fitting
from memopt.strategies.shared.worth import MOST_S, Payback, worth_s
from memopt.strategies.target import Target
from tests.compare.curves import Clock, Curve
from tests.strategies.joint.chains import blocks

LEAST_S, ROUND = 1.0, 1e-9
LINK = Device(to_host_bytes_per_s=2.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", made)
    return made


def improving(scale: float) -> Callable[[float], float]:
    """A plan that comes closer and closer to the bound."""
    return lambda seconds: LEAST_S * (1.1 + scale / (1 + seconds))


def portfolio(clock: Clock, limit_s: float | None, members: Sequence[Curve]) -> Portfolio:
    search = Portfolio(1, LINK, None, LEAST_S, 10.0, gap=0.01, limit_s=limit_s, leader=LEADER)
    search.run(members)  # type: ignore[arg-type]  # what a portfolio asks of members
    return search


@pytest.mark.parametrize("limit_s", [1.0, 2.0, 5.0, 60.0])
@pytest.mark.parametrize("quick_share", [0.0, 0.02, 1.0])
def test_the_leader_works_as_long_as_it_would_alone(
    clock: Clock, limit_s: float, quick_share: float
) -> None:
    """As soon as anything stands, and nearly so whatever the members before it would take."""
    quick = [
        Curve(clock, name, True, 0.0, quick_share * limit_s, lambda _: 3.0)
        for name in ("store-all", "sequential", "rotor")
    ]
    leader = Curve(clock, LEADER, False, 0.0, 1e9, improving(0.4))
    others = [Curve(clock, n, False, 0.0, 1e9, improving(0.5)) for n in ("rotor-menus", "monet")]
    search = portfolio(clock, limit_s, [*quick, leader, *others])
    spent_s = sum(min(quick_share, BESIDE) * limit_s for _ in quick)
    assert leader.spent_s >= limit_s - spent_s - ROUND
    assert search.best is not None
    alone_s = leader.plan_s(limit_s - spent_s - ROUND)
    assert alone_s is not None
    assert search.best.time_s <= alone_s
    assert [one.spent_s for one in others] == [-1.0, -1.0]
    assert clock.now_s <= 100.0 + limit_s + ROUND
    assert search.ended == f"the limit of {limit_s:.3g} s"


def test_what_the_leader_leaves_is_for_the_others(clock: Clock) -> None:
    first = Curve(clock, "sequential", True, 0.0, 0.0, lambda _: 3.0)
    leader = Curve(clock, LEADER, False, 0.0, 1.0, lambda _: 2.0)
    others = [Curve(clock, n, False, 0.0, 1e9, improving(s)) for n, s in (("a", 9.0), ("b", 0.1))]
    search = portfolio(clock, 9.0, [first, leader, *others])
    assert [one.spent_s for one in others] == pytest.approx([4.0, 4.0])
    assert search.best is not None
    assert search.best.name == "b"


def test_without_a_plan_everybody_is_asked(clock: Clock) -> None:
    none = [Curve(clock, n, False, 0.0, 1e9, lambda _: None) for n in (LEADER, "a", "b")]
    last = Curve(clock, "c", False, 0.0, 1e9, lambda _: 2.0)
    search = portfolio(clock, 10.0, [*none, last])
    rest = [10.0 * BESIDE / 3] * 3
    assert [one.spent_s for one in (*none, last)] == pytest.approx([10.0 * (1 - BESIDE), *rest])
    assert search.best is not None
    assert search.best.name == "c"


def test_in_a_short_time_the_leader_begins_without_a_plan_and_has_all_of_it(clock: Clock) -> None:
    leader = Curve(clock, LEADER, False, 0.0, 1e9, improving(0.4))
    other = Curve(clock, "a", False, 0.0, 1e9, lambda _: 2.0)
    search = portfolio(clock, 5.0, [leader, other])
    assert (leader.spent_s, other.spent_s) == (5.0, -1.0)
    assert search.best is not None
    assert search.best.name == LEADER


@pytest.mark.parametrize(
    ("plan_s", "ended"),
    [
        (1.0, "no plan is faster"),
        (1.005, "within 1.00% of the bound"),
        (1.5, "all were asked"),
    ],
)
def test_says_why_it_ended(clock: Clock, plan_s: float, ended: str) -> None:
    one = Curve(clock, "sequential", True, 0.0, 0.1, lambda _: plan_s)
    assert portfolio(clock, 5.0, [one]).ended == ended


def test_what_members_share_is_made_within_the_limit(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chain of a large graph takes seconds."""

    def slow(*given: Any) -> Any:
        clock.now_s += 3.0
        return fitting(*given)

    monkeypatch.setattr(strategy, "fitting", slow)
    found = Auto().solve(steps()[0], 1, device=LINK, time_limit_s=2.0)
    assert found.stats["tried"] == ()
    assert found.stats["solve_s"] == 3.0


def test_a_leader_that_could_not_even_begin_is_not_asked(clock: Clock) -> None:
    for plan_s, spent_s in ((3.0, -1.0), (None, 2.0)):
        leader = Curve(clock, LEADER, False, 2.0, 1e9, lambda _: 2.0)
        first = Curve(clock, "sequential", True, 0.0, 0.0, lambda _, plan_s=plan_s: plan_s)
        Portfolio(1, LINK, None, LEAST_S, 10.0, limit_s=1.0, leader=LEADER, leader_s=1.8).run(
            [first, leader]
        )  # type: ignore[arg-type]
        assert leader.spent_s == spent_s


def test_once_there_is_a_plan_a_slow_member_does_not_keep_the_user_waiting(clock: Clock) -> None:
    members = [
        Curve(clock, "sequential", True, 2.0, 2.0, lambda _: 3.0),
        Curve(clock, "rotor", True, 0.0, 1e9, lambda _: 2.0),
    ]
    Portfolio(1, LINK, None, LEAST_S, 10.0, quick_s=2.5).run(members)  # type: ignore[arg-type]
    assert members[1].spent_s == 0.5


@pytest.mark.parametrize(
    ("named", "limit_s", "asked"), [(104, None, 2), (106, None, 1), (104, 5.0, 1)]
)
def test_who_hardly_misses_the_budget_is_asked_again_where_nobody_limited_the_time(
    clock: Clock, named: int, limit_s: float | None, asked: int
) -> None:
    answers = iter([None, 2.0])
    leader = Curve(clock, LEADER, False, 0.0, 1e9, lambda _: next(answers))
    least = Solution(Status.FEASIBLE, program=Program(()), peak_bytes=named, time_s=3.0)
    leader.without_plan = Solution(Status.UNKNOWN, smallest_budget_bytes=named, smallest=least)
    search = Portfolio(100, LINK, None, LEAST_S, 10.0, limit_s=limit_s, leader=LEADER)
    search.run([leader])  # type: ignore[list-item]
    assert len(search.outcomes) == asked
    assert (search.best is not None) == (asked == 2)
    seconds = limit_s or MOST_S
    assert clock.now_s == pytest.approx(100.0 + seconds * asked)
    assert leader.known == ((least.program,) if asked == 2 else ())


def test_an_impossible_budget_is_not_looked_at_again(clock: Clock) -> None:
    leader = Curve(clock, LEADER, False, 0.0, 1e9, lambda _: None)
    least = Solution(Status.FEASIBLE, program=Program(()), peak_bytes=101, time_s=3.0)
    leader.without_plan = Solution(Status.INFEASIBLE, smallest_budget_bytes=101, smallest=least)
    search = Portfolio(100, LINK, None, LEAST_S, 10.0, impossible=True, leader=LEADER)
    search.run([leader])  # type: ignore[list-item]
    assert [len(search.outcomes), len(search.at_once)] == [1, 0]


def test_without_a_limit_it_ends_where_the_time_would_not_come_back(clock: Clock) -> None:
    first = Curve(clock, "sequential", True, 0.0, 0.1, lambda _: 1.02)
    leader = Curve(clock, LEADER, False, 0.0, 1e9, lambda _: 1.015)
    search = portfolio(clock, None, [first, leader])
    # 500 steps gain 10 s at most.
    assert leader.spent_s == pytest.approx(10.0 - 0.1)
    assert "would not come back in 500 steps" in search.ended


def test_what_the_leader_leaves_is_not_filled_with_those_that_rarely_win(clock: Clock) -> None:
    """Without a limit: the leader has ended since more seconds did not pay."""
    leader = Curve(clock, LEADER, False, 0.0, 6.0, lambda _: 1.03)
    other = Curve(clock, "monet", False, 0.0, 1e9, lambda _: 1.02)
    search = portfolio(clock, None, [leader, other])
    assert (leader.spent_s, other.spent_s) == (6.0, -1.0)
    assert "would not come back in 500 steps" in search.ended


@pytest.mark.parametrize(("saved_s", "looks"), [(0.1, 40), (0.0, 2), (1e-4, 2)])
def test_a_search_ends_at_the_first_look_that_did_not_pay(
    clock: Clock, saved_s: float, looks: int
) -> None:
    payback, step_s, asked = Payback(), 9.0, 0
    while asked < 40 and not payback.ended(step_s):
        clock.now_s += 1.0
        step_s -= saved_s
        asked += 1
    # The first look has nothing to compare with.
    assert asked == looks


def test_an_incumbent_leaves_no_more_time_than_a_faster_program_could_gain(clock: Clock) -> None:
    graph = steps()[0]
    stored = store_all(graph)
    step_s = replay(graph, stored).time_s
    for pays in (False, True):
        search = JointIncumbent(graph, None, LINK, 0.0, Deadline(clock.now_s + 60.0), pays=pays)
        search.bound_s = step_s - 0.01
        clock.now_s += 0.5
        search.offer(stored, "store-all")
        assert search.deadline.left_s == pytest.approx(worth_s(0.01) - 0.5 if pays else 59.5)
        search.raise_bound(step_s)
        assert search.deadline.left_s == pytest.approx(0.0 if pays else 59.5)


def test_joint_knows_whether_moving_beats_recomputing() -> None:
    graph, fast = blocks(8), Device(to_host_bytes_per_s=1e9)
    budget = int(0.6 * replay(graph, store_all(graph)).peak_bytes)
    search = JointIncumbent(graph, budget, fast, math.inf, Deadline())
    assert not search.moving_wins
    again = solve(graph, budget, resolve("sequential"), device=fast)
    moved = solve(graph, budget, resolve("offload-graph"), device=fast)
    for plan, wins in ((again, False), (moved, True), (again, True)):
        assert plan.program is not None
        search.offer(plan.program, "")
        assert search.moving_wins == wins
    assert search.recomputed_s == again.step_time_s
    assert search.best_s == moved.step_time_s


def test_joint_ends_within_its_gap() -> None:
    graph = random_graph(Random(1), 20)
    budget = int(0.9 * replay(graph, store_all(graph)).peak_bytes)
    plans = [
        solve(graph, budget, Joint(gap=gap, changes=50), device=Device()) for gap in (0.5, 0.0)
    ]
    near, exact = (plan.stats["changes_tried"] for plan in plans)
    assert plans[0].gap <= 0.5
    assert isinstance(near, int)
    assert isinstance(exact, int)
    assert near < exact


def steps() -> list[Graph]:
    return [random_graph(Random(seed), 30) for seed in range(3)]


@pytest.mark.parametrize("graph", steps())
def test_before_the_leader_come_only_members_that_plan_at_once(graph: Graph) -> None:
    """Another order, too, where it alone may suffice."""
    names = [one.name for one in Auto().candidates(LINK, graph)]
    assert names[: len(GRAPH_MEMBERS)] == list(GRAPH_MEMBERS)
    peak = solve(graph, None, Auto(at_once=True), device=LINK).peak_bytes
    for share in (0.5, 0.9):
        found = Auto().solve(graph, int(share * peak), device=LINK, time_limit_s=0.0)
        order = found.stats["not_tried"]
        assert isinstance(order, tuple)
        before = order[: order.index(LEADER)]
        assert set(before) <= {"store-all", "sequential", "rotor", ORDER.name}


def test_the_summary_says_what_was_tried_and_why_no_more() -> None:
    graph = steps()[0]
    peak = solve(graph, None, Auto(), device=LINK).peak_bytes
    plan = solve(graph, int(0.6 * peak), Auto(), device=LINK, time_limit_s=5.0)
    text = " ".join(plan.summary().split())
    tried = plan.stats["tried"]
    assert isinstance(tried, tuple)
    for line in tried:
        assert str(line[0]) in text
    assert f"tried: {len(tried)} of auto's strategies" in text
    assert f"ended: {plan.stats['ended']}" in text
    assert str(plan.stats["reason"]) in text


def test_stats_of_others_are_no_rows() -> None:
    for stats in ({}, {"tried": 3}, {"tried": "a"}, {"tried": [1, ("a", "b")]}):
        assert searched(stats, 1.0)[1] == ()
    lines = [["rotor", "unknown", None, 0.25, "too large"], ["joint", "optimal", 2.0, 1.0, ""]]
    rows = searched({"tried": lines, "ended": "interrupted", "not_tried": ["monet"]}, 1.6)
    assert rows[1] == (("rotor", "250.00 ms", "too large"), ("joint", "1.00 s", "+25.0%"))
    assert "interrupted" in rows[0]
    assert "not tried: monet" in rows[0]


def test_no_member_begins_whose_plan_could_not_be_checked_in_time(clock: Clock) -> None:
    """Of a long chain the check of a plan takes longer than finding it."""
    members = [Curve(clock, name, True, 0.1, 0.1, lambda _: 2.0, 1.7) for name in "abcd"]
    search = Portfolio(1, Device(), None, 1.0, 1.0, limit_s=5.0)
    begin_s = clock()
    search.run(members)  # type: ignore[arg-type]
    assert [member.spent_s > 0 for member in members] == [True, True, False, False]
    assert clock() - begin_s <= 5.0


def test_what_is_slow_to_begin_is_not_begun_in_the_last_moment(clock: Clock) -> None:
    first = Curve(clock, "at once", True, 4.5, 4.5, lambda _: 2.0)
    last = Curve(clock, "slow", False, 1.8, 9.0, lambda _: 1.5)
    search = Portfolio(1, Device(), None, 1.0, 1.0, limit_s=5.0, leader="other", leader_s=1.8)
    search.run([first, last])  # type: ignore[list-item]
    assert last.spent_s < 0


@pytest.mark.parametrize(("leader_s", "share"), [(1.0, BESIDE), (4.0, LATE)])
def test_where_the_leader_begins_late_those_before_it_have_more(
    clock: Clock, leader_s: float, share: float
) -> None:
    first = Curve(clock, "rotor", True, 0.0, 1e9, lambda _: 2.0)
    leader = Curve(clock, LEADER, False, 0.0, 1e9, lambda _: 1.5)
    search = Portfolio(1, Device(), None, 1.0, 1.0, limit_s=10.0, leader=LEADER, leader_s=leader_s)
    search.run([first, leader])  # type: ignore[list-item]
    assert (first.spent_s, leader.spent_s) == pytest.approx((10.0 * share, 10.0 * (1 - share)))


@pytest.mark.parametrize("device", [LINK, Device()])
def test_of_a_long_chain_the_leader_is_asked_after_those_that_plan_at_once(device: Device) -> None:
    """Its programs are of the chain's operators: it starts from none of the schedules'."""
    chain = random_chain(Random(5), LONG_CHAIN + 1)
    budget = int(0.6 * solve(chain, None, resolve("store-all"), device=device).peak_bytes)
    made = solve(chain, budget, Auto(gap=0.0), device=device, time_limit_s=0.5)
    tried = [str(line[0]) for line in made.stats["tried"]]  # type: ignore[attr-defined]
    assert tried[:4] == ["store-all", "sequential", "rotor", LEADER][: len(tried)]
    assert all(line[4] == "" for line in made.stats["tried"])  # type: ignore[attr-defined]
    names = [one.name for one in Auto().candidates(device, chain)]
    assert names[: len(tried)] == tried
    short = [one.name for one in Auto().candidates(device, random_chain(Random(5), 12))]
    assert short[-1] == LEADER
    assert set(short) == set(names)


def test_members_share_the_graph_of_a_chain() -> None:
    chain = random_chain(Random(1), 5)
    members, _ = fitting(chain, [resolve("sequential")])
    assert members[0].target.graph is Target.of(resolve("auto"), chain).graph


@pytest.mark.parametrize("named", [False, True])
def test_where_the_leader_was_first_and_named_the_least_memory_nobody_is_asked_too_late(
    clock: Clock, named: bool
) -> None:
    least = Solution(Status.FEASIBLE, program=Program(()), peak_bytes=2, time_s=3.0)
    without = Solution(Status.UNKNOWN, smallest=least) if named else Solution(Status.UNKNOWN)
    leader = Curve(clock, LEADER, False, 0.0, 9.0, lambda _: None, without_plan=without)
    quick = Curve(clock, "rotor", True, 0.5, 0.5, lambda _: None)
    search = Portfolio(1, LINK, None, LEAST_S, 10.0, limit_s=2.0, leader=LEADER)
    search.bounding = frozenset({LEADER})
    assert search.leads_at_once
    search.run([leader, quick])  # type: ignore[list-item]  # what a portfolio asks of members
    assert (leader.spent_s, quick.spent_s) == (2.0, -1.0 if named else 0.5)


@pytest.mark.parametrize(
    ("share", "limit_s", "first"),
    [(0.5, 2.0, LEADER), (0.5, 20.0, "store-all"), (0.9, 2.0, "store-all")],
)
def test_with_a_short_limit_the_leader_is_first_unless_another_order_may_do(
    share: float, limit_s: float, first: str
) -> None:
    graph = blocks(9)
    budget = int(share * replay(graph, store_all(graph)).peak_bytes)
    plan = solve(graph, budget, Auto(gap=0.0), device=LINK, time_limit_s=limit_s)
    assert plan.stats["tried"][0][0] == first
