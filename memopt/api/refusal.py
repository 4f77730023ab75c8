"""The error that plan() raises if no plan fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.bounds import memory_lower_bound
from memopt.models.budget import exact_bytes, format_bytes
from memopt.models.graph import Graph
from memopt.strategies import Solution, Status, Strategy

if TYPE_CHECKING:
    from memopt.step.profiled import Profiled


def infeasible(
    solution: Solution,
    budget_bytes: int | None,
    strategy: Strategy,
    graph: Graph,
    profiled: Profiled | None,
) -> MemoptError:
    """Make the error of a strategy without a plan within the budget, with remedies and figures."""
    smallest = solution.smallest_budget_bytes
    others = _others(strategy, graph)
    bound_bytes = memory_lower_bound(graph)
    proved = f"no plan of any kind needs less than {format_bytes(bound_bytes)}"
    if solution.status is Status.UNKNOWN or budget_bytes is None:
        within = "" if budget_bytes is None else f" within {exact_bytes(budget_bytes)}"
        feasible = "" if smallest is None else f"one is known for {exact_bytes(smallest)}; "
        text = (
            f"{strategy.name} found no plan{within}, and no proof that there is none ({feasible}"
            f"{proved}): give it a larger time_limit_s, raise the budget, or {others}"
        )
        if budget_bytes is None:
            return MemoptError(text)
        return InfeasibleBudgetError(text, budget_bytes, smallest, proved=False)
    known = "no feasible budget is known"
    if smallest is not None:
        least = "is" if smallest <= bound_bytes else "known is"
        known = f"the smallest feasible budget {least} {exact_bytes(smallest)}"
    return InfeasibleBudgetError(
        f"{strategy.name} cannot train within {exact_bytes(budget_bytes)}: "
        f"{known}, of which {format_bytes(graph.resident_bytes)} are resident"
        f"{_fixed(graph, profiled)}; {proved}. {unit_meant(budget_bytes)}"
        f'Raise the budget, pass budget="min", or {others}',
        budget_bytes,
        smallest,
    )


def unit_meant(budget_bytes: int) -> str:
    """Return the question whether GiB were meant, for the message about a number of bytes too small
    for any device."""
    if not 1 <= budget_bytes <= 1024:
        return ""
    return f'A bare number is bytes: did you mean "{budget_bytes}GiB"? '


def _others(strategy: Strategy, graph: Graph) -> str:
    """Name what else to try, for a message."""
    again = strategy.plans_forward and strategy.features.recompute
    if graph.is_forward and not again:
        return (
            'use strategy="monet", "checkmate" or "auto": where there is no backward, '
            f"{strategy.name} runs no operator again"
        )
    if strategy.name == "auto":
        return "keep less: a smaller batch, or kernels that need less"
    return 'use strategy="auto", the default, which asks all of them'


def _fixed(graph: Graph, profiled: Profiled | None) -> str:
    """Name the bytes that no plan can free, for a message."""
    if profiled is None:
        return ""
    from memopt.report.peak import fixed_bytes, fixed_sum

    state = profiled.optimizer
    parts = fixed_bytes(graph, state.parts if state is not None else ())
    return f"; before any activation, {fixed_sum(parts)}"
