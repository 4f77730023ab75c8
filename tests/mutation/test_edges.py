"""What mutants survived after `test_survivors.py`: the network's and the host's clock, bounds of
what runs beside the compute stream, edges of placements and of what replay refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from memopt.errors import InvalidProgramError
from memopt.models.bounds import (
    memory_lower_bound,
    overlapped_bound,
    relative_gap,
    time_lower_bound,
)
from memopt.models.budget import Budget
from memopt.models.collective import Collective, CollectiveKind
from memopt.models.device import Device
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.lifetimes import HostLifetime, lifetimes
from memopt.programs.link_clock import LinkClock
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import ViolationCode, memory_use, validate
from memopt.programs.validate_placement import tensors_of

ADDRESSES_OVERLAP, STRAY = ViolationCode.ADDRESSES_OVERLAP, ViolationCode.OFFSET_STRAY


def test_collectives_of_a_clock_by_hand() -> None:
    """1 s = 1 byte on the link; item 1 comes back from the host, 2 and 3 are results."""
    clock = LinkClock(Device(to_host_bytes_per_s=1))
    clock.copy_back(1, 4)
    assert clock.send((1,), (2,), 3.0) == (4.0, 7.0)
    assert (clock.now_s, clock.wait_s) == (4.0, 4.0)
    assert clock.send((), (3,), 2.0) == (7.0, 9.0)
    clock.free(1)
    assert clock.now_s == 7.0
    clock.free(1)
    assert (clock.now_s, clock.wait_s) == (7.0, 7.0)
    clock.compute((3,), 0.5)
    assert (clock.now_s, clock.wait_s) == (9.5, 9.0)
    clock.free(2)
    assert clock.now_s == 9.5


def test_updates_on_the_host_of_a_clock_by_hand() -> None:
    clock = LinkClock(Device(to_host_bytes_per_s=1))
    assert clock.on_host((5,), 0.25) == (0.0, 0.25)
    clock.copy_out(1, 3)
    assert clock.on_host((1, 2), 2.0) == (3.0, 5.0)
    assert clock.on_host((2,), 1.0) == (5.0, 6.0)
    assert clock.copy_back(1, 1) == (5.0, 6.0)
    assert clock.now_s == 0.0
    clock.drop(1)
    assert (clock.now_s, clock.wait_s) == (6.0, 6.0)
    clock.copy_out(7, 1)
    clock.drop(7)
    assert (clock.now_s, clock.wait_s) == (7.0, 7.0)
    clock.copy_out(2, 1)
    clock.on_host((2,), 4.0)
    clock.drop(2)
    assert (clock.now_s, clock.wait_s) == (12.0, 12.0)


def gathering(seconds: float) -> Graph:
    """A weight is gathered, then read by an operator of 3 s."""
    gather = Collective(CollectiveKind.ALL_GATHER, 8, 100)
    tensors = [Tensor("w", 10, TensorKind.PARAMETER), Tensor("all", 80), Tensor("y", 1)]
    operators = [
        Operator("gather", (0,), (1,), seconds, collective=gather),
        Operator("layer", (1,), (2,), 3.0),
    ]
    return Graph(tensors, operators, outputs=(2,))


def test_bounds_of_programs_that_wait_for_each_collective() -> None:
    assert [time_lower_bound(gathering(s)) for s in (1.0, 5.0)] == [3.0, 5.0]
    assert overlapped_bound(gathering(0.5), 6.5) == 3.25
    assert overlapped_bound(gathering(0.5), 3.5) == 3.0
    assert overlapped_bound(gathering(0.0), 3.5) == 3.5


def test_results_of_ancestors_are_in_memory() -> None:
    """The result a of 100 bytes, and what is computed from it at last, with much workspace."""
    tensors = [
        Tensor("x", 1, TensorKind.INPUT),
        Tensor("a", 100),
        Tensor("b", 10),
        Tensor("c", 7),
    ]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("g", (1,), (2,), 1.0),
        Operator("h", (2,), (3,), 1.0, 1000),
    ]
    graph = Graph(tensors, operators, outputs=(1, 3))
    assert memory_lower_bound(graph) == 1 + 100 + 10 + 7 + 1000


def two_results() -> Graph:
    """x → a, b of 8 bytes by one operator, a → c."""
    tensors = [Tensor("x", 8, TensorKind.INPUT), *(Tensor(name, 8) for name in "abc")]
    operators = [Operator("f", (0,), (1, 2), 1.0), Operator("g", (1,), (3,), 1.0)]
    return Graph(tensors, operators, outputs=(3,))


@pytest.mark.parametrize(("address", "code"), [(0, ADDRESSES_OVERLAP), (8, None)])
def test_a_transient_at_the_first_instruction(address: int, code: ViolationCode | None) -> None:
    """b is written and not kept, beside a, at the beginning: it has an address of its own."""
    instructions = (Compute(0, (1,)), Compute(1, (3,)), Free(1))
    placed = Program(instructions, offsets=((0, 1, 0), (0, 2, address), (1, 3, 16)))
    found = validate(two_results(), placed)
    assert (None if found is None else found.code) is code


def test_addresses_counted_from_the_end() -> None:
    """The last instruction writes what it does not keep; -1 is not its number."""
    instructions = (Compute(0, (1,)), Compute(1, (3,)), Free(1), Compute(0, ()))
    graph = two_results()
    assert validate(graph, Program(instructions)) is None
    placed = ((0, 1, 0), (1, 3, 16), (-1, 2, 64))
    found = validate(graph, Program(instructions, offsets=placed))
    assert found is not None
    assert found.code is STRAY
    assert validate(graph, Program(instructions, offsets=(*placed[:2], (3, 2, 64)))) is None


@pytest.mark.parametrize("op", [-1, 2, 3])
def test_replay_refuses_operators_on_either_side(op: int) -> None:
    with pytest.raises(InvalidProgramError, match="no such operator"):
        replay(two_results(), Program((Compute(op, ()),)))


@pytest.mark.parametrize("tensor", [-1, 4, 5])
def test_replay_names_tensors_on_either_side(tensor: int) -> None:
    with pytest.raises(InvalidProgramError, match=f"tensor {tensor} is not on the device"):
        replay(two_results(), Program((Free(tensor),)))


def test_what_computes_in_place_by_position() -> None:
    """Two computations in place, so that each instruction's figure is its own."""
    tensors = [Tensor("x", 5, TensorKind.INPUT), *(Tensor(name, 8) for name in "abc")]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("g", (1,), (2,), 1.0, 3, in_place=(1,)),
        Operator("h", (2,), (3,), 1.0, 0, in_place=(2,)),
    ]
    graph = Graph(tensors, operators, outputs=(3,))
    program = Program((Compute(0, (1,)), Compute(1, (2,), None, 1), Compute(2, (3,), None, 2)))
    assert validate(graph, program) is None
    assert memory_use(graph, program).during == [13, 16, 13]
    assert replay(graph, program).step_bytes == (13, 16, 13)
    placed = Program(program.instructions, offsets=((0, 1, 0), (1, 2, 0), (2, 3, 0)))
    assert validate(graph, placed) is None
    assert memory_use(graph, placed).outside == [5, 8, 5]
    assert replay(graph, placed).placed_peak_bytes == 16
    half = Program(program.instructions, offsets=((2, 3, 0),), unplaced=((0, 1), (1, 2)))
    found = validate(graph, half)
    assert found is not None
    assert found.code is ViolationCode.IN_PLACE
    plain = store_all(graph)
    assert validate(graph, plain) is None
    assert memory_use(graph, plain).peak == replay(graph, plain).peak_bytes


def test_two_results_one_of_them_in_place() -> None:
    """g writes b and c, and b takes over a: c, larger, does not. A copy of b is dropped."""
    sizes = (("a", 8), ("b", 8), ("c", 20), ("d", 1))
    tensors = [Tensor("x", 5, TensorKind.INPUT), *(Tensor(*pair) for pair in sizes)]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("g", (1,), (2, 3), 1.0, 0, in_place=(1,)),
        Operator("h", (2,), (4,), 1.0),
    ]
    graph = Graph(tensors, operators, outputs=(4,))
    program = Program(
        (
            Compute(0, (1,)),
            Compute(1, (2,), None, 1),
            SwapOut(2),
            Free(2),
            SwapIn(2),
            DropHost(2),
            Compute(2, (4,)),
            Free(2),
        )
    )
    assert validate(graph, program) is None
    assert memory_lower_bound(graph) == 5 + 8 + 20
    assert replay(graph, program).step_bytes[1] == 5 + 8 + 20
    a, b, c, again, _ = lifetimes(graph, program).device
    assert (a.overwritten, a.stays, a.freed) == (True, False, False)
    assert (b.overwrites, b.copied, b.freed, b.readers) == (a, True, True, [2])
    assert (c.overwrites, c.transient, c.stays, c.end) == (None, True, False, 2)
    assert (again.begin, again.end, again.copied, again.readers) == (4, 7, False, [6])
    assert lifetimes(graph, program).host == [HostLifetime(2, 2, 5)]


def test_what_the_host_runs_takes_no_time_of_the_device() -> None:
    """An update of 4 s, of which the device needs none where the host runs it."""
    there = Implementation("there", 100.0, 0, reads=(), on_host=True)
    update = Operator("u", (1, 0), (), 4.0, 0, Phase.UPDATE, False, implementations=(there,))
    tensors = [Tensor("w", 10, TensorKind.PARAMETER), Tensor("g", 10, TensorKind.GRADIENT)]
    backward = Operator("b", (0,), (1,), 0.25, 0, Phase.BACKWARD)
    graph = Graph(tensors, [backward, update], movable=(0,))
    assert time_lower_bound(graph) == 0.25
    plain = replace(graph, operators=(backward, replace(update, implementations=())))
    assert time_lower_bound(plain) == 4.25
    assert relative_gap(1.5, 0.5) == 2.0


def test_the_boundary_of_a_step_without_tangents() -> None:
    """The loss takes 50 bytes where the backward begins, whatever arrives there."""
    tensors = [Tensor("w", 10, TensorKind.PARAMETER), Tensor("y", 2), Tensor("g", 3)]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("b", (0,), (2,), 1.0, 0, Phase.BACKWARD),
    ]
    graph = Graph(tensors, operators, outputs=(1,), gradients=(2,), boundary_bytes=50)
    assert memory_lower_bound(graph) == 10 + 2 + 50
    forward = replace(graph, operators=operators[:1], gradients=(), tensors=tensors[:2])
    assert memory_lower_bound(forward) == 10 + 2


@pytest.mark.parametrize(
    ("unplaced", "code"),
    [
        (((0, 1),), None),
        (((0, 1), (1, 1)), STRAY),
        (((0, 1), (1, 3)), STRAY),
        ((), ViolationCode.OFFSET_MISSING),
    ],
    ids=("apart", "of no instruction", "apart and placed", "neither"),
)
def test_what_is_apart(unplaced: tuple[tuple[int, int], ...], code: ViolationCode | None) -> None:
    instructions = (Compute(0, (1,)), Compute(1, (3,)), Free(1))
    program = Program(instructions, offsets=((1, 3, 16),), unplaced=unplaced)
    found = validate(two_results(), program)
    assert (None if found is None else found.code) is code


def test_replay_of_nothing() -> None:
    found = replay(two_results(), Program(()))
    assert (found.peak_bytes, found.host_peak_bytes, found.time_s) == (8, 0, 0.0)
    assert found.peak_instruction is None


def test_a_collective_without_results_names_no_tensor() -> None:
    send = Collective(CollectiveKind.REDUCE_SCATTER, 8, 100)
    operator = Operator("send", (0,), (), 2.0, collective=send)
    graph = Graph([Tensor("w", 10, TensorKind.PARAMETER)], [operator])
    program = Program((Compute(0, ()),))
    assert validate(graph, program) is None
    (found,) = replay(graph, program).collectives
    assert (found.tensor, found.start_s, found.end_s) == (-1, 0.0, 2.0)


def test_an_update_by_the_host_names_what_it_changes() -> None:
    there = Implementation("there", 100.0, 7, reads=(), on_host=True)
    tensors = [
        Tensor("g", 10, TensorKind.GRADIENT),
        Tensor("w", 10, TensorKind.PARAMETER),
        Tensor("s", 10, TensorKind.OPTIMIZER_STATE),
    ]
    backward = Operator("b", (), (0,), 0.25, 0, Phase.BACKWARD)
    update = Operator("u", (0, 1, 2), (), 4.0, 0, Phase.UPDATE, False, implementations=(there,))
    graph = Graph(tensors, [backward, update], movable=(1, 2))
    steps = (Compute(0, (0,)), SwapOut(0), Free(0), Compute(1, (), "there"), DropHost(0))
    program = Program((LossBoundary(), *steps))
    assert validate(graph, program) is None
    found = replay(graph, program)
    assert [(x.tensor, x.start_s, x.end_s) for x in found.host_updates] == [(1, 0.25, 100.25)]
    assert found.host_bytes == (27, 27, 37, 37, 37, 27)
    assert found.step_bytes == (0, 10, 10, 10, 0, 0)


def test_a_placement_of_nothing() -> None:
    instructions = (Compute(0, (1,)), Compute(1, (3,)), Free(1))
    program = Program(instructions, offsets=(), unplaced=((0, 1),))
    assert validate(two_results(), program) is None
    found = replay(two_results(), program)
    assert (found.arena_bytes, found.placed_peak_bytes, found.peak_bytes) == (0, 24, 24)
    assert validate(two_results(), program, Budget(24)) is None


def test_two_results_are_kept_and_one_is_in_place() -> None:
    sizes = (("a", 8), ("b", 8), ("c", 8))
    tensors = [Tensor("x", 5, TensorKind.INPUT), *(Tensor(*pair) for pair in sizes)]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("g", (1,), (2, 3), 1.0, 0, in_place=(1,)),
    ]
    graph = Graph(tensors, operators, outputs=(2, 3))
    program = Program((Compute(0, (1,)), Compute(1, (2, 3), None, 1)))
    assert validate(graph, program) is None
    a, b, c = lifetimes(graph, program).device
    assert (a.overwritten, b.overwrites, c.overwrites) == (True, a, None)


def test_an_output_after_the_boundary() -> None:
    """Another tensor is there when the user's loss reads it."""
    names = (("w", TensorKind.PARAMETER), ("y", TensorKind.OUTPUT), ("z", TensorKind.ACTIVATION))
    tensors = [*(Tensor(name, 8, kind) for name, kind in names), Tensor("g", 8)]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("h", (0,), (2,), 1.0),
        Operator("b", (2,), (3,), 1.0, 0, Phase.BACKWARD),
    ]
    graph = Graph(tensors, operators, outputs=(1,), gradients=(3,))
    first, *others = Compute(0, (1,)), Compute(1, (2,)), LossBoundary(), Compute(2, (3,)), Free(2)
    assert validate(graph, Program((first, *others))) is None
    found = validate(graph, Program((*others[:2], first, *others[2:])))
    assert found is not None
    assert (found.code, found.instruction) == (ViolationCode.RESULT_MISSING, 1)


def test_an_update_by_the_host_that_changes_nothing() -> None:
    there = Implementation("there", 1.0, 0, reads=(), on_host=True)
    backward = Operator("b", (), (0,), 0.25, 0, Phase.BACKWARD)
    update = Operator("u", (0,), (), 4.0, 0, Phase.UPDATE, False, implementations=(there,))
    graph = Graph([Tensor("g", 10, TensorKind.GRADIENT)], [backward, update])
    steps = (Compute(0, (0,)), SwapOut(0), Free(0), Compute(1, (), "there"), DropHost(0))
    program = Program((LossBoundary(), *steps))
    assert validate(graph, program) is None
    assert [x.tensor for x in replay(graph, program).host_updates] == [-1]


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_the_named_implementation_is_looked_up(name: str) -> None:
    choices = tuple(Implementation(x, 1.0, size) for x, size in (("b", 2), ("a", 1), ("c", 3)))
    operator = Operator("f", (0,), (1,), 1.0, 9, implementations=choices)
    assert tensors_of(operator, name) == ((0,), (1,), "abc".index(name) + 1)
    assert tensors_of(operator, None) == ((0,), (1,), 9)


def test_what_either_of_two_operators_writes_has_no_sure_ancestors() -> None:
    """b comes from the result r, or from another operator's implementation: r need not be there."""
    both = Implementation("both", 1.0, 0, writes=(2, 3))
    sizes = (("r", 100), ("c", 8), ("b", 8), ("d", 8))
    tensors = [Tensor("x", 1, TensorKind.INPUT), *(Tensor(*pair) for pair in sizes)]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("g", (0,), (2,), 1.0, implementations=(both,)),
        Operator("h", (1,), (3,), 1.0),
        Operator("k", (3,), (4,), 1.0, 1000),
    ]
    graph = Graph(tensors, operators, outputs=(1, 4))
    assert memory_lower_bound(graph) == 1 + 8 + 8 + 1000
