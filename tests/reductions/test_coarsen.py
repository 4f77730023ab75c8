"""Coarsening: coarse plans expand to fine ones with no more memory and the same time."""

from __future__ import annotations

import random

import pytest

from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.programs.instructions import Compute, Free, Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.reductions.coarsen import Coarsening, coarsen
from tests.models.training_graphs import drawing, random_training_graph
from tests.random_programs import random_placement, random_program


def small() -> Graph:
    """x → norm → relu → matmul, with a loss boundary and the backward of each."""
    tensors = [
        Tensor("x", 8, TensorKind.INPUT),
        Tensor("weight", 4, TensorKind.PARAMETER),
        Tensor("norm", 10),
        Tensor("relu", 20),
        Tensor("product", 6, TensorKind.OUTPUT),
        Tensor("tangent", 6, TensorKind.GRADIENT),
        Tensor("grad_relu", 20),
        Tensor("grad_weight", 4),
    ]
    operators = [
        Operator("norm", (0,), (2,), 1.0, workspace_bytes=3),
        Operator("relu", (2,), (3,), 4.0),
        Operator("matmul", (3, 1), (4,), 8.0),
        Operator("matmul_backward", (5, 3), (6,), 8.0, phase=Phase.BACKWARD),
        Operator("weight_backward", (6,), (7,), 0.1, phase=Phase.BACKWARD),
    ]
    return Graph(tensors, operators, outputs=(4,), gradients=(7,), tangents=(5,))


def check_expansion(coarsening: Coarsening, program: Program) -> None:
    """The laws of `Coarsening.expand`."""
    expanded = coarsening.expand(program)
    assert validate(coarsening.graph, program) is None
    assert validate(coarsening.fine, expanded) is None
    coarse, fine = replay(coarsening.graph, program), replay(coarsening.fine, expanded)
    assert fine.peak_bytes <= coarse.peak_bytes
    assert fine.host_peak_bytes == coarse.host_peak_bytes
    assert fine.time_s == pytest.approx(coarse.time_s)


def test_a_tensor_inside_a_group_becomes_workspace() -> None:
    coarsening = coarsen(small(), 3)
    assert coarsening.groups == ((0, 1), (2,), (3, 4))
    forward, _, backward = coarsening.graph.operators
    assert (forward.name, forward.time_s) == ("norm+1", 5.0)
    # While relu runs, 10 bytes of norm are there beside relu's 20.
    assert forward.workspace_bytes == 10
    assert [coarsening.graph.tensors[t].name for t in forward.writes] == ["relu"]
    # grad_relu (20) is freed only after weight_backward (4) has run.
    assert backward.workspace_bytes == 20
    names = [tensor.name for tensor in coarsening.graph.tensors]
    assert not {"norm", "grad_relu"}.intersection(names)
    assert coarsening.graph.resident_bytes == coarsening.fine.resident_bytes


def test_forward_and_backward_are_never_merged() -> None:
    assert coarsen(small(), 1).groups == ((0, 1, 2), (3, 4))


def test_an_operator_that_runs_once_stays_alone() -> None:
    graph = small()
    operators = list(graph.operators)
    operators[1] = Operator("relu", (2,), (3,), 1.0, recomputable=False)
    graph = Graph(graph.tensors, operators, graph.outputs, graph.gradients, graph.tangents)
    assert coarsen(graph, 1).groups == ((0,), (1,), (2,), (3, 4))


def test_counters_share_a_group_out_of_the_way() -> None:
    """Batch norm's num_batches_tracked + 1 lies between the layers and may run once only."""
    tensors = [Tensor("x", 8, TensorKind.INPUT), Tensor("count", 1, TensorKind.BUFFER)]
    operators = []
    for i in range(4):
        tensors += [Tensor(f"y{i}", 8), Tensor(f"count{i}", 1, TensorKind.OUTPUT)]
        operators += [
            Operator(f"layer{i}", (2 * i,) if i else (0,), (2 + 2 * i,), 1.0),
            Operator(f"counter{i}", (1,), (3 + 2 * i,), 0.0, recomputable=False),
        ]
    graph = Graph(tensors, operators, outputs=(8, 3, 5, 7, 9))
    coarsening = coarsen(graph, 2)
    assert coarsening.groups == ((0, 2, 4, 6), (1, 3, 5, 7))
    assert not coarsening.graph.operators[1].recomputable
    check_expansion(coarsening, store_all(coarsening.graph))


def test_enough_operators_already() -> None:
    graph = small()
    coarsening = coarsen(graph, 5)
    assert coarsening.graph.operators == graph.operators
    assert coarsening.expand(store_all(coarsening.graph)) == store_all(graph)


def test_a_placement_is_refused() -> None:
    coarsening = coarsen(small(), 3)
    program = random_placement(random.Random(0), coarsening.graph, store_all(coarsening.graph))
    with pytest.raises(ValueError, match="place it afterwards"):
        coarsening.expand(program)


def test_no_operators_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        coarsen(small(), 0)


@pytest.mark.parametrize("seed", range(150))
def test_random_plans_expand(seed: int) -> None:
    rng = random.Random(seed)
    if seed % 2:
        graph = random_graph(
            rng, rng.randint(1, 12), implementations=rng.random() < 0.3, updates=rng.random() < 0.3
        )
    else:
        graph = random_training_graph(seed, layers=rng.randint(1, 8))
    graph = drawing(rng, graph) if seed % 3 == 0 else graph
    wanted = rng.randint(1, len(graph.operators))
    coarsening = coarsen(graph, wanted)
    assert sorted(i for group in coarsening.groups for i in group) == list(
        range(len(graph.operators))
    )
    assert coarsening.graph.compute_time_s == pytest.approx(graph.compute_time_s)
    check_expansion(coarsening, store_all(coarsening.graph))
    for _ in range(3):
        program = random_program(
            rng,
            coarsening.graph,
            recomputations=rng.randint(0, 6),
            swaps=rng.randint(0, 3),
            reorder=rng.random() < 0.5,
        )
        check_expansion(coarsening, program)


def test_a_recomputed_group_leaves_live_tensors_alone() -> None:
    """A group runs again for one of its tensors while another one of them is still live."""
    tensors = [Tensor("x", 1, TensorKind.INPUT), *(Tensor(name, 5) for name in "abcd")]
    operators = [
        Operator("a", (0,), (1,), 0.1),
        Operator("b", (1,), (2,), 0.1),
        Operator("c", (1, 2), (3,), 9.0),
        Operator("d", (1, 2, 3), (4,), 9.0),
    ]
    graph = Graph(tensors, operators, outputs=(4,))
    coarsening = coarsen(graph, 3)
    assert coarsening.groups[0] == (0, 1)
    program = Program(
        [
            Compute(0, (1, 2)),
            Compute(1, (3,)),
            Free(2),
            Compute(0, (2,)),
            Compute(2, (4,)),
            Free(1),
            Free(2),
            Free(3),
        ]
    )
    check_expansion(coarsening, program)
