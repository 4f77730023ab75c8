"""The lower bounds hold for every plan, and are tight where they should be."""

from random import Random

import pytest

from memopt.models.bounds import (
    memory_lower_bound,
    needed_operators,
    spared_operators,
    time_lower_bound,
)
from memopt.models.chain import Chain, Stage
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.models.instances import MEGABYTE, rotor_toy, three_layers
from memopt.programs.replay import replay
from tests.random_programs import random_program

from .chain_bounds import chain_memory_lower_bound
from .chain_search import best_makespan, smallest_peak


@pytest.mark.parametrize("block", range(10))
def test_no_random_program_is_below_the_bounds(block):
    for seed in range(block * 50, block * 50 + 50):
        rng = Random(seed)
        graph = random_graph(
            rng, rng.randint(1, 7), implementations=seed % 2 == 0, updates=seed % 3 == 0
        )
        lowest, fastest = memory_lower_bound(graph), time_lower_bound(graph)
        for _ in range(6):
            program = random_program(
                rng,
                graph,
                recomputations=rng.randint(0, 8),
                swaps=rng.randint(0, 5),
                reorder=rng.random() < 0.7,
            )
            timeline = replay(graph, program)
            assert lowest <= timeline.peak_bytes, seed
            assert fastest <= timeline.time_s, seed


def test_three_layers_by_hand():
    graph = three_layers()
    # The backward of layer 2: output, held tangent, d2, a1, d1, g2, workspace.
    assert memory_lower_bound(graph) == 964 + 100 + 100 + 200 + 300 + 300 + 300 + 60
    assert time_lower_bound(graph) == graph.compute_time_s == 11


def test_results_at_the_end_bind():
    tensors = [Tensor("x", 1, TensorKind.INPUT), Tensor("y", 10), Tensor("z", 10)]
    operators = [Operator("f", (0,), (1,), 1.0), Operator("g", (0,), (2,), 1.0)]
    assert memory_lower_bound(Graph(tensors, operators, outputs=(1, 2))) == 21
    assert memory_lower_bound(Graph(tensors, operators, outputs=(2,))) == 11


def test_the_loss_boundary_binds():
    graph = three_layers()
    heavy = Graph(
        graph.tensors,
        graph.operators,
        graph.outputs,
        graph.gradients,
        graph.tangents,
        boundary_bytes=5000,
    )
    assert memory_lower_bound(heavy) == 964 + 100 + 100 + 5000


def test_only_what_is_needed_counts():
    graph = Graph(
        [Tensor("x", 0, TensorKind.PARAMETER)] + [Tensor(f"t{i}", 10) for i in range(4)],
        [
            Operator("needed", (0,), (1,), 1.0),
            Operator("unneeded", (1,), (2,), 100.0, 10_000),
            Operator("result", (1,), (3,), 2.0),
            Operator("update", (0, 3), (), 4.0, 0, Phase.UPDATE),
        ],
        outputs=(3,),
    )
    assert needed_operators(graph) == {0, 2, 3}
    assert time_lower_bound(graph) == 7
    assert memory_lower_bound(graph) == 20


def test_the_best_implementation_counts():
    choices = (
        Implementation("fast", 1.0, 100),
        Implementation("small", 5.0, 0),
        Implementation("lean", 9.0, 30, reads=()),
    )
    graph = Graph(
        [Tensor("x", 7, TensorKind.INPUT), Tensor("a", 40), Tensor("y", 10)],
        [
            Operator("f", (0,), (1,), 2.0),
            Operator("g", (0, 1), (2,), 3.0, 50, implementations=choices),
        ],
        outputs=(2,),
    )
    # "lean" does without a, so the first operator is not needed.
    assert needed_operators(graph) == {1}
    assert time_lower_bound(graph) == 1
    assert memory_lower_bound(graph) == 7 + 10 + 30


def test_tensors_of_implementations_may_be_outside_the_arena():
    # "bits" writes a tensor that the operator itself does not.
    bits = Implementation("bits", 1.0, writes=(1, 2))
    graph = Graph(
        [Tensor("x", 1, TensorKind.INPUT), Tensor("y", 1), Tensor("bits", 1)],
        [Operator("y", (0,), (1,), 1.0, implementations=(bits,))],
        outputs=(1,),
        allocator_owned=(2,),
    )
    assert spared_operators(graph) == frozenset()


@pytest.mark.parametrize("block", range(6))
def test_no_chain_schedule_is_below_the_bound(block):
    tight = 0
    for seed in range(block * 25, block * 25 + 25):
        rng = Random(seed)
        chain = random_chain(
            rng,
            rng.randint(1, 4),
            parameter_gradients=seed % 2 == 0,
            negative_overheads=seed % 3 == 0,
            resident_bytes=rng.randint(0, 5),
        )
        peak = smallest_peak(chain)
        assert (
            chain_memory_lower_bound(chain)
            <= chain_memory_lower_bound(chain, transfers=False)
            <= peak
        )
        tight += chain_memory_lower_bound(chain, transfers=False) == peak
        assert best_makespan(chain, 10**9) >= time_lower_bound(chain)
    assert tight >= 5


def test_toy_chain():
    # 82.12 MB is the smallest feasible budget.
    bound = chain_memory_lower_bound(rotor_toy(), transfers=False)
    assert chain_memory_lower_bound(rotor_toy()) <= bound <= round(82.12 * MEGABYTE)
    assert bound > 0.95 * 82.12 * MEGABYTE
    assert time_lower_bound(rotor_toy()) * 1000 == pytest.approx(37.38)


def test_chain_by_hand():
    chain = Chain(10, [Stage(1, 1, 20, 25, 21, 0, 0, 3, 100), Stage(1, 1, 0, 0, 5)], 1000, 11)
    # B^1: a^0, ā^1, δ^1, δ^0, overhead, its parameter gradient.
    assert chain_memory_lower_bound(chain) == 1000 + 10 + 25 + 21 + 11 + 3 + 100
    assert smallest_peak(chain) == chain_memory_lower_bound(chain)
