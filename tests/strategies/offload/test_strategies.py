"""The laws of every chain offloading strategy on random small chains, and bad input."""

from __future__ import annotations

import dataclasses
import importlib.util
import random

import pytest

from memopt.errors import InfeasibleBudgetError
from memopt.models.budget import Budget
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator, Tensor
from memopt.models.status import Status
from memopt.programs.solution import Solution
from memopt.strategies.base import Strategy
from memopt.strategies.offload import AutoSwap, DynProg, Greedy, OffloadExact, Tflms, Vdnn
from memopt.strategies.offload.ordered import lower_bound_s
from memopt.strategies.offload.problem import offload_problem
from tests.strategies.offload.chains import three_stages
from tests.strategies.offload.oracle import TOLERANCE, paper_link, random_chain
from tests.strategies.offload.replay_offload import replay_offload
from tests.strategies.offload.validate_offload import validate_offload

FAST = (Greedy(), DynProg(), DynProg(slots=None), DynProg(slots=20, refine=False), Vdnn(), Tflms())
ALL = (*FAST, AutoSwap(trials=8), OffloadExact(effort=0.5))


def random_device(rng: random.Random) -> Device:
    return Device(
        to_host_bytes_per_s=rng.choice([0.5, 1.0, 3.0]),
        from_host_bytes_per_s=rng.choice([None, 0.5, 1.0, 3.0]),
        transfer_latency_s=rng.choice([0.0, 0.0, 0.25]),
        duplex=rng.random() < 0.5,
    )


def check_laws(strategy: Strategy, chain: Chain, budget: int, device: Device) -> Solution:
    solution = strategy.solve(chain, budget, device=device)
    if solution.status is Status.INFEASIBLE:
        smallest = solution.smallest_budget_bytes
        assert smallest is not None
        assert smallest > budget
        assert strategy.solve(chain, smallest, device=device).steps is not None
        return solution
    assert solution.steps is not None
    assert validate_offload(chain, solution.steps, Budget(budget)) is None
    timeline = replay_offload(chain, solution.steps, device)
    assert timeline.peak_bytes == solution.peak_bytes
    assert timeline.peak_bytes <= budget
    assert timeline.time_s == solution.time_s
    problem = offload_problem(chain, budget, device)
    assert lower_bound_s(problem, duplex=device.duplex) <= timeline.time_s + TOLERANCE
    assert solution.lower_bound_s is not None
    assert solution.lower_bound_s <= timeline.time_s
    assert timeline.host_peak_bytes <= solution.stats["chosen_bytes"]
    # Whole transfers at instruction boundaries are never faster than the relaxation.
    if not device.duplex and device.transfer_latency_s == 0:
        assert solution.stats["fractional_optimum_s"] <= solution.stats["paper_time_s"] + TOLERANCE
    return solution


def sweep(strategies: tuple[Strategy, ...], seed: int, count: int, longest: int) -> int:
    rng = random.Random(seed)
    planned = 0
    for _ in range(count):
        chain, device = random_chain(rng, rng.randint(1, longest)), random_device(rng)
        problem = offload_problem(chain, None, device)
        budget = chain.resident_bytes + rng.randint(
            max(0, problem.floor_bytes - 3), problem.peak_bytes + 1
        )
        for strategy in strategies:
            planned += check_laws(strategy, chain, budget, device).steps is not None
    return planned


def test_laws() -> None:
    assert sweep(FAST, 41, 150, 9) > 600


def test_laws_of_the_searching_strategies() -> None:
    assert sweep(ALL[-2:], 42, 12, 6) > 12


@pytest.mark.slow
def test_laws_on_thousands() -> None:
    assert sweep(FAST, 43, 3000, 12) > 10000
    assert sweep(ALL, 44, 60, 7) > 200


def test_at_the_floor_every_waiting_strategy_plans() -> None:
    rng = random.Random(45)
    for _ in range(40):
        chain, device = random_chain(rng, rng.randint(2, 8)), random_device(rng)
        floor = chain.resident_bytes + offload_problem(chain, None, device).floor_bytes
        for strategy in (Greedy(), DynProg(), Vdnn()):
            assert strategy.solve(chain, floor, device=device).steps is not None
            below = strategy.solve(chain, floor - 1, device=device)
            assert below.status is Status.INFEASIBLE
            assert below.smallest_budget_bytes == floor


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: f"{s.name}")
def test_same_plan_twice(strategy: Strategy) -> None:
    chain, device = random_chain(random.Random(46), 7), paper_link(1.0)
    problem = offload_problem(chain, None, device)
    budget = chain.resident_bytes + (problem.floor_bytes + 2 * problem.peak_bytes) // 3
    first, second = (strategy.solve(chain, budget, device=device) for _ in range(2))
    assert first.steps == second.steps
    assert first.status == second.status


@pytest.mark.parametrize("strategy", ALL, ids=lambda s: f"{s.name}")
def test_infinite_bandwidth_costs_nothing(strategy: Strategy) -> None:
    chain = random_chain(random.Random(47), 6)
    device = Device()
    problem = offload_problem(chain, None, device)
    budget = chain.resident_bytes + (problem.floor_bytes + problem.peak_bytes) // 2
    solution = check_laws(strategy, chain, budget, device)
    if solution.steps is not None:
        assert solution.time_s == pytest.approx(chain.compute_time_s)


def test_host_budget_too_small() -> None:
    chain = three_stages()
    for strategy in (Greedy, DynProg, Vdnn, OffloadExact, AutoSwap):
        with pytest.raises(InfeasibleBudgetError, match="host_budget_bytes=1 is too small") as e:
            strategy(host_budget_bytes=1).solve(chain, 8, device=paper_link(1))
        # At 9 a byte must go, and the smallest activation has two: what is named has a plan.
        assert e.value.smallest_budget_bytes == 10
        assert strategy(host_budget_bytes=1).solve(chain, 10, device=paper_link(1)).plans
        assert "at least 2 bytes" in str(e.value)


def test_host_budget_is_kept() -> None:
    chain = three_stages()
    for strategy in (Greedy, DynProg, Vdnn, OffloadExact, AutoSwap):
        solution = strategy(host_budget_bytes=4).solve(chain, 8, device=paper_link(1))
        assert solution.steps is not None
        assert validate_offload(chain, solution.steps, Budget(8, 4)) is None


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="to_host_bytes_per_s must be positive"):
        Device(to_host_bytes_per_s=0.0)
    with pytest.raises(ValueError, match="to_host_bytes_per_s must be positive"):
        Device(to_host_bytes_per_s=-12.2e9)
    with pytest.raises(ValueError, match="greedy moves data: pass device="):
        Greedy().solve(three_stages(), 8)
    with pytest.raises(ValueError, match="host_budget_bytes must be at least 0"):
        Greedy(host_budget_bytes=-1)
    with pytest.raises(ValueError, match="slots must be at least 1"):
        DynProg(slots=0)
    with pytest.raises(ValueError, match="trials must be at least 1"):
        AutoSwap(trials=0)
    graph = Graph((Tensor("x", 1),), (Operator("f", (), (0,), 1.0),))
    with pytest.raises(ValueError, match="greedy plans a chain, not a Graph"):
        Greedy().solve(graph, 8, device=paper_link(1))


def test_autoswap_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    reason = AutoSwap().why_not(three_stages())
    assert reason == "autoswap needs optuna: pip install optuna"


def test_tflms_has_one_peak_per_parameters() -> None:
    """Low budgets are out of its reach, and it says where it begins."""
    chain, device = three_stages(), paper_link(0.5)
    solution = Tflms().solve(chain, 7, device=device)
    assert solution.status is Status.INFEASIBLE
    smallest = solution.smallest_budget_bytes
    assert smallest is not None
    assert 7 < smallest <= 10
    for strategy in (Tflms(), dataclasses.replace(Tflms(), offload_input=False)):
        assert strategy.solve(chain, 10, device=device).time_s == 6.0
