"""Tensors that begin and end on the host: replay, validator, lifetimes, bounds, files."""

from dataclasses import replace
from random import Random

import pytest

from memopt.errors import InvalidProgramError
from memopt.models.bounds import memory_lower_bound, time_lower_bound
from memopt.models.budget import Budget
from memopt.models.codec import codec
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
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
from memopt.programs.moved import carried_over, moved_tensors
from memopt.programs.replay import replay
from memopt.programs.serialize import dumps, loads
from memopt.programs.validate import ViolationCode, memory_use, validate
from memopt.report.memory_profile import program_profile
from tests.random_programs import (
    random_host_updates,
    random_moves,
    random_program,
    with_host_updates,
)

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

REPEATED = replace(step(), repeated=True)
CARRIED = (
    SwapOut(W),
    SwapOut(S),
    Compute(0, (Y,)),
    Free(S),
    Free(W),
    LossBoundary(),
    SwapIn(W),
    Compute(1, (G,)),
    Free(Y),
    SwapIn(S),
    Compute(2, ()),
    Free(G),
)


def test_a_repeated_step_by_hand():
    program = Program(CARRIED)
    timeline = replay(REPEATED, program, Device(to_host_bytes_per_s=10, from_host_bytes_per_s=5))
    assert validate(REPEATED, program) is None
    assert carried_over(REPEATED, program) == (W, S)
    assert timeline.step_bytes == (31, 31, 34, 34, 14, 4, 14, 24, 24, 41, 41, 41)
    assert set(timeline.host_bytes) == {30}
    # f runs while w (until 1) and s (until 3) go; w comes from 3 to 5, b ends at 9; s comes by 13.
    assert timeline.stall_s == (0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 4, 0)
    assert timeline.time_s == 14.0
    assert memory_use(REPEATED, program).during == list(timeline.step_bytes)
    assert [x.key for x in lifetimes(REPEATED, program).device if x.tensor == W] == [
        (-1, W),
        (6, W),
    ]
    # A step that is not repeated begins with nothing on the device.
    assert validate(step(), program).code is Code.SWAP_OUT_ABSENT
    with pytest.raises(InvalidProgramError):
        replay(step(), program)


REPEATED_MUTATIONS = [
    ((*CARRIED, SwapOut(W)), Code.NOT_LEFT, 13),
    ((*CARRIED, SwapOut(W), Free(W)), Code.NOT_LEFT, 14),
    ((*CARRIED[:4], *CARRIED[5:]), Code.SWAP_IN_WHILE_LIVE, 5),
    (CARRIED[1:], Code.READ_ON_HOST, 1),
    ((CARRIED[1], Free(W), *CARRIED[2:]), Code.FREED_ABSENT, 1),
    ((*CARRIED[:2], SwapIn(W), *CARRIED[2:]), Code.SWAP_IN_WHILE_LIVE, 2),
]


@pytest.mark.parametrize(("instructions", "code", "position"), REPEATED_MUTATIONS)
def test_mutations_of_a_repeated_step_are_named(instructions, code, position):
    violation = validate(REPEATED, Program(instructions))
    assert (violation.code, violation.instruction) == (code, position)


def test_the_time_of_a_step_is_the_time_between_repeated_ones():
    carried = 0
    for seed in range(60):
        rng = Random(seed)
        graph = random_graph(rng, rng.randint(1, 8), updates=True)
        movable = graph.resident.difference(graph.outputs, graph.gradients)
        graph = replace(graph, movable=sorted(movable), repeated=True)
        graph = with_host_updates(rng, graph)
        program = random_program(rng, graph, recomputations=2, swaps=2)
        program = random_moves(rng, graph, random_host_updates(rng, graph, program))
        carried += len(carried_over(graph, program))
        device = Device(to_host_bytes_per_s=rng.choice([1.0, 5.0]), duplex=rng.random() < 0.5)
        one = replay(graph, program, device)
        results = tuple(map(Free, sorted(graph.kept)))
        steps = Program((*program, *results) * 3)
        three = replay(graph, steps, device)
        assert three.time_s == pytest.approx(3 * one.time_s), seed
        length = len(program) + len(results)
        for first in (0, length, 2 * length):
            part = slice(first, first + len(program))
            assert three.step_bytes[part] == one.step_bytes, seed
            assert three.host_bytes[part] == one.host_bytes, seed
    assert carried > 15


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
    assert made.read(Reader(made.encode(REPEATED), "graph")).repeated
    assert not {"movable", "repeated"} & made.encode(replace(graph, movable=())).keys()


@pytest.mark.parametrize("block", range(6))
def test_replay_and_validator_agree_on_random_moves(block):
    moved = hosted = carried = 0
    for seed in range(block * 25, block * 25 + 25):
        rng = Random(seed)
        graph = random_graph(rng, rng.randint(1, 8), updates=rng.random() < 0.8)
        movable = graph.resident.difference(graph.outputs, graph.gradients)
        graph = replace(graph, movable=sorted(movable), repeated=seed % 2 == 1)
        graph = with_host_updates(rng, graph)
        program = random_program(rng, graph, recomputations=2, swaps=2)
        program = random_moves(rng, graph, random_host_updates(rng, graph, program))
        moved += len(moved_tensors(graph, program))
        carried += len(carried_over(graph, program))
        hosted += len(replay(graph, program).host_updates)
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
    assert carried > 1
    assert hosted > 3


HOSTED = replace(
    step(),
    operators=[
        *step().operators[:2],
        replace(
            step().operators[2],
            implementations=(Implementation("host", 3.0, 7, (), (), on_host=True),),
        ),
    ],
)
ON_HOST = (
    SwapIn(W),
    Compute(0, (Y,)),
    LossBoundary(),
    Compute(1, (G,)),
    Free(Y),
    Free(W),
    SwapOut(G),
    Compute(2, (), "host"),
    Free(G),
    DropHost(G),
)


def test_an_update_on_the_host_by_hand():
    program = Program(ON_HOST)
    timeline = replay(HOSTED, program, Device(to_host_bytes_per_s=10, from_host_bytes_per_s=5))
    assert validate(HOSTED, program) is None
    assert moved_tensors(HOSTED, program) == {W, S}
    assert timeline.step_bytes == (11, 14, 14, 24, 24, 21, 11, 11, 11, 1)
    # 30 of w and s, the host's scratch of 7, and g.
    assert set(timeline.host_bytes[:6]) == {37}
    assert timeline.host_bytes[6:] == (47, 47, 47, 37)
    # w arrives at 2, f ends at 4, b at 8; g is on the host at 9, updated at 12.
    (update,) = timeline.host_updates
    assert (update.tensor, update.start_s, update.end_s) == (W, 9.0, 12.0)
    assert timeline.time_s == 12.0
    assert timeline.start_s[7:] == (8.0, 9.0, 12.0)
    assert memory_lower_bound(HOSTED) == 24
    assert time_lower_bound(HOSTED) == 6.0
    assert validate(HOSTED, program, Budget(24, 47)) is None
    assert validate(HOSTED, program, Budget(None, 46)).code is Code.OVER_HOST_BUDGET
    assert loads(dumps(HOSTED)) == HOSTED
    again = Program((*ON_HOST, SwapIn(W), Free(W)))
    assert replay(HOSTED, again, Device(to_host_bytes_per_s=5)).time_s == 15.0


HOST_MUTATIONS = [
    ((*ON_HOST[:5], *ON_HOST[6:], Free(W)), Code.UPDATED_IN_BOTH, 6),
    ((*ON_HOST[:6], ON_HOST[7], ON_HOST[6], *ON_HOST[8:]), Code.HOST_READ_ABSENT, 6),
    ((*ON_HOST, SwapIn(W), Compute(0, ()), Free(W)), Code.READ_AFTER_UPDATE, 11),
]


@pytest.mark.parametrize(("instructions", "code", "position"), HOST_MUTATIONS)
def test_mutations_of_an_update_on_the_host_are_named(instructions, code, position):
    program = Program(instructions)
    violation = validate(HOSTED, program)
    assert (violation.code, violation.instruction) == (code, position)
    if code is not Code.READ_AFTER_UPDATE:
        with pytest.raises(InvalidProgramError):
            replay(HOSTED, program)


def test_only_updates_of_what_may_move_run_on_the_host():
    choice = HOSTED.operators[2].implementations[0]
    forward = replace(HOSTED.operators[0], implementations=(choice,))
    with pytest.raises(ValueError, match="only updates run on the host"):
        replace(HOSTED, operators=(forward, *HOSTED.operators[1:]))
    with pytest.raises(ValueError, match="'s' cannot be on the host"):
        replace(HOSTED, movable=(W,))
    with pytest.raises(ValueError, match="on the host it reads"):
        replace(choice, reads=None)
