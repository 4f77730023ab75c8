"""Every law of planning at random cost models x strategies x budgets x devices.

A case is (instance, strategy, budget): the solve keeps the laws of `memopt.testing` (valid, within
the budget, bound, status, smallest budget, statistics), validator and replay count the same bytes,
the exhaustive search of the strategy's class, where there is one, finds nothing faster, and larger
budgets are no slower. At one budget of each strategy the answer is the same when asked again, and
follows when all times or all sizes are multiplied or all names changed.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cache
from random import Random

from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.graph import Graph
from memopt.models.status import Status
from memopt.programs.replay import replay
from memopt.programs.solution import Solution
from memopt.programs.validate import memory_use, validate
from memopt.reductions.coarsen import coarsen
from memopt.reductions.stage_map import has_updates
from memopt.strategies import Rotor, Strategy
from memopt.strategies.base import CostModel
from memopt.strategies.host_budget import host_limit
from memopt.strategies.target import Target
from memopt.testing.case import Case, Law
from memopt.testing.plans import check_plan, plan_or_refusal
from memopt.testing.solutions import SAME, SolutionCheck, check_order, plan_of, store_all_peak
from tests.brute_force.sweep import Optimum, chain_optima, graph_optima, strategies
from tests.brute_force.tiny_graphs import MOST_OPERATORS
from tests.fuzz.drawn import Drawn
from tests.fuzz.instances import Instance, instance, slower, wider, with_figures
from tests.random_programs import random_placement

SHARES: dict[str, float] = {
    "offload-exact": 0.05,
    "autoswap": 0.05,
    "rotor-menus": 0.03,
    "checkmate": 0.03,
    "checkmate-rounding": 0.08,
    "monet": 0.05,
    "olla": 0.25,
    "joint": 0.05,
    "auto": 0.01,
}
"""Strategy → the share of the instances that it plans, for those that take long."""
BUDGETS = 14
"""Between the smallest and what is enough, of each strategy."""
MONOTONE = ("store-all", "rotor", "rotor-optimal", "rotor-free", "revolve", "sequential")
"""Promise that a larger budget gives no slower plan."""
EXHAUSTIVE = 0.15
"""Share of the small instances that are searched exhaustively."""


@dataclass
class Row:
    """What one instance showed, a line of the results; as `tests.fuzz.modules.Row`."""

    seed: int
    cases: int = 0
    by_strategy: Counter[str] = field(default_factory=Counter)
    wrong: list[tuple[str, str]] = field(default_factory=list)

    @property
    def line(self) -> str:
        """As JSON."""
        return json.dumps(vars(self))


def fuzz_plans(seed: int) -> Row:
    """All cases of a seed's instance."""
    row, dice, one = Row(seed), Random(f"plans {seed}"), instance(seed)
    optima = _optima(one) if dice.random() < EXHAUSTIVE else {}
    for strategy in strategies():
        if dice.random() >= SHARES.get(strategy.name, 1.0):
            continue
        if isinstance(strategy, Rotor):
            strategy = dice.choice(
                (strategy, replace(strategy, slots=dice.choice((5, 40)), exact_stages=0))
            )
        if Target.of(strategy, one.model).why_not() is not None:
            continue
        try:
            optimum = None if strategy.features.offload else optima.get(strategy.name)
            count = _check_strategy(one, strategy, optimum, dice)
            row.cases += count
            row.by_strategy[strategy.name] += count
        except Exception as error:  # noqa: BLE001  # a crash is what is looked for
            row.wrong.append((f"{strategy}", f"{type(error).__name__}: {error}"))
    if isinstance(one.model, Graph) and _only_other_costs(one.model):
        try:
            row.by_strategy["drawn"] += _check_programs(one, one.model, dice)
        except Exception as error:  # noqa: BLE001
            row.wrong.append(("drawn programs", f"{type(error).__name__}: {error}"))
    return row


def _optima(one: Instance) -> dict[str, Optimum]:
    """Strategy → the optimum of its class."""
    model = one.model
    if not one.searched:
        return {}
    if isinstance(model, Chain):
        found = chain_optima(model)
    elif len(model.operators) <= MOST_OPERATORS and not has_updates(model):
        found = graph_optima(model)
    else:
        return {}
    return {name: cache(optimum) for name, optimum in found.items()}


def _check_strategy(
    one: Instance, strategy: Strategy, optimum: Optimum | None, dice: Random
) -> int:
    """Every budget of a strategy; how many cases that was."""
    whole = Target.of(strategy, one.model)
    model = whole.solved
    exact = isinstance(model, Chain) == isinstance(one.model, Chain)

    def fastest(_: CostModel, budget: int | None) -> float:
        assert optimum is not None
        return optimum(2**60 if budget is None else budget)

    case = Case(strategy, one.label, model, one.device, monotone=strategy.name in MONOTONE)
    if optimum is not None and exact:
        case.fastest = fastest
    check = SolutionCheck(case, Target.of(strategy, model))
    enough = store_all_peak(model)
    least = min(check.solved(1).smallest_budget_bytes or enough, enough)
    inside = {max(1, least + round(dice.random() * (enough - least))) for _ in range(BUDGETS)}
    budgets = {1, least - 1, least, enough, 2**50, *inside} - {0, -1}
    times: dict[float, tuple[Solution, float]] = {}
    for budget in (*sorted(budgets), None):
        solution = check.solved(budget)
        times[math.inf if budget is None else budget] = solution, check.time_s(solution, budget)
        _same_bytes(case, check.target, solution, budget)
        if whole.linearized is not None:
            _same_bytes(case, whole, solution, budget)
    check_order(case, times)
    chosen = dice.choice(sorted(inside))
    follows(case, chosen, times[chosen], dice)
    if dice.random() < 0.1:
        plan = plan_or_refusal(replace(case, model=one.model, fastest=None), chosen)
        if plan is not None:
            check_plan(replace(case, model=one.model, fastest=None), plan)
    return len(times)


def _same_bytes(case: Case, target: Target, solution: Solution, budget: int | None) -> None:
    """Validator and replay agree, also of a chain's plan that becomes one of its graph."""
    if not solution.plans:
        return
    target = target.resolved(solution)
    program = target.program(solution, budget)
    assert program is not None
    limits = Budget(budget, host_limit(case.strategy, None))
    violation, figures = target.check(program, limits, case.device)
    case.require(Law.VALID, violation is None, budget, str(violation))
    use = memory_use(target.graph, program)
    # With addresses the peak is that of the arena, which the validator does not count.
    peak = figures.peak_bytes if program.offsets is not None else use.peak
    counted, replayed = (peak, use.host_peak), (figures.peak_bytes, figures.host_peak_bytes)
    case.require(Law.VALID, counted == replayed, budget, f"counted {counted}, replayed {replayed}")


def follows(case: Case, budget: int, known: tuple[Solution, float], dice: Random) -> None:
    """The same question again, in other units or with other names: the same answer."""
    solution, time_s = known
    factor, more = 2.0 ** dice.choice((-30, -7, 5, 20)), dice.choice((2, 3, 512))
    model, device = case.model, case.device
    ways = {
        "again": (model, device, 1.0, 1),
        "times": (
            with_figures(model, time=lambda t: t * factor), slower(device, factor), factor, 1,
        ),
        "sizes": (with_figures(model, size=lambda s: s * more), wider(device, more), 1.0, more),
        "names": (with_figures(model, name=lambda name: name[::-1] + " x"), device, 1.0, 1),
    }  # fmt: skip
    for what in ("again", dice.choice(("times", "sizes", "names"))):
        other, link, slow, wide = ways[what]
        again = replace(case, model=other, device=link, fastest=None)
        check = SolutionCheck(again, Target.of(case.strategy, other))
        answer = check.solved(budget * wide)
        found_s = check.time_s(answer, budget * wide)
        close = found_s == time_s * slow or math.isclose(found_s, time_s * slow, rel_tol=SAME)
        shown = f"{what} x {slow} x {wide}: {found_s} s, not {time_s} x {slow}"
        # A search that stops early may end elsewhere; what is proved may not.
        proved = Status.FEASIBLE not in (answer.status, solution.status)
        same = close or (what in ("times", "sizes") and not proved)
        case.require(Law.DETERMINISTIC, same, budget, shown)
        if what in ("again", "names"):
            equal = plan_of(answer) == plan_of(solution)
            case.require(Law.DETERMINISTIC, equal, budget, f"{what}: another plan")


def _only_other_costs(graph: Graph) -> bool:
    """Whether implementations read and write what their operators do, as drawn programs assume."""
    ways = [way for operator in graph.operators for way in operator.implementations]
    return all(way.reads is None and way.writes is None for way in ways)


def _check_programs(one: Instance, graph: Graph, dice: Random) -> int:
    """Programs drawn at random, placed at random, of the graph and of a coarser one."""
    count = 3
    for number in range(count):
        drawn = Drawn(
            dice.randrange(10**9), dice.randint(0, 6), dice.randint(0, 4), dice.random() < 0.5
        )
        model, coarser = graph, None
        if number == 2 and len(graph.operators) > 2:
            coarser = coarsen(graph, dice.randint(2, len(graph.operators)))
            model = coarser.graph
        program = drawn.solve(model, None).program
        assert program is not None
        placed = random_placement(dice, model, program)
        for what in (program, placed):
            assert (wrong := validate(model, what)) is None, (drawn, wrong)
        use, figures = memory_use(model, program), replay(model, program, device=one.device)
        assert (use.peak, use.host_peak) == (figures.peak_bytes, figures.host_peak_bytes), drawn
        if coarser is not None:
            fine = coarser.expand(program)
            assert (wrong := validate(graph, fine)) is None, (drawn, wrong)
            assert replay(graph, fine).peak_bytes <= replay(model, program).peak_bytes, drawn
    return count
