"""Computing in place: the pass, its semantics, and what the validator refuses."""

from dataclasses import replace
from random import Random

import pytest

from memopt.errors import InvalidProgramError
from memopt.models.bounds import memory_lower_bound
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Implementation, Operator, Tensor, TensorKind
from memopt.passes.passes import place_program
from memopt.programs.allocator_requests import Allocate, allocation_trace
from memopt.programs.in_place import with_in_place, without_in_place
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.serialize import dumps, loads
from memopt.programs.validate import ViolationCode, memory_use, validate
from tests.models.training_graphs import overwriting
from tests.random_programs import random_program

Code = ViolationCode


def line(*, in_place=(2,), sizes=(7, 30, 30, 5)):
    """x → a → b → y; b may overwrite a, beside 4 bytes of workspace."""
    x, a, b, y = (
        Tensor(name, size, kind)
        for name, size, kind in zip(
            "xaby", sizes, (TensorKind.INPUT, *[TensorKind.ACTIVATION] * 3), strict=True
        )
    )
    spare = Tensor("spare", 30)
    operators = [
        Operator("f", (0,), (2,), 1.0),
        Operator("g", (2,), (3,), 1.0, 4, in_place=in_place),
        Operator("h", (3,), (4,), 1.0),
    ]
    return Graph((x, spare, a, b, y), operators, outputs=(4,))


IN_PLACE = (Compute(0, (2,)), Compute(1, (3,), None, 2), Compute(2, (4,)), Free(3))


def test_the_output_takes_over_the_storage_by_hand():
    timeline = replay(line(), Program(IN_PLACE))
    assert timeline.step_bytes == (37, 41, 42, 42)
    assert timeline.live_bytes == (37, 37, 42, 12)
    own = replay(line(), without_in_place(Program(IN_PLACE)))
    assert own.step_bytes == (37, 71, 67, 42, 42)
    assert own.time_s == timeline.time_s
    assert with_in_place(line(), without_in_place(Program(IN_PLACE))) == Program(IN_PLACE)
    assert with_in_place(line(), store_all(line())).instructions == IN_PLACE


def test_the_lower_bound_knows():
    assert memory_lower_bound(line()) == 7 + 35
    assert memory_lower_bound(line(in_place=())) == 7 + 64


def test_an_implementation_says_itself_what_it_overwrites():
    plain = line()
    mask = len(plain.tensors)
    masked = Implementation("masked", 1.0, 2, (2,), (3, mask), in_place=(2,))
    for choice, changed in ((masked, True), (replace(masked, in_place=()), False)):
        g = replace(plain.operators[1], implementations=(choice,))
        operators = (plain.operators[0], g, plain.operators[2])
        graph = Graph((*plain.tensors, Tensor("mask", 3)), operators, outputs=(4,))
        steps = [Compute(0, (2,)), Compute(1, (3,), "masked"), Free(2), Compute(2, (4,)), Free(3)]
        made = with_in_place(graph, Program(steps))
        assert (made.instructions[1] == Compute(1, (3,), "masked", 2)) == changed
        assert validate(graph, made) is None
        timeline = replay(graph, made)
        assert timeline.step_bytes[1] == 7 + 30 * (2 - changed) + 3 + 2
        assert tuple(memory_use(graph, made).during) == timeline.step_bytes
        assert memory_lower_bound(graph) == 42
        refused = Program([steps[0], Compute(1, (3,), "masked", 2), *IN_PLACE[2:]])
        assert (validate(graph, refused) is None) == changed
        assert loads(dumps(graph)) == graph


def test_an_implementations_output_must_fit():
    graph = line()
    g = replace(graph.operators[1], implementations=(Implementation("x", 1.0, in_place=(0,)),))
    with pytest.raises(ValueError, match="in_place"):
        replace(graph, operators=(graph.operators[0], g, graph.operators[2]))


@pytest.mark.parametrize("back", [True, False])
def test_a_tensor_is_not_overwritten_while_it_is_copied_to_the_host(back):
    graph = line()
    moves = [SwapOut(2), Free(2), SwapIn(2)] if back else [SwapOut(2)]
    program = [IN_PLACE[0], *moves, Compute(1, (3,)), Free(2), DropHost(2), *IN_PLACE[2:]]
    made = with_in_place(graph, Program(program))
    assert any(isinstance(x, Compute) and x.in_place is not None for x in made) == back
    assert validate(graph, made) is None
    replay(graph, made)


@pytest.mark.parametrize(
    ("program", "code", "position"),
    [
        ([Compute(0, (2,)), Compute(1, (3,), None, 0), *IN_PLACE[2:]], Code.IN_PLACE, 1),
        ([Compute(0, (2,)), Compute(1, (), None, 2), *IN_PLACE[2:]], Code.READ_ABSENT, 2),
        ([Compute(0, (2,)), Compute(1, (3,), None, 1), *IN_PLACE[2:]], Code.IN_PLACE, 1),
        ([*IN_PLACE[:2], Free(2), *IN_PLACE[2:]], Code.FREED_ABSENT, 2),
        ([*IN_PLACE, Compute(1, (), None)], Code.READ_ABSENT, 4),
        (IN_PLACE[1:], Code.READ_ABSENT, 0),
        (
            [IN_PLACE[0], SwapOut(2), *IN_PLACE[1:], DropHost(2)],
            Code.IN_PLACE,
            2,
        ),
    ],
)
def test_the_validator_names_what_is_wrong(program, code, position):
    violation = validate(line(), Program(program))
    assert (violation.code, violation.instruction) == (code, position)


def test_the_output_is_where_the_tensor_was():
    placed = Program(IN_PLACE, [(0, 2, 5), (1, 3, 5), (2, 4, 0)])
    assert validate(line(), placed) is None
    timeline = replay(line(), placed)
    assert (timeline.arena_bytes, timeline.placed_peak_bytes) == (35, 35 + 7 + 4)
    assert memory_use(line(), placed).outside == [7, 11, 7, 7]
    assert with_in_place(line(), placed) == placed
    elsewhere = Program(IN_PLACE, [(0, 2, 5), (1, 3, 35), (2, 4, 0)])
    violation = validate(line(), elsewhere)
    assert (violation.code, violation.instruction) == (Code.IN_PLACE, 1)


def test_replay_refuses_what_it_cannot_process():
    with pytest.raises(InvalidProgramError, match="cannot be overwritten"):
        replay(line(), Program([IN_PLACE[0], SwapOut(2), *IN_PLACE[1:]]))


@pytest.mark.parametrize("in_place", [(0,), (4,), (1,)])
def test_graphs_check_what_may_be_overwritten(in_place):
    with pytest.raises(ValueError, match=r"in_place|take over"):
        line(in_place=in_place)
    with pytest.raises(ValueError, match="take over"):
        line(sizes=(7, 30, 31, 5))


def traced_peak(graph: Graph, program: Program) -> int:
    """The largest sum of what the program's allocations hold."""
    blocks: dict[object, int] = {}
    peak = 0
    for event in allocation_trace(graph, program):
        if isinstance(event, Allocate):
            assert event.id not in blocks
            blocks[event.id] = event.size_bytes
            peak = max(peak, sum(blocks.values()))
        else:
            del blocks[event.id]
    return peak


@pytest.mark.parametrize("seeds", [range(k, k + 150) for k in range(0, 600, 150)])
def test_laws_on_random_programs(seeds):
    changed = 0
    for seed in seeds:
        rng = Random(seed)
        graph = overwriting(
            rng, random_graph(rng, rng.randint(2, 9), implementations=seed % 2 == 0)
        )
        program = random_program(
            rng, graph, recomputations=rng.randint(0, 4), swaps=rng.randint(0, 3), reorder=True
        )
        made = with_in_place(graph, program)
        assert validate(graph, made) is None
        timeline, before = replay(graph, made), replay(graph, program)
        assert timeline.time_s == before.time_s
        assert memory_lower_bound(graph) <= timeline.peak_bytes <= before.peak_bytes
        use = memory_use(graph, made)
        assert tuple(use.during) == timeline.step_bytes
        assert with_in_place(graph, made) == made
        assert replay(graph, without_in_place(made)).peak_bytes == before.peak_bytes
        assert loads(dumps(graph)) == graph
        assert loads(dumps(made)) == made
        placed, placement = place_program(graph, made)
        assert validate(graph, placed) is None
        assert placement.peak <= place_program(graph, program)[1].peak
        outside = memory_use(graph, placed).outside
        found = replay(graph, placed)
        assert found.arena_bytes == placement.peak
        assert found.placed_peak_bytes == placement.peak + max(outside, default=0)
        assert traced_peak(graph, made) == timeline.peak_bytes
        changed += made != program
    assert changed > len(seeds) // 4
