"""joint as users call it: combined where that pays, never slower than its starts, honest floors."""

from __future__ import annotations

from random import Random

import pytest

import memopt
from memopt.errors import MemoptError
from memopt.models.bounds import memory_lower_bound
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.programs.instructions import Compute, SwapOut
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies import Joint, Status, resolve
from memopt.strategies.base import Strategy
from tests.strategies.joint.chains import chain_of
from tests.strategies.monet.graphs import training_graph

LINK = Device(to_host_bytes_per_s=1.0)
SINGLES = ("rotor", "rotor-menus", "offload-graph", "dynprog", "monet")


def time_of(graph: Graph, budget: int, strategy: str | Strategy) -> float | None:
    """Predicted seconds of a plan within a budget; None: there is none."""
    try:
        plan = memopt.plan(
            graph, budget=budget, strategy=strategy, device=LINK, progress=False, time_limit_s=20.0
        )
    except MemoptError:
        return None
    return plan.step_time_s


def test_moving_and_recomputing_together_beats_either() -> None:
    graph = chain_of(8, 8, 4.0)
    peak = replay(graph, store_all(graph)).peak_bytes
    budget = peak - 30
    single = [time_of(graph, budget, name) for name in SINGLES]
    solution = Joint(changes=300).solve(graph, budget, device=LINK)
    assert solution.program is not None
    assert solution.time_s is not None
    assert solution.time_s < min(time for time in single if time is not None)
    runs = [x.op for x in solution.program if isinstance(x, Compute)]
    assert len(runs) > len(set(runs))
    assert any(isinstance(x, SwapOut) for x in solution.program)
    assert (solution.lower_bound_s or 0.0) <= solution.time_s


@pytest.mark.parametrize(("seed", "rotors"), [(1, 0.75), (8, 0.65), (9, 0.7)])
def test_the_least_memory_is_lowered_at_all_of_its_peaks(seed: int, rotors: float) -> None:
    """One change lowers one of several equal peaks: none of them makes the peak less alone."""
    graph = training_graph(Random(seed), 30, True)
    own, other = (resolve(name).solve(graph, 1) for name in ("joint", "rotor-menus"))
    assert own.smallest_budget_bytes is not None
    assert other.smallest_budget_bytes is not None
    assert own.smallest_budget_bytes <= rotors * other.smallest_budget_bytes


@pytest.mark.parametrize("seed", [0, 3, 5])
def test_never_slower_than_the_single_strategies(seed: int) -> None:
    graph = random_graph(Random(seed), 6, implementations=True)
    peak = replay(graph, store_all(graph)).peak_bytes
    for share in (0.7, 0.85):
        budget = int(share * peak)
        single = [time_of(graph, budget, name) for name in SINGLES]
        known = [time for time in single if time is not None]
        joint = time_of(graph, budget, Joint(changes=200))
        if known:
            assert joint is not None
            assert joint <= min(known) * (1 + 1e-9)


def test_the_floor_is_no_larger_than_that_of_any_single_strategy() -> None:
    for seed in (1, 2):
        graph = random_graph(Random(seed), 6)
        floors = {}
        for name in (*SINGLES, "joint"):
            plan = memopt.plan(
                graph, budget="min", strategy=name, device=LINK, progress=False, time_limit_s=20.0
            )
            assert plan.budget is not None
            floors[name] = plan.budget
        assert floors["joint"] == min(floors.values())
        assert floors["joint"] >= memory_lower_bound(graph)


def test_without_a_link_nothing_moves() -> None:
    graph = chain_of(6, 8, 4.0)
    budget = replay(graph, store_all(graph)).peak_bytes - 16
    for device in (None, Device()):
        program = Joint(changes=100).solve(graph, budget, device=device).program
        assert program is not None
        assert not program.has_transfers


def test_the_hosts_budget_is_kept() -> None:
    graph = chain_of(8, 8, 4.0)
    budget = replay(graph, store_all(graph)).peak_bytes - 30
    for host in (0, 8, 16):
        plan = memopt.plan(
            graph, budget=budget, host_budget=host, strategy=Joint(changes=100), device=LINK,
            progress=False,
        )  # fmt: skip
        assert plan.host_peak_bytes <= host


def test_below_what_any_plan_needs_the_refusal_is_a_proof() -> None:
    graph = random_graph(Random(1), 5)
    solution = Joint(changes=50).solve(graph, memory_lower_bound(graph) - 1, device=LINK)
    assert solution.status is Status.INFEASIBLE
    assert solution.smallest is not None
    assert solution.smallest.program is not None


def test_a_refusal_says_what_no_plan_of_any_kind_can_do_with() -> None:
    graph = random_graph(Random(1), 5)
    proved = memory_lower_bound(graph)
    with pytest.raises(MemoptError, match=rf"smallest feasible .*needs less than {proved} B"):
        memopt.plan(
            graph, budget=proved - 1, strategy=Joint(changes=50), device=LINK, progress=False
        )


def test_it_has_a_name() -> None:
    assert resolve("joint") == Joint()
