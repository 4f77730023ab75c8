"""The laws that every strategy keeps, checked on one cost model: see `Strategy.solve`."""

from __future__ import annotations

import json
from pathlib import Path

import memopt
from memopt.api.plan import Plan
from memopt.api.planning import solve
from memopt.api.solving import baseline_figures
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.files.plan_file import encode
from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.steps import has_transfers
from memopt.programs.validate import memory_use, validate
from memopt.reductions.chain_replay import replay_chain
from memopt.strategies import Strategy
from memopt.strategies.host_budget import with_host_budget
from memopt.strategies.target import chain_view
from tests.models.validate_chain import validate_chain
from tests.offload.validate_offload import validate_offload

LINK = Device(to_host_bytes_per_s=5.0)
SHARES = (0.3, 1.0)
"""Of the way from the smallest budget to what the unplanned step needs."""


def planned(
    strategy: Strategy,
    model: Chain | Graph,
    budget: int | str | None,
    host_budget_bytes: int | None = None,
    **passes: bool,
) -> Plan | None:
    """A plan; None where the strategy refuses the budget, which it does with words."""
    try:
        return solve(
            model, budget, strategy, device=LINK, host_budget_bytes=host_budget_bytes, **passes
        )
    except MemoptError as error:
        refusal = error
    smallest = None
    if isinstance(refusal, InfeasibleBudgetError):
        smallest = refusal.smallest_budget_bytes
    if isinstance(budget, int) and host_budget_bytes is None and smallest is not None:
        assert smallest > budget
    # No other error than these: an invalid plan, for one, is a defect.
    known = isinstance(refusal, InfeasibleBudgetError)
    assert known or any(words in str(refusal) for words in ("smallest budget", "no proof"))
    return None


def check_plan(plan: Plan, model: Chain | Graph, folder: Path) -> None:
    """A plan by itself: valid within both budgets, its figures, and a file of it."""
    assert plan.budget is None or plan.peak_bytes <= plan.budget
    assert plan.host_budget is None or plan.host_peak_bytes <= plan.host_budget
    assert 0 <= plan.lower_bound_s <= plan.step_time_s
    assert plan.gap >= 0
    limits = Budget(plan.budget, plan.host_peak_bytes)
    if isinstance(model, Graph):
        assert plan.program is not None
        assert validate(model, plan.program, limits) is None
        use = memory_use(model, plan.program)
        assert use.host_peak == plan.host_peak_bytes
        assert use.peak == plan.peak_bytes or plan.program.offsets is not None
    else:
        assert plan.chain_steps is not None
        if has_transfers(plan.chain_steps):
            assert validate_offload(model, plan.chain_steps, limits) is None
        else:
            assert validate_chain(model, plan.chain_steps, plan.budget) is None
            assert replay_chain(model, plan.chain_steps).peak_bytes == plan.peak_bytes
    json.dumps(encode(plan), allow_nan=False)
    plan.save(folder / "plan.json")
    loaded = memopt.load(folder / "plan.json")
    assert (loaded.program, loaded.chain_steps) == (plan.program, plan.chain_steps)


def same(one: Plan | None, other: Plan | None) -> bool:
    """Whether two plans are the same, byte for byte."""
    if one is None or other is None:
        return one is other
    return (one.program, one.chain_steps, one.status) == (
        other.program,
        other.chain_steps,
        other.status,
    )


def budgets_of(strategy: Strategy, model: Chain | Graph) -> list[int | None]:
    """The smallest budget, if the strategy knows it, some above it, and none."""
    least = planned(strategy, model, "min")
    enough = baseline_figures(chain_view(model).graph, None).peak_bytes
    low = enough // 2 if least is None or least.budget is None else least.budget
    above = (low + round(share * max(0, enough - low)) for share in SHARES)
    return [*([low] if least is not None else []), *above, None]


def check_budgets(strategy: Strategy, model: Chain | Graph, folder: Path) -> int:
    """Every budget: a checked plan, the same each time, or a refusal; how many plans."""
    found = 0
    for budget in budgets_of(strategy, model):
        plan = planned(strategy, model, budget)
        assert same(plan, planned(strategy, model, budget))
        if plan is not None:
            check_plan(plan, model, folder)
            found += 1
        else:
            assert budget is not None, "a step without a budget has a plan"
    return found


def check_smallest(
    strategy: Strategy, model: Chain | Graph, folder: Path, exact: bool = True
) -> None:
    """The smallest budget is one of the strategy's own, and one byte less is refused (`exact`)."""
    least = planned(strategy, model, "min")
    if least is None:
        return
    assert least.budget is not None
    again = planned(strategy, model, least.budget)
    assert again is not None
    check_plan(again, model, folder)
    assert not exact or planned(strategy, model, least.budget - 1) is None


def check_host_budget(strategy: Strategy, model: Chain | Graph, folder: Path) -> bool:
    """Never more on the host than is allowed; whether any is there without a limit."""
    least = planned(strategy, model, "min")
    if least is None or not least.host_peak_bytes:
        return False
    for allowed in (least.host_peak_bytes, least.host_peak_bytes - 1, 0):
        plan = planned(with_host_budget(strategy, allowed), model, least.budget, allowed)
        if plan is not None:
            check_plan(plan, model, folder)
            assert plan.host_budget == allowed
    return True
