"""Checks of the laws of plans, which `memopt.plan` makes from a strategy's solutions."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from memopt.api.plan import Plan, load
from memopt.api.planning import solve
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.files.plan_file import encode
from memopt.models.budget import Budget
from memopt.models.graph import Graph
from memopt.programs.validate import memory_use, validate
from memopt.strategies import Strategy
from memopt.strategies.host_budget import FIELD, with_host_budget
from memopt.testing.case import Case, Law
from memopt.testing.solutions import budgets_between, store_all_peak

_WORDS = ("smallest budget", "no proof")
"""An error that refuses a budget for a good reason contains one of these."""


def check_plans(case: Case) -> None:
    """Check plans for the smallest budget, for budgets above it and for none; ordered and placed
    ones; and plans within host budgets."""
    least = plan_or_refusal(case, "min")
    enough = store_all_peak(case.model)
    low = enough // 2 if least is None or least.budget is None else least.budget
    for budget in budgets_between(low, enough):
        plan = plan_or_refusal(case, budget)
        again = plan_or_refusal(case, budget)
        case.require(Law.DETERMINISTIC, _same(plan, again), budget, "the second plan is another")
        wanted = budget is None or (least is not None and budget == low)
        law = Law.PLANS if budget is None else Law.SMALLEST
        case.require(law, plan is not None or not wanted, budget, "there is no plan")
        if plan is not None:
            check_plan(case, plan)
    if least is not None and low > 1 and case.exact_smallest:
        below = plan_or_refusal(case, low - 1)
        case.require(Law.SMALLEST, below is None, low - 1, f"a plan; named were {low} bytes")
    if isinstance(case.model, Graph):
        for limit in ("min", None):
            passed = plan_or_refusal(case, limit, order=True, place=True)
            law, found = Law.PLANS, "there is no plan after the passes"
            case.require(law, passed is not None or limit is not None, None, found)
            if passed is not None:
                check_plan(case, passed)
    if least is not None:
        _check_host_budgets(case, least)


def plan_or_refusal(
    case: Case,
    budget: int | str | None,
    host_budget_bytes: int | None = None,
    strategy: Strategy | None = None,
    **passes: bool,
) -> Plan | None:
    """Plan; return None if the strategy refuses the budget, after checking its message."""
    known = budget if isinstance(budget, int) else None
    try:
        return solve(
            case.model,
            budget,
            strategy or case.strategy,
            device=case.device,
            host_budget_bytes=host_budget_bytes,
            **passes,
        )
    except MemoptError as error:
        refusal = error
    if isinstance(refusal, InfeasibleBudgetError):
        smallest = refusal.smallest_budget_bytes
        if known is not None and host_budget_bytes is None and smallest is not None:
            found = f"refused, but {smallest} bytes are named"
            case.require(Law.SMALLEST, smallest > known, known, found)
    else:
        # Any other error, such as an invalid plan, is a defect.
        proper = any(words in str(refusal) for words in _WORDS)
        case.require(Law.REFUSAL, proper, known, f"{type(refusal).__name__}: {refusal}")
    return None


def check_plan(case: Case, plan: Plan) -> None:
    """Check one plan: it is valid within both budgets, its figures agree, and it can be saved."""
    budget, peak = plan.budget, plan.peak_bytes
    case.require(Law.BUDGETS, budget is None or peak <= budget, budget, f"peak {peak} bytes")
    host, host_peak = plan.host_budget, plan.host_peak_bytes
    shown = f"{host_peak} bytes on the host, {host} are allowed"
    case.require(Law.BUDGETS, host is None or host_peak <= host, budget, shown)
    times = f"bound {plan.lower_bound_s} s, step {plan.step_time_s} s, gap {plan.gap}"
    holds = 0 <= plan.lower_bound_s <= plan.step_time_s and plan.gap >= 0
    case.require(Law.BOUND, holds, budget, times)
    _check_validity(case, plan)
    _check_file(case, plan)
    case.plans += 1
    case.host_peak_bytes = max(case.host_peak_bytes, host_peak)


def _check_validity(case: Case, plan: Plan) -> None:
    """Check that the validator accepts the plan, and that its own peaks are those of the replay."""
    graph, program, budget = plan.graph, plan.program, plan.budget
    violation = validate(graph, program, Budget(budget, plan.host_peak_bytes))
    case.require(Law.VALID, violation is None, budget, str(violation))
    use = memory_use(graph, program)
    counted = plan.peak_bytes if program.offsets is not None else use.peak, use.host_peak
    known = plan.peak_bytes, plan.host_peak_bytes
    case.require(Law.VALID, counted == known, budget, f"peaks {known}, counted {counted}")
    if case.also is not None:
        case.also(case.model, plan)


def _check_file(case: Case, plan: Plan) -> None:
    try:
        json.dumps(encode(plan), allow_nan=False)
        with tempfile.TemporaryDirectory() as folder:
            plan.save(Path(folder) / "plan.json")
            loaded = load(Path(folder) / "plan.json")
    except (MemoptError, TypeError, ValueError) as error:
        case.require(Law.FILE, False, plan.budget, str(error))
        raise
    case.require(Law.FILE, _same(plan, loaded), plan.budget, "another plan was loaded")


def _same(one: Plan | None, other: Plan | None) -> bool:
    """Whether two plans have the same program, chain steps and status."""
    if one is None or other is None:
        return one is other
    return (one.program, one.chain_steps, one.status) == (
        other.program,
        other.chain_steps,
        other.status,
    )


def _check_host_budgets(case: Case, least: Plan) -> None:
    """Check that plans keep host budgets, for strategies that take one."""
    if not (case.strategy.features.offload and hasattr(case.strategy, FIELD)):
        return
    peak = least.host_peak_bytes
    for allowed in (peak, peak - 1, 0) if peak else ():
        limited = with_host_budget(case.strategy, allowed)
        plan = plan_or_refusal(case, least.budget, allowed, limited)
        if plan is not None:
            case.require(Law.BUDGETS, plan.host_budget == allowed, plan.budget, "it is forgotten")
            check_plan(case, plan)
