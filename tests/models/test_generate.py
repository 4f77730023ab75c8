"""The generators: the same seed gives the same instance, and the features asked for are there."""

from random import Random

import pytest

from memopt.models.generate import Shape, random_chain, random_graph
from memopt.models.graph import Graph, Phase
from memopt.models.steps import ChainStep, Move
from memopt.programs.instructions import Compute, SwapIn, SwapOut
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.reductions.chain_replay import replay_chain
from tests.random_programs import random_placement, random_program


def test_the_same_seed_gives_the_same_instance():
    def everything(seed):
        rng = Random(seed)
        graph = random_graph(rng, 8, implementations=True, updates=True)
        program = random_program(rng, graph, recomputations=5, swaps=3, reorder=True)
        chain = random_chain(rng, 7, parameter_gradients=True, negative_overheads=True)
        return graph, random_placement(rng, graph, program), chain

    assert everything(5) == everything(5)
    assert everything(5) != everything(6)


@pytest.mark.parametrize("shape", Shape)
def test_shapes_of_chains(shape):
    for seed in range(40):
        chain = random_chain(Random(seed), 9, shape=shape)
        sizes = [chain.activation_bytes(i) for i in range(10)]
        if shape is Shape.EQUAL:
            assert len(set(sizes)) == 1
        elif shape is Shape.GROWING:
            assert sizes == sorted(sizes)
        elif shape is Shape.SHRINKING:
            assert sizes == sorted(sizes, reverse=True)
        forward = [ChainStep(Move.FORWARD_ALL, stage) for stage in range(1, 10)]
        backward = [ChainStep(Move.BACKWARD, stage) for stage in range(9, 0, -1)]
        assert replay_chain(chain, forward + backward).time_s == chain.compute_time_s


def test_features_of_chains():
    plain = [random_chain(Random(seed), 5) for seed in range(50)]
    rich = [
        random_chain(Random(seed), 5, parameter_gradients=True, negative_overheads=True)
        for seed in range(50)
    ]

    def any_stage(chains, condition):
        return any(condition(stage) for chain in chains for stage in chain.stages)

    assert not any_stage(plain, lambda stage: stage.parameter_gradient_bytes)
    assert not any_stage(plain, lambda stage: stage.backward_overhead_bytes < 0)
    assert any_stage(rich, lambda stage: stage.parameter_gradient_bytes)
    assert any_stage(rich, lambda stage: stage.backward_overhead_bytes < 0)
    assert any_stage(plain, lambda stage: stage.forward_no_save_overhead_bytes is not None)
    assert {chain.input_gradient_bytes > 0 for chain in plain} == {False, True}
    assert any_stage(plain, lambda stage: stage.forward_time_s == stage.backward_time_s == 0)


def test_graphs_are_training_steps():
    graphs = [random_graph(Random(seed), 8, updates=seed % 2 == 0) for seed in range(60)]
    assert all(graph.tangents and graph.outputs for graph in graphs)
    assert {graph.tangents_held for graph in graphs} == {False, True}
    phases = {operator.phase for graph in graphs for operator in graph.operators}
    assert phases == set(Phase)

    def some(condition):
        return any(condition(graph) for graph in graphs)

    def unread(graph: Graph):
        return any(not graph.readers[t] and t not in graph.kept for t in graph.producer)

    assert some(unread)
    assert some(lambda graph: any(not op.recomputable for op in graph.operators))
    assert some(lambda graph: any(op.name.startswith("add") for op in graph.operators))
    assert some(lambda graph: any(len(op.writes) > 1 for op in graph.operators))
    assert some(lambda graph: any(tensor.size_bytes == 0 for tensor in graph.tensors))
    saved = [
        t
        for graph in graphs
        for t in graph.producer
        if graph.producer[t] < graph.first_backward
        and any(reader >= graph.first_backward for reader in graph.readers[t])
    ]
    assert len(saved) > 60


def test_inference_graphs_have_no_backward():
    graph = random_graph(Random(1), 6, inference=True)
    assert graph.first_backward == len(graph.operators)
    assert not graph.tangents
    assert validate(graph, store_all(graph)) is None


def test_programs_recompute_swap_and_reorder():
    again = swapped = moved = 0
    for seed in range(60):
        rng = Random(seed)
        graph = random_graph(rng, 6)
        program = random_program(rng, graph, recomputations=4, swaps=3, reorder=True)
        assert validate(graph, program) is None
        ran = [x.op for x in program if isinstance(x, Compute)]
        again += len(ran) - len(set(ran))
        outs = [x.tensor for x in program if isinstance(x, SwapOut)]
        assert sorted(outs) == sorted(x.tensor for x in program if isinstance(x, SwapIn))
        swapped += len(outs)
        first = list(dict.fromkeys(ran))
        moved += first != sorted(first)
    assert again > 100
    assert swapped > 80
    assert moved > 40


def test_placements_reuse_addresses():
    reused = 0
    for seed in range(30):
        rng = Random(seed)
        graph = random_graph(rng, 8)
        program = random_placement(rng, graph, store_all(graph))
        assert validate(graph, program) is None
        total = sum(graph.tensors[tensor].size_bytes for _, tensor, _ in program.offsets)
        reused += replay(graph, program).arena_bytes < total
    assert reused > 20
