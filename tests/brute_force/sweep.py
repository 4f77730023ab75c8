"""What every strategy promises, against exhaustive search: no false "infeasible", no bound above an
optimum, and a plan for every budget that is named, whatever the time limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import memopt
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.generate import random_chain
from memopt.models.graph import Graph
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies import STRATEGIES, Joint, Strategy
from memopt.strategies.offload.exact import OffloadExact
from tests.brute_force.program_search import ProgramSearch, Rules
from tests.brute_force.tiny_graphs import tiny_graph
from tests.strategies.rotor import brute_force as chains

LINK = memopt.Device(to_host_bytes_per_s=3.0)
NO_TIME_S, SOME_TIME_S = 1e-6, 20.0
SAME = 1e-6
"""Relative gap of an optimum: solvers' whole numbers round costs."""

Optimum = Callable[[int], float]
"""optimum(budget in bytes): seconds of the fastest schedule of a class; infinity: there is none."""


@dataclass
class Found:
    """What a sweep counts, and what it found wrong."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def strategies() -> tuple[Strategy, ...]:
    """All of them; those that search, with little effort."""
    quick: dict[str, Strategy] = {
        "joint": Joint(changes=100),
        "offload-exact": OffloadExact(effort=0.05),
    }
    return tuple(quick.get(strategy.name, strategy) for strategy in STRATEGIES)


def check(
    model: Graph | Chain, strategy: Strategy, budget: int, optimum: Optimum | None, label: str
) -> Found:
    """One strategy at "min", at once and with time, at the budget that it names, below it, and at
    a budget.

    Args:
        model: what is planned.
        strategy: who plans.
        budget: total bytes.
        optimum: of the strategy's class; None: no search of it is made.
        label: for what is wrong.
    """
    found = Found()

    def plan(budget: int | str, limit_s: float) -> memopt.Plan | MemoptError | None:
        found.counts["solves"] += 1
        try:
            made = memopt.plan(
                model, budget=budget, strategy=strategy, device=LINK, time_limit_s=limit_s,
                progress=False,
            )  # fmt: skip
        except MemoptError as error:
            return error
        except ValueError as error:
            found.wrong.append(f"{label} {strategy.name} {budget}: {error!r}")
            return None
        found.counts["plans"] += 1
        verdict(made, budget)
        return made

    def verdict(made: memopt.Plan, budget: int | str) -> None:
        assert made.budget is not None
        violation, figures = validate_and_replay(
            made.graph, made.program, Budget(made.budget), LINK
        )
        least_s = made.step_time_s if optimum is None else optimum(made.budget)
        if violation is not None or figures.peak_bytes != made.peak_bytes:
            found.wrong.append(f"{label} {strategy.name} {budget}: {violation}")
        if made.lower_bound_s > least_s * (1 + SAME) + 1e-9:
            bound = f"bound {made.lower_bound_s} above {least_s} within {made.budget}"
            found.wrong.append(f"{label} {strategy.name} {budget}: {bound}")

    def refused(budget: int, limit_s: float) -> None:
        """At a budget that may not be enough, and then at what the refusal names."""
        error = plan(budget, limit_s)
        if not isinstance(error, InfeasibleBudgetError):
            found.counts["unknown"] += isinstance(error, MemoptError)
            return
        found.counts["infeasible" if error.proved else "unknown"] += 1
        if error.proved and optimum is not None and optimum(budget) < float("inf"):
            found.wrong.append(f"{label} {strategy.name}: {budget} bytes are feasible")
        if error.smallest_budget_bytes is None:
            found.wrong.append(f"{label} {strategy.name}: names no budget")
        elif isinstance(plan(error.smallest_budget_bytes, limit_s), MemoptError):
            named = error.smallest_budget_bytes
            found.wrong.append(f"{label} {strategy.name}: named {named}, then no plan")

    for limit_s in (NO_TIME_S, SOME_TIME_S):
        least = plan("min", limit_s)
        if isinstance(least, MemoptError):
            found.wrong.append(f'{label} {strategy.name} "min" in {limit_s} s: {least}')
        elif least is not None and least.budget is not None:
            if isinstance(plan(least.budget, limit_s), MemoptError):
                found.wrong.append(f"{label} {strategy.name} {least.budget}: no plan again")
            if least.budget > 1 and limit_s == SOME_TIME_S:
                refused(least.budget - 1, limit_s)
    refused(budget, SOME_TIME_S)
    return found


def check_graph(seed: int, names: tuple[str, ...] = ()) -> Found:
    """Every strategy on a random tiny graph; `names`: only those."""
    rng = Random(seed)
    graph = tiny_graph(rng)
    peak = memopt.plan(graph, strategy="store-all", progress=False).peak_bytes
    budget = rng.randint(max(1, peak // 2), max(1, peak))
    optima = graph_optima(graph)
    found = Found()
    for strategy in strategies():
        if names and strategy.name not in names:
            continue
        one = check(graph, strategy, budget, optima.get(strategy.name), f"graph {seed}")
        found.counts += one.counts
        found.wrong += one.wrong
    return found


def graph_optima(graph: Graph) -> dict[str, Optimum]:
    """Strategy → the optimum of its class, for those that plan graphs and prove something."""
    backward_once = Rules(forward_again=True, after_boundary=True, drops=False)

    def default_only(*_: object) -> bool:
        return False

    chosen = ProgramSearch(graph, backward_once)
    recomputed = ProgramSearch(graph, Rules(drops=False), allowed=default_only)
    once = Rules(in_order=False, again=False)
    reordered = ProgramSearch(graph, once, allowed=default_only, all_run=True)
    return {
        "monet": chosen.least_time,
        "rotor-menus": chosen.least_time,
        "auto": chosen.least_time,
        "checkmate": recomputed.least_time,
        "checkmate-rounding": recomputed.least_time,
        "olla": reordered.least_time,
    }


def check_chain(seed: int, names: tuple[str, ...] = ()) -> Found:
    """Every strategy on a random tiny chain; `names`: only those."""
    rng = Random(seed)
    chain = random_chain(
        rng,
        rng.randint(1, 7),
        parameter_gradients=rng.random() < 0.5,
        resident_bytes=rng.choice([0, 5]),
    )
    peak = memopt.plan(chain, strategy="store-all", progress=False).peak_bytes
    budget = rng.randint(max(1, peak // 2), max(1, peak))
    optima = chain_optima(chain)
    found = Found()
    for strategy in strategies():
        if strategy.needs == "graph" or (names and strategy.name not in names):
            continue
        one = check(chain, strategy, budget, optima.get(strategy.name), f"chain {seed}")
        found.counts += one.counts
        found.wrong += one.wrong
    return found


def chain_optima(chain: Chain) -> dict[str, Optimum]:
    """Strategy → the optimum of its class, for those that recompute."""
    kinds = {
        "rotor": chains.PERSISTENT,
        "revolve": chains.REVOLVE,
        "rotor-optimal": chains.OPTIMAL,
        "rotor-free": chains.LAZY,
    }
    sizes, times = chains.arrays(chain)

    def optimum(kind: int) -> Optimum:
        return lambda budget: chains.fastest(
            len(chain), sizes, times, kind, budget - chain.resident_bytes
        )[0]

    return {name: optimum(kind) for name, kind in kinds.items()}
