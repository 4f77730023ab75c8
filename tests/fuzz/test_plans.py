"""Cost models under every law: a few in every run, thousands with HYPOTHESIS_PROFILE=long.

A counterexample is an instance's seed, which `python -m tests.fuzz plans --first SEED --count 1`
runs again; the chain and graph tests draw the instance itself, so that hypothesis shrinks it.
"""

from __future__ import annotations

import os
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph
from memopt.programs.replay import replay
from memopt.programs.validate import memory_use, validate
from memopt.strategies import STRATEGIES, Rotor, Strategy
from memopt.strategies.target import Target
from memopt.testing.case import Case
from memopt.testing.solutions import SolutionCheck, check_order, store_all_peak
from tests.fuzz.drawn import Drawn
from tests.fuzz.extremes import fuzz_extremes
from tests.fuzz.instances import instance, slower, wider, with_figures
from tests.fuzz.plans import follows, fuzz_plans

PROFILE = settings(settings.get_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci")))
CHEAP = [s for s in STRATEGIES if s.name in ("rotor", "revolve", "greedy", "store-all")]


@pytest.mark.parametrize("seed", [3, 17])
def test_every_strategy_keeps_the_laws(seed: int) -> None:
    row = fuzz_plans(seed)
    assert not row.wrong, row.wrong
    assert row.cases >= 40


@pytest.mark.parametrize(
    ("seed", "strategy"),
    [
        (1, "rotor-menus"),  # its bound was above the optimum, and no budget slower than one
        (6, "rotor-menus"),  # a byte below its "min" was planned
        (112, "rotor-menus"),  # an implementation that spares an operator, without a budget
        (117, "monet"),  # no backward, and no budget
        (90034, "auto"),  # no backward: no budget slower than one, within the gap it ended at
        (90217, "joint"),  # no budget slower than one, by the tolerance of "optimal"
        (90237, "offload-graph"),  # order=True refused its own peak
        (90351, "rotor-optimal"),  # recomputing before a backward that needs it saves memory
        (90456, "rotor-menus"),  # no budget slower than one: a gradient apart from the other
        (90474, "monet"),  # no budget slower than one: an operator that nothing needs
        pytest.param(6, "joint", marks=pytest.mark.slow),
        pytest.param(8, "rotor-menus", marks=pytest.mark.slow),
    ],
)
def test_extreme_figures(seed: int, strategy: str) -> None:
    row = fuzz_extremes(seed, (strategy,))
    assert not row.wrong, row.wrong
    assert row.cases >= 4


@PROFILE
@given(
    rng=st.randoms(use_true_random=False),
    strategy=st.sampled_from(CHEAP),
    length=st.integers(1, 6),
    share=st.floats(0, 1),
)
def test_chains(rng: Random, strategy: Strategy, length: int, share: float) -> None:
    chain = random_chain(rng, length, parameter_gradients=True)
    case = Case(strategy, "drawn", chain, Device(to_host_bytes_per_s=5.0), monotone=True)
    check = SolutionCheck(case, Target.of(strategy, chain))
    enough = store_all_peak(chain)
    least = min(check.solved(1).smallest_budget_bytes or enough, enough)
    budget = max(1, least + round(share * (enough - least)))
    times = {}
    for one in (budget, max(budget, enough)):
        solution = check.solved(one)
        times[float(one)] = solution, check.time_s(solution, one)
    if strategy.name != "greedy":
        check_order(case, times)
    follows(case, budget, times[float(budget)], rng)


@PROFILE
@given(
    rng=st.randoms(use_true_random=False),
    forward=st.integers(1, 5),
    recomputations=st.integers(0, 5),
    swaps=st.integers(0, 4),
)
def test_drawn_programs(rng: Random, forward: int, recomputations: int, swaps: int) -> None:
    graph = random_graph(rng, forward, implementations=True, updates=rng.random() < 0.2)
    program = Drawn(rng.randrange(10**6), recomputations, swaps, True).solve(graph, None).program
    assert program is not None
    assert validate(graph, program) is None
    use, figures = memory_use(graph, program), replay(graph, program)
    assert (use.peak, use.host_peak) == (figures.peak_bytes, figures.host_peak_bytes)


def test_instances_are_what_they_say() -> None:
    found = [instance(seed) for seed in range(60)]
    assert {type(one.model) for one in found} == {Chain, Graph}
    assert len({one.label.rsplit(" ", 1)[0] for one in found}) == 5
    chain = next(one.model for one in found if isinstance(one.model, Chain))
    twice = with_figures(chain, time=lambda t: 2 * t, size=lambda s: 3 * s, name=str.upper)
    assert isinstance(twice, Chain)
    assert twice.compute_time_s == 2 * chain.compute_time_s
    assert twice.input_bytes == 3 * chain.input_bytes
    link = wider(slower(Device(to_host_bytes_per_s=8.0), 2.0), 3)
    assert (link.to_host_bytes_per_s, link.swap_in_bytes_per_s) == (12.0, 12.0)


@pytest.mark.slow
def test_a_thousand_stages() -> None:
    """Rotor and its kin in slots, within budgets from the smallest upwards."""
    chain = random_chain(Random(1), 1000, max_bytes=2**30, max_time_s=9)
    for strategy in (Rotor(slots=60, exact_stages=0), *CHEAP[:1]):
        case = Case(strategy, "a thousand stages", chain, Device(to_host_bytes_per_s=2**28))
        check = SolutionCheck(case, Target.of(strategy, chain))
        enough = store_all_peak(chain)
        least = min(check.solved(1).smallest_budget_bytes or enough, enough)
        for budget in (least, (least + enough) // 2, None):
            solution = check.solved(budget)
            assert solution.plans
            check.time_s(solution, budget)
