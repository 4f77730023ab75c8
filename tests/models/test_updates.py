"""Whole steps for strategies that plan a forward and a backward."""

from __future__ import annotations

from random import Random

from memopt.models.budget import Budget
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.programs.instructions import Compute
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.stage_map import has_updates
from memopt.reductions.step_linearization import linearize_step, with_early_updates, without_updates
from memopt.strategies.offload.dynprog import DynProg
from memopt.strategies.rotor import Rotor


def steps(count: int, seed: int) -> list[Graph]:
    rng = Random(seed)
    found: list[Graph] = []
    while len(found) < count:
        graph = random_graph(rng, rng.randint(1, 8), updates=True)
        if has_updates(graph):
            found.append(graph)
    return found


def test_updates_come_right_after_the_last_use() -> None:
    for graph in steps(60, 1):
        plain = without_updates(graph)
        assert not has_updates(plain)
        program = with_early_updates(graph, store_all(plain))
        assert validate(graph, program) is None
        assert replay(graph, program).peak_bytes <= replay(graph, store_all(graph)).peak_bytes
        computed = [x.op for x in program if isinstance(x, Compute)]
        assert sorted(computed) == list(range(len(graph.operators)))
        others = [i for i in computed if graph.operators[i].phase is not Phase.UPDATE]
        for index in set(computed) - set(others):
            needs = {
                i
                for t in graph.operators[index].reads
                for i in (*graph.readers[t], graph.producer.get(t, -1))
            }
            if graph.operators[index].random:
                needs |= {i for i in others if graph.operators[i].random}
            last = max(i for i, op in enumerate(computed) if op in needs and op in others)
            between = computed[last + 1 : computed.index(index)]
            assert all(graph.operators[i].phase is Phase.UPDATE for i in between)


def test_programs_need_at_most_their_schedules_memory() -> None:
    recomputed = 0
    for graph in steps(15, 2):
        view = linearize_step(graph)
        assert abs(view.chain.compute_time_s - graph.compute_time_s) < 1e-9
        floor = Rotor().smallest_budget(view.chain)
        most = replay(graph, store_all(graph)).peak_bytes
        for share in (0.0, 0.3, 0.7):
            solution = Rotor().solve(view.chain, int(floor + share * max(0, most - floor)))
            assert solution.steps is not None
            program = view.lower(solution.steps)
            assert validate(graph, program) is None
            timeline = replay(graph, program)
            chain = replay_chain(view.chain, solution.steps)
            assert timeline.peak_bytes <= chain.peak_bytes
            recomputed += timeline.time_s > graph.compute_time_s + 1e-9
    assert recomputed > 4


def layered(layers: int) -> Graph:
    """A chain of layers whose parameters (100 bytes) outweigh their activations (1 byte)."""
    tensors = [Tensor("x", 1, TensorKind.INPUT)]
    tensors += [Tensor(f"w{i}", 100, TensorKind.PARAMETER) for i in range(layers)]
    values = [0, *range(len(tensors), len(tensors) + layers)]
    tensors += [Tensor(f"y{i}", 1) for i in range(layers)]
    operators = [
        Operator(f"f{i}", (values[i], 1 + i), (values[i + 1],), 1.0) for i in range(layers)
    ]
    flowing = values[-1]
    updates = []
    for i in reversed(range(layers)):
        made = len(tensors)
        tensors += [Tensor(f"g{i}", 100, TensorKind.GRADIENT), Tensor(f"d{i}", 1)]
        reads = (flowing, values[i], 1 + i)
        operators.append(Operator(f"b{i}", reads, (made, made + 1), 1.0, phase=Phase.BACKWARD))
        updates.append(Operator(f"u{i}", (made, 1 + i), (), 1.0, phase=Phase.UPDATE))
        flowing = made + 1
    return Graph(tensors, [*operators, *updates], outputs=(values[-1],))


def test_a_gradient_lives_in_its_stage_only() -> None:
    graph = layered(6)
    view = linearize_step(graph)
    floor = Rotor().smallest_budget(view.chain)
    assert floor <= graph.resident_bytes + 2 * 100 + 20
    assert Rotor().smallest_budget(without_updates(graph).to_chain()) >= 6 * 100 + floor - 2 * 100
    solution = Rotor().solve(view.chain, floor)
    assert solution.steps is not None
    program = view.lower(solution.steps)
    assert validate(graph, program, Budget(floor)) is None


def test_moving_strategies_take_steps_too() -> None:
    for graph in steps(10, 4):
        view = linearize_step(graph)
        solution = DynProg().solve(view.chain, None, device=Device(to_host_bytes_per_s=5.0))
        assert solution.steps is not None
        assert validate(graph, view.lower(solution.steps)) is None
