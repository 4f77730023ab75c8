"""Lifetimes: what is kept, and where it is freed."""

from random import Random

import pytest

from memopt.errors import InvalidProgramError
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.models.instances import three_layers
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.liveness import computes, store_all, with_frees
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from tests.random_programs import random_program

X, W1, W2, W3, A1, A2, Y, DY, D2, G3, D1, G2, G1 = range(13)


def test_store_all_of_three_layers():
    assert list(store_all(three_layers())) == [
        Compute(0, (A1,)),
        Compute(1, (A2,)),
        Compute(2, (Y,)),
        LossBoundary(),
        Compute(3, (D2, G3)),
        Free(A2),
        Compute(4, (D1, G2)),
        Free(A1),
        Free(D2),
        Compute(5, (G1,)),
        Free(D1),
    ]


def test_recomputed_tensors_are_freed_before_and_kept_again():
    instructions = with_frees(three_layers(), computes(three_layers(), [0, 1, 2, 3, 0, 4, 5]))
    assert list(instructions) == [
        Compute(0, (A1,)),
        Compute(1, (A2,)),
        Free(A1),
        Compute(2, (Y,)),
        LossBoundary(),
        Compute(3, (D2, G3)),
        Free(A2),
        Compute(0, (A1,)),
        Compute(4, (D1, G2)),
        Free(A1),
        Free(D2),
        Compute(5, (G1,)),
        Free(D1),
    ]


def test_results_are_kept_at_their_first_computation_only():
    instructions = with_frees(three_layers(), computes(three_layers(), [0, 1, 2, 2, 3, 4, 5]))
    assert [x.outputs for x in instructions if isinstance(x, Compute) and x.op == 2] == [(Y,), ()]


def norm() -> Graph:
    """A normalisation whose mean the backward reads; its last value is never read."""
    return Graph(
        [
            Tensor("x", 1, TensorKind.INPUT),
            Tensor("y", 10),
            Tensor("mean", 2),
            Tensor("never read", 5),
            Tensor("z", 1, TensorKind.OUTPUT),
            Tensor("dz", 1, TensorKind.GRADIENT),
            Tensor("g", 1, TensorKind.GRADIENT),
        ],
        [
            Operator("norm", (0,), (1, 2, 3), 1.0),
            Operator("head", (1,), (4,), 1.0),
            Operator("backward", (2, 1), (6,), 1.0, 0, Phase.BACKWARD),
        ],
        outputs=(4,),
        gradients=(6,),
        tangents=(5,),
        tangents_held=False,
    )


def test_dead_on_arrival_and_partly_kept_outputs():
    # The recomputation brings y back, so its first instance ends at the head; the mean, read
    # only after the recomputation, comes from there.
    instructions = with_frees(norm(), computes(norm(), [0, 1, 0, 2]))
    assert set(instructions[4:8]) == {LossBoundary(), Free(5), Compute(2, (6,)), Free(1)}
    assert list(instructions[:4]) == [
        Compute(0, (1,)),
        Compute(1, (4,)),
        Free(1),
        Compute(0, (1, 2)),
    ]
    assert validate(norm(), Program(instructions)) is None


def test_an_unread_tangent_that_is_not_held_goes_at_once():
    instructions = list(store_all(norm()))
    boundary = instructions.index(LossBoundary())
    assert instructions[boundary + 1] == Free(5)


def test_boundary_position():
    graph = three_layers()
    marked = computes(graph, [0, 1, 2, None, 0, 3, 4, 5])
    assert marked[3] == LossBoundary()
    assert computes(graph, [0, 1, 2, 0, 3, 4, 5])[4] == LossBoundary()
    assert computes(graph, [0, 1, 2])[-1] == LossBoundary()
    forward = Graph(graph.tensors[:7], graph.operators[:3], outputs=(Y,))
    assert LossBoundary() not in computes(forward, [0, 1, 2])


def test_swaps_end_and_begin_instances():
    graph = three_layers()
    c = computes(graph, range(6))
    moved = [*c[:2], SwapOut(A1), c[2], Free(A1), *c[3:5], SwapIn(A1), c[5], DropHost(A1), c[6]]
    program = Program(with_frees(graph, moved))
    assert validate(graph, program) is None
    assert [x for x in program if getattr(x, "tensor", None) == A1] == [
        SwapOut(A1),
        Free(A1),
        SwapIn(A1),
        Free(A1),
        DropHost(A1),
    ]
    at_once = [x for x in moved if x != Free(A1)]
    instructions = list(with_frees(graph, at_once))
    assert instructions[instructions.index(SwapOut(A1)) + 1] == Free(A1)


def test_reads_of_what_is_not_there_are_refused():
    graph = three_layers()
    c = computes(graph, range(6))
    with pytest.raises(InvalidProgramError, match="'a1' is needed before anything computes it"):
        with_frees(graph, c[1:])
    with pytest.raises(InvalidProgramError, match="instruction 1 frees 'a1', read later"):
        with_frees(graph, [c[0], Free(A1), *c[1:]])


def test_a_free_of_the_callers_own_may_come_late():
    graph = three_layers()
    program = Program(with_frees(graph, [*computes(graph, range(6)), Free(A1)]))
    assert program.instructions.count(Free(A1)) == 1
    assert program.instructions[-1] == Free(A1)
    assert validate(graph, program) is None


@pytest.mark.parametrize("seed", range(100))
def test_lifetimes_are_the_shortest(seed):
    """No Free can move earlier, and nothing kept can be left out."""
    rng = Random(seed)
    graph = random_graph(rng, rng.randint(1, 6))
    program = random_program(rng, graph, recomputations=rng.randint(0, 4))
    assert validate(graph, program) is None
    instructions = program.instructions
    for i, instruction in enumerate(instructions):
        if isinstance(instruction, Free):
            previous = next(
                x for x in reversed(instructions[:i]) if isinstance(x, Compute | LossBoundary)
            )
            if isinstance(previous, Compute):
                assert instruction.tensor in graph.operators[previous.op].reads
            else:
                assert instruction.tensor in graph.tangents
        elif isinstance(instruction, Compute):
            for tensor in set(instruction.outputs) - graph.kept:
                end = instructions.index(Free(tensor), i)
                later = [x.op for x in instructions[i + 1 : end] if isinstance(x, Compute)]
                assert any(tensor in graph.operators[op].reads for op in later)


@pytest.mark.parametrize("seed", range(100))
def test_recomputing_never_frees_later_than_store_all(seed):
    """A re-run that nothing needs costs its own moment and time only, never a longer lifetime."""
    rng = Random(seed)
    graph = random_graph(rng, rng.randint(1, 6))
    order = list(range(len(graph.operators)))
    again = rng.choice(order[: graph.first_backward])
    repeated = [*order[: again + 1], again, *order[again + 1 :]]
    plain = replay(graph, store_all(graph))
    rerun = replay(graph, Program(with_frees(graph, computes(graph, repeated))))
    assert rerun.live_bytes[-1] == plain.live_bytes[-1]
    assert rerun.time_s == plain.time_s + graph.operators[again].time_s
    writes = sum(graph.tensors[t].size_bytes for t in graph.operators[again].writes)
    assert rerun.peak_bytes <= plain.peak_bytes + writes
