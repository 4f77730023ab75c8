"""Plans of steps whose parameters and optimizer state may live on the host."""

import math
from dataclasses import replace
from random import Random

import pytest

from memopt.errors import InfeasibleBudgetError
from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.models.status import Status
from memopt.programs.liveness import store_all
from memopt.programs.moved import carried_over, moved_tensors
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.strategies.moving.bound import link_bound_s
from memopt.strategies.moving.planning import fixed_graph
from memopt.strategies.offload.graph import OffloadGraph
from tests.random_programs import with_host_updates


def layered(layers: int, weight: int = 100, activation: int = 30) -> Graph:
    """A chain of layers with a weight and twice as much optimizer state each."""
    tensors = [Tensor("x", activation, TensorKind.INPUT)]
    operators: list[Operator] = []

    def made(name: str, size: int, kind: TensorKind = TensorKind.ACTIVATION) -> int:
        tensors.append(Tensor(name, size, kind))
        return len(tensors) - 1

    weights = [made(f"w{i}", weight, TensorKind.PARAMETER) for i in range(layers)]
    states = [made(f"s{i}", 2 * weight, TensorKind.OPTIMIZER_STATE) for i in range(layers)]
    outputs = [0]
    for i in range(layers):
        outputs.append(made(f"y{i}", activation))
        operators.append(Operator(f"f{i}", (outputs[i], weights[i]), (outputs[-1],), 1.0))
    updates, gradient = [], ()
    for i in reversed(range(layers)):
        found = made(f"gw{i}", weight), made(f"gy{i}", activation)
        reads = (outputs[i], outputs[i + 1], weights[i], *gradient)
        operators.append(Operator(f"b{i}", reads, found, 2.0, phase=Phase.BACKWARD))
        reads, gradient = (found[0], weights[i], states[i]), found[1:]
        updates.append(Operator(f"u{i}", reads, (), 0.1, phase=Phase.UPDATE, recomputable=False))
    return Graph(tensors, [*operators, *updates], outputs[-1:], movable=(*weights, *states))


@pytest.mark.parametrize(
    ("rate", "share", "duplex"),
    [(60.0, 0.5, True), (300.0, 0.5, False), (math.inf, 0.5, True), (60.0, 1.2, True)],
)
def test_plans_keep_the_budgets_and_the_bound(rate, share, duplex):
    graph = layered(8)
    device = Device(to_host_bytes_per_s=rate, duplex=duplex)
    budget = int(share * graph.movable_bytes)
    found = OffloadGraph().solve(graph, budget, device=device)
    assert found.program is not None
    timeline = replay(graph, found.program, device)
    assert validate(graph, found.program, Budget(budget, timeline.host_peak_bytes)) is None
    assert link_bound_s(graph, budget, device) <= timeline.time_s * (1 + 1e-12)
    assert found.lower_bound_s <= found.time_s == timeline.time_s
    assert bool(moved_tensors(graph, found.program)) == (share < 1.2)


@pytest.mark.parametrize("share", [0.5, pytest.param(0.35, marks=pytest.mark.slow)])
def test_repeated_steps_hide_their_last_copies(share):
    graph, device = layered(8), Device(to_host_bytes_per_s=60.0)
    budget = int(share * graph.movable_bytes)
    once = OffloadGraph().solve(graph, budget, device=device)
    graph = replace(graph, repeated=True)
    found = OffloadGraph().solve(graph, budget, device=device)
    assert validate(graph, found.program, Budget(budget)) is None
    assert carried_over(graph, found.program)
    assert found.time_s == replay(graph, found.program, device).time_s < 0.97 * once.time_s
    assert found.time_s >= link_bound_s(graph, budget, device)


def test_the_link_bound_by_hand():
    graph = layered(4, activation=1)
    # 400 of weights, 800 of state; all but 1 + 300 bytes must come.
    device = Device(to_host_bytes_per_s=10.0, from_host_bytes_per_s=20.0)
    assert link_bound_s(graph, 301, device) == max(4, 100 / 20) + max(8.4, 900 / 20, 900 / 10)
    once = replace(device, duplex=False)
    assert link_bound_s(graph, 301, once) == 5 + 900 / 20 + 900 / 10
    assert link_bound_s(graph, 10**6, device) == pytest.approx(12.4)


def test_a_slow_link_keeps_what_fits():
    graph = layered(5)
    device = Device(to_host_bytes_per_s=50.0)
    times = []
    for share in (0.5, 1.0):
        found = OffloadGraph().solve(graph, int(share * graph.movable_bytes), device=device)
        moved = sum(graph.tensors[t].size_bytes for t in moved_tensors(graph, found.program))
        assert moved >= (1 - share) * graph.movable_bytes
        times.append(found.time_s)
    assert times == sorted(times, reverse=True)
    assert times[0] < replay(graph, found.program, device).time_s + 2 * 1500 / 50 + 600 / 50


@pytest.mark.parametrize("block", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_steps(block):
    moved = hosted = 0
    for seed in range(block * 4, block * 4 + 4):
        rng = Random(seed)
        graph = random_graph(rng, rng.randint(1, 6), updates=True)
        movable = graph.resident.difference(graph.outputs, graph.gradients)
        graph = with_host_updates(rng, replace(graph, movable=sorted(movable)))
        device = Device(to_host_bytes_per_s=rng.choice([1.0, 5.0, 50.0]), duplex=rng.random() < 0.5)
        peak = replay(graph, store_all(graph)).peak_bytes
        least = OffloadGraph().solve(graph, 0, device=device)
        floor = least.smallest_budget_bytes or 0
        below = OffloadGraph().solve(graph, max(0, floor - 1), device=device)
        assert below.program is None or floor == 0
        for budget in {floor, (floor + peak) // 2, peak}:
            found = OffloadGraph().solve(graph, budget, device=device)
            assert validate(graph, found.program, Budget(budget)) is None, seed
            assert found.lower_bound_s <= found.time_s + 1e-12, seed
            if floor < budget < peak:
                repeated = replace(graph, repeated=True)
                again = OffloadGraph().solve(repeated, budget, device=device)
                assert validate(repeated, again.program, Budget(budget)) is None, seed
                assert again.lower_bound_s <= again.time_s + 1e-12, seed
                assert again.time_s <= found.time_s, seed
            resident = OffloadGraph().solve(fixed_graph(graph), budget, device=device)
            if resident.program is not None:
                assert found.time_s <= resident.time_s, seed
            moved += bool(moved_tensors(graph, found.program))
            hosted += len(replay(graph, found.program).host_updates)
    assert moved > 1
    assert hosted


def test_the_smallest_budget_does_not_depend_on_the_time_there_is():
    graph, device = layered(6, weight=20, activation=60), Device(to_host_bytes_per_s=100.0)
    free = OffloadGraph().solve(graph, 0, device=device)
    hurried = OffloadGraph().solve(graph, 0, device=device, time_limit_s=0.0)
    assert hurried.smallest_budget_bytes == free.smallest_budget_bytes
    assert hurried.smallest_budget_bytes < replay(graph, store_all(graph)).peak_bytes // 2


def with_host(graph: Graph, time_s: float, scratch: int = 10, exact: bool = True) -> Graph:
    """The graph whose updates the host may run."""
    choice = Implementation("host", time_s, scratch, (), (), exact=exact, on_host=True)
    operators = (
        replace(o, implementations=(choice,)) if o.phase is Phase.UPDATE else o
        for o in graph.operators
    )
    return replace(graph, operators=tuple(operators))


@pytest.mark.parametrize(
    ("host_s", "rate"),
    [
        (5.0, 60.0),
        pytest.param(0.1, 60.0, marks=pytest.mark.slow),
        pytest.param(50.0, 300.0, marks=pytest.mark.slow),
    ],
)
def test_the_host_updates_where_that_is_cheaper(host_s, rate):
    graph, device = with_host(layered(8), host_s), Device(to_host_bytes_per_s=rate)
    budget = graph.movable_bytes // 2
    found = OffloadGraph().solve(graph, budget, device=device)
    plain = OffloadGraph().solve(layered(8), budget, device=device)
    timeline = replay(graph, found.program, device)
    assert validate(graph, found.program, Budget(budget, timeline.host_peak_bytes)) is None
    assert link_bound_s(graph, budget, device) <= timeline.time_s
    assert bool(timeline.host_updates) == (host_s < 50)
    # With and without, shares of the room are rounded otherwise.
    assert timeline.time_s <= plain.time_s * (0.6 if rate == 60.0 else 1 + 1e-9)
    rounding = with_host(layered(8), host_s, exact=False)
    assert OffloadGraph().solve(rounding, budget, device=device).program == plain.program


def test_a_host_budget_limits_gradients_there():
    graph, device = with_host(layered(8), 1.0), Device(to_host_bytes_per_s=60.0)
    budget = graph.movable_bytes // 2
    free = OffloadGraph().solve(graph, budget, device=device)
    needed = replay(graph, free.program).host_peak_bytes
    kept = OffloadGraph(host_budget_bytes=needed - 1).solve(graph, budget, device=device)
    timeline = replay(graph, kept.program, device)
    assert timeline.host_peak_bytes < needed
    assert timeline.host_updates
    assert free.time_s <= timeline.time_s


def test_the_bound_with_updates_on_the_host_by_hand():
    # 4 updates: of 100 bytes of gradient each, whose device or host takes 0.1 s or 2 s.
    graph = with_host(layered(4, activation=1), 2.0)
    device = Device(to_host_bytes_per_s=10.0, from_host_bytes_per_s=1e9)
    # After the boundary 1,200 - 300 bytes go back, or with x of the updates on the host
    # 1,200 (1 - x) - 300 + 400 x, of which 400 x are gradients: 30 s at x = 3/4.
    assert link_bound_s(graph, 301, device) == pytest.approx(4 + 30, rel=1e-6)
    # A host that is slow: 80 x seconds; 45 s at x = 9/16.
    slow = with_host(layered(4, activation=1), 20.0)
    assert link_bound_s(slow, 301, device) == pytest.approx(4 + 45, rel=1e-6)


def test_too_little_of_the_host_is_an_error():
    graph = layered(4)
    device = Device(to_host_bytes_per_s=100.0)
    budget = graph.movable_bytes // 2
    plan = OffloadGraph().solve(graph, budget, device=device)
    needed = replay(graph, plan.program).host_peak_bytes
    again = OffloadGraph(host_budget_bytes=needed).solve(graph, budget, device=device)
    assert replay(graph, again.program).host_peak_bytes <= needed
    with pytest.raises(InfeasibleBudgetError, match="host budget"):
        OffloadGraph(host_budget_bytes=100).solve(graph, budget, device=device)


def test_without_a_plan_the_smallest_budget_is_named():
    graph = layered(4)
    found = OffloadGraph().solve(graph, 100, device=Device(to_host_bytes_per_s=100.0))
    assert found.status is Status.INFEASIBLE
    assert validate(graph, found.smallest.program, Budget(found.smallest_budget_bytes)) is None
