"""A chain as a graph of operators: it costs what the chain costs, for every strategy."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

import memopt
from memopt.models.budget import Budget
from memopt.models.chain import Chain, Stage
from memopt.models.device import Device
from memopt.models.generate import random_chain
from memopt.models.instances import rotor_toy
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.reductions.chain_operators import operators_of
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.linearize import linearize
from memopt.reductions.lower import lower_steps
from memopt.strategies import Status
from tests.models.training_graphs import random_schedule, store_all_steps

LINK = Device(to_host_bytes_per_s=5.0)


def chain_of(seed: int, least: int = 1) -> Chain:
    rng = Random(seed)
    return random_chain(
        rng,
        rng.randint(least, 6),
        parameter_gradients=rng.random() < 0.5,
        negative_overheads=rng.random() < 0.5,
        resident_bytes=rng.choice((0, 5)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_a_schedule_of_the_chain_is_a_program_of_its_operators(seed: int) -> None:
    """In the same time, and in at most the same memory."""
    chain = chain_of(seed)
    staged = linearize(operators_of(chain))
    extra = len(staged.chain) - len(chain)
    """The input's own stage, if it became one, and the loss boundary."""
    first = extra - 1
    assert first in (0, 1)
    for k in range(4):
        steps = random_schedule(chain, seed * 10 + k, detours=0.15 * k)
        own = replay_chain(chain, steps)
        moved = [replace(step, stage=step.stage + first) for step in steps]
        before = store_all_steps(staged.chain)[:first]
        middle = next(n for n, step in enumerate(steps) if step.move.name == "BACKWARD")
        last = store_all_steps(staged.chain)[len(staged.chain) - 1 : len(staged.chain) + 1]
        after = store_all_steps(staged.chain)[2 * len(staged.chain) - first :]
        whole = (*before, *moved[:middle], *last, *moved[middle:], *after)
        program = lower_steps(staged, whole, keep_unread=True)
        assert validate(staged.graph, program, Budget(own.peak_bytes)) is None
        assert replay(staged.graph, program).time_s == own.time_s


@pytest.mark.parametrize("seed", range(40))
def test_without_a_plan_it_costs_what_the_chain_does(seed: int) -> None:
    """But for δ^n, which is not there before the loss boundary."""
    chain = chain_of(seed)
    graph = operators_of(chain)
    own, papers = replay(graph, store_all(graph)), replay_chain(chain, store_all_steps(chain))
    early = chain.gradient_bytes(len(chain))
    assert papers.peak_bytes - early <= own.peak_bytes <= papers.peak_bytes
    assert own.time_s == papers.time_s == graph.compute_time_s


def test_the_papers_toy_has_its_optimum_on_either_side() -> None:
    """Its fourth stage saves less than its output."""
    chain = rotor_toy()
    for model in (chain, operators_of(chain)):
        plan = memopt.plan(model, budget="min", strategy="rotor", progress=False)
        assert (plan.peak_bytes, round(1000 * plan.step_time_s, 2)) == (82_120_000, 56.17)


def test_only_the_memory_that_is_needed_is_written() -> None:
    """F_∅ leaves out what only F_all saves: two large stages, never both saved at once."""
    stage = Stage(1.0, 1.0, 10, 100, 10)
    chain = Chain(10, [stage, stage, Stage(0, 0, 0, 0, 0)])
    for model in (chain, operators_of(chain)):
        plan = memopt.plan(model, budget="min", strategy="rotor", progress=False)
        assert plan.peak_bytes == 140


QUICK = (
    "store-all",
    "rotor",
    "rotor-free",
    "greedy",
    "offload-graph",
    "rotor-menus",
    "monet",
    "olla",
)
BEYOND_ROTOR = {"monet", "olla", "joint"}
"""They plan operators, in any way that Rotor does, or without recomputing anything."""
MONOTONE = {"store-all", "sequential", "revolve", "rotor", "rotor-optimal", "rotor-free", "olla"}
"""Those that promise it; others do where they prove an optimum."""


@pytest.mark.parametrize("seed", range(3))
def test_every_family_plans_a_chain(seed: int) -> None:
    check_strategies(chain_of(seed, least=2), QUICK)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(30))
def test_every_strategy_plans_a_chain(seed: int) -> None:
    check_strategies(chain_of(seed, least=2), tuple(memopt.strategies()))


def check_strategies(chain: Chain, names: tuple[str, ...]) -> None:
    """Check that all plans are valid, above their bounds and never slower in more memory, and that
    proved optima of strategies that plan operators are not slower than Rotor's."""
    table = memopt.compare(
        chain,
        strategies=names,
        points=3,
        device=LINK,
        time_limit_s=20,
        cache=False,
        workers=1,
        progress=False,
    )
    graph = operators_of(chain)
    for budget in table.budgets:
        rotor_s = rotors(graph, budget)
        for cell in (cell for cell in table.cells if cell.budget_bytes == budget):
            plan = cell.plan
            if plan is None:
                refused = cell.status is Status.INFEASIBLE or "found no plan" in cell.note
                assert refused, cell
                continue
            assert validate(plan.graph, plan.program, Budget(budget)) is None
            assert plan.lower_bound_s <= plan.step_time_s
            if cell.strategy in BEYOND_ROTOR and plan.status is Status.OPTIMAL:
                assert plan.step_time_s <= rotor_s + 1e-9, (cell.strategy, budget)
    for name in names:
        own = [cell for cell in table.cells if cell.strategy == name and cell.plan is not None]
        for less, more in pairwise(own):
            if name in MONOTONE or more.status is Status.OPTIMAL:
                assert (more.step_time_s or 0) <= (less.step_time_s or 0) + 1e-9, name


def rotors(graph: memopt.Graph, budget: int | None) -> float:
    """Return the time of Rotor's plan, seconds; infinity if there is none."""
    try:
        return memopt.plan(graph, budget=budget, strategy="rotor", progress=False).step_time_s
    except memopt.InfeasibleBudgetError:
        return float("inf")
