"""Tensors that begin and end on the host: replay, validator, lifetimes, bounds, files."""

from dataclasses import replace
from random import Random

import pytest

from memopt.models.bounds import memory_lower_bound
from memopt.models.budget import Budget
from memopt.models.codec import codec
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.models.reader import Reader
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.lifetimes import lifetimes
from memopt.programs.liveness import store_all, with_frees
from memopt.programs.moved import moved_tensors
from memopt.programs.replay import replay
from memopt.programs.validate import ViolationCode, memory_use, validate
from memopt.report.memory_profile import program_profile
from tests.random_programs import random_moves, random_program

Code = ViolationCode
X, W, S, Y, G = range(5)


def step() -> Graph:
    """y = f(x, w); g = b(y, w); update(g, w, s): the weight of 10 bytes, its state of 20."""
    return Graph(
        tensors=[
            Tensor("x", 1, TensorKind.INPUT),
            Tensor("w", 10, TensorKind.PARAMETER),
            Tensor("s", 20, TensorKind.OPTIMIZER_STATE),
            Tensor("y", 3),
            Tensor("g", 10, TensorKind.GRADIENT),
        ],
        operators=[
            Operator("f", (X, W), (Y,), 2.0),
            Operator("b", (Y, W), (G,), 4.0, phase=Phase.BACKWARD),
            Operator("u", (G, W, S), (), 1.0, phase=Phase.UPDATE, recomputable=False),
        ],
        movable=(W, S),
    )


GOOD = (
    SwapIn(W),
    Compute(0, (Y,)),
    LossBoundary(),
    Compute(1, (G,)),
    Free(Y),
    SwapIn(S),
    Compute(2, ()),
    Free(G),
    SwapOut(W),
    SwapOut(S),
    Free(W),
    Free(S),
)


def test_a_step_by_hand():
    graph, program = step(), Program(GOOD)
    timeline = replay(graph, program, Device(to_host_bytes_per_s=10, from_host_bytes_per_s=5))
    assert validate(graph, program) is None
    assert moved_tensors(graph, program) == {W, S}
    assert timeline.step_bytes == (11, 14, 14, 24, 24, 41, 41, 41, 31, 31, 31, 21)
    assert set(timeline.host_bytes) == {30}
    # w arrives at 2, f ends at 4, b at 8; s arrives at 12, u ends at 13; w is back at 14, s at 16.
    assert timeline.time_s == 16.0
    assert timeline.total_stall_s == 2 + 4 + 3
    assert memory_lower_bound(graph) == 41
    assert validate(graph, program, Budget(41, 30)) is None
    assert validate(graph, program, Budget(40)).code is Code.OVER_BUDGET
    assert validate(graph, program, Budget(None, 29)).code is Code.OVER_HOST_BUDGET
    assert [x.key for x in lifetimes(graph, program).device if x.tensor in (W, S)] == [
        (0, W),
        (5, S),
    ]
    assert lifetimes(graph, program).host == []


def test_what_no_instruction_names_is_resident():
    graph = step()
    plain = replace(graph, movable=())
    program = store_all(graph)
    assert program == store_all(plain)
    assert replay(graph, program) == replay(plain, program)
    assert memory_use(graph, program) == memory_use(plain, program)


def without(position: int) -> tuple[object, ...]:
    return (*GOOD[:position], *GOOD[position + 1 :])


def put(position: int, instruction: object) -> tuple[object, ...]:
    return (*GOOD[:position], instruction, *GOOD[position:])


AGAIN = Operator("again", (G, W), (), 1.0, phase=Phase.UPDATE, recomputable=False)
TWICE_UPDATED = replace(step(), operators=(*step().operators, AGAIN))

MUTATIONS = [
    (without(0), Code.READ_ON_HOST, 0),
    (put(1, SwapIn(W)), Code.SWAP_IN_WHILE_LIVE, 1),
    (put(1, SwapOut(W)), Code.SWAP_OUT_TWICE, 1),
    (put(2, SwapOut(S)), Code.SWAP_OUT_ABSENT, 2),
    (put(2, Free(S)), Code.FREED_ABSENT, 2),
    (put(2, DropHost(W)), Code.HOME_DROPPED, 2),
    (without(8), Code.CHANGE_LOST, 9),
    (without(10), Code.LEFT_ON_DEVICE, 11),
    (put(10, SwapOut(W)), Code.SWAP_OUT_TWICE, 10),
    (put(2, Free(X)), Code.RESIDENT_MOVED, 2),
    ((*GOOD[:7], SwapOut(W), Compute(3, ()), *GOOD[7:]), Code.CHANGED_WHILE_COPIED, 8),
]


@pytest.mark.parametrize(("instructions", "code", "position"), MUTATIONS)
def test_mutations_are_named(instructions, code, position):
    graph = TWICE_UPDATED if code is Code.CHANGED_WHILE_COPIED else step()
    violation = validate(graph, Program(instructions))
    assert (violation.code, violation.instruction) == (code, position)


def test_with_frees_leaves_movable_tensors_alone():
    graph = step()
    moves = (Free(W), Free(S))
    bare = [x for x in GOOD if not isinstance(x, Free) or x in moves]
    assert sorted(map(str, with_frees(graph, bare))) == sorted(map(str, GOOD))


def test_only_resident_tensors_are_movable_and_files_keep_them():
    graph = step()
    with pytest.raises(ValueError, match="tensor 3 is movable"):
        replace(graph, movable=(Y,))
    made = codec(Graph)
    assert made.read(Reader(made.encode(graph), "graph")) == graph
    assert "movable" not in made.encode(replace(graph, movable=()))


@pytest.mark.parametrize("block", range(6))
def test_replay_and_validator_agree_on_random_moves(block):
    moved = 0
    for seed in range(block * 25, block * 25 + 25):
        rng = Random(seed)
        graph = random_graph(rng, rng.randint(1, 8), updates=rng.random() < 0.8)
        movable = graph.resident.difference(graph.outputs, graph.gradients)
        graph = replace(graph, movable=sorted(movable))
        program = random_moves(rng, graph, random_program(rng, graph, recomputations=2, swaps=2))
        moved += len(moved_tensors(graph, program))
        timeline, use = replay(graph, program), memory_use(graph, program)
        assert timeline.step_bytes == tuple(use.during), seed
        assert timeline.host_bytes == tuple(use.host), seed
        assert validate(graph, program, Budget(use.peak, use.host_peak)) is None, seed
        assert memory_lower_bound(graph) <= timeline.peak_bytes, seed
        over = validate(graph, program, Budget(timeline.peak_bytes - 1))
        assert (over.code, over.instruction) == (Code.OVER_BUDGET, timeline.peak_instruction), seed
        profile = program_profile(graph, program)
        assert profile.total_bytes == timeline.step_bytes, seed
        for position, instruction in enumerate(program):
            if isinstance(instruction, SwapIn | SwapOut):
                rest = [*program.instructions[:position], *program.instructions[position + 1 :]]
                assert validate(graph, Program(rest)) is not None, (seed, position)
    assert moved > 15
