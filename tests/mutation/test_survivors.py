"""What mutants survived until these were written: edges of the validator, the replay, the clock of
the links, lifetimes and bounds."""

from __future__ import annotations

from random import Random

import pytest

from memopt.models.bounds import (
    memory_lower_bound,
    needed_operators,
    relative_gap,
    time_lower_bound,
)
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Implementation, Operator, Phase, Tensor, TensorKind
from memopt.models.instances import three_layers
from memopt.programs.instructions import Compute, DropHost, Free, Program, SwapIn, SwapOut
from memopt.programs.lifetimes import Lifetime, bytes_during, lifetimes, storages
from memopt.programs.link_clock import LinkClock
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import ViolationCode, validate

QUICK = Device(to_host_bytes_per_s=1e6)


def line(count: int = 3, seconds: float = 1e-3) -> Graph:
    """x → t1 → t2 → ... , of which the last is the result; 100 bytes each."""
    tensors = [Tensor("x", 100, TensorKind.INPUT), *(Tensor(f"t{i}", 100) for i in range(count))]
    operators = [Operator(f"f{i}", (i,), (i + 1,), seconds, 0) for i in range(count)]
    return Graph(tensors, operators, outputs=(count,))


@pytest.mark.parametrize("op", [-1, 3, 4, 100])
def test_unknown_operators_on_either_side(op: int) -> None:
    found = validate(line(), Program((Compute(op, ()),)))
    assert found is not None
    assert found.code is ViolationCode.UNKNOWN_OPERATOR


def test_the_second_boundary_names_the_first() -> None:
    graph = three_layers()
    program = store_all(graph)
    assert program.boundary is not None
    boundary = program.instructions[program.boundary]
    twice = (*program.instructions[: program.boundary + 1], boundary)
    found = validate(graph, Program((*twice, *program.instructions[program.boundary + 1 :])))
    assert found is not None
    assert found.code is ViolationCode.SECOND_LOSS_BOUNDARY
    assert str(program.boundary) in found.message


@pytest.mark.parametrize("position", [-1, 5, 6, 99])
def test_addresses_of_no_instruction(position: int) -> None:
    graph = line()
    program = store_all(graph)
    assert len(program) == 5
    found = validate(graph, Program(program.instructions, offsets=((position, 1, 0),)))
    assert found is not None
    assert found.code is not ViolationCode.ADDRESSES_OVERLAP


def test_a_transient_over_a_live_tensor() -> None:
    """A result that is not kept still has its address while its operator runs."""
    tensors = [Tensor("x", 8, TensorKind.INPUT), *(Tensor(name, 8) for name in "abc")]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("g", (1,), (2, 3), 1.0),
    ]
    graph = Graph(tensors, operators, outputs=(3,))
    instructions = (Compute(0, (1,)), Compute(1, (3,)), Free(1))
    for address, code in ((0, ViolationCode.ADDRESSES_OVERLAP), (16, None)):
        placed = Program(instructions, offsets=((0, 1, 0), (1, 2, address), (1, 3, 8)))
        found = validate(graph, placed)
        assert (None if found is None else found.code) is code


def test_what_is_not_under_way_is_not_waited_for() -> None:
    """Steps of milliseconds: a wait for a second would show."""
    graph = line()
    program = Program(
        (
            Compute(0, (1,)),
            SwapOut(1),
            Compute(1, (2,)),
            Free(1),
            DropHost(1),
            Compute(2, (3,)),
            Free(2),
        )
    )
    assert validate(graph, program) is None
    assert replay(graph, program, QUICK).time_s == pytest.approx(3e-3)
    back = Program(
        (
            Compute(0, (1,)),
            SwapOut(1),
            Free(1),
            SwapIn(1),
            Free(1),
            DropHost(1),
            Compute(0, (1,)),
            Compute(1, (2,)),
            Free(1),
            Compute(2, (3,)),
            Free(2),
        )
    )
    assert validate(graph, back) is None
    # 1 ms, 0.1 ms there and 0.1 ms back, for which both Frees wait, and three more operators.
    assert replay(graph, back, QUICK).time_s == pytest.approx(4.2e-3)


def test_the_clock_by_hand() -> None:
    clock = LinkClock(QUICK)
    assert clock.copy_out(7, 1000) == pytest.approx((0.0, 1e-3))
    clock.free(8)
    assert clock.now_s == clock.wait_s == 0
    clock.compute((), 4e-4)
    clock.free(7)
    assert (clock.now_s, clock.wait_s) == pytest.approx((1e-3, 6e-4))
    clock.wait(5e-4)
    assert (clock.now_s, clock.wait_s) == pytest.approx((1e-3, 6e-4))
    assert clock.copy_back(7, 500) == pytest.approx((1e-3, 1.5e-3))
    clock.compute((7,), 0.0)
    assert clock.now_s == pytest.approx(1.5e-3)
    clock.free(7)
    assert clock.now_s == pytest.approx(1.5e-3)
    single = LinkClock(Device(to_host_bytes_per_s=1e6, duplex=False))
    single.copy_out(1, 1000)
    assert single.copy_back(2, 1000)[0] == pytest.approx(1e-3)
    assert single.copy_out(3, 1000)[0] == pytest.approx(2e-3)


def test_lifetimes_by_hand() -> None:
    tensors = [Tensor("x", 8, TensorKind.INPUT), *(Tensor(f"t{i}", 8) for i in range(3))]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("g", (1,), (2,), 1.0, 0, in_place=(1,)),
        Operator("h", (2,), (3,), 1.0),
    ]
    graph = Graph(tensors, operators, outputs=(3,))
    program = Program((Compute(0, (1,)), Compute(1, (2,), None, 1), Compute(2, (3,)), Free(2)))
    assert validate(graph, program) is None
    first, second, last = lifetimes(graph, program).device
    assert [first.is_live_at(i) for i in range(4)] == [False, True, False, False]
    assert [second.is_live_at(i) for i in range(5)] == [False, False, True, True, False]
    assert (first.until, second.until, last.until) == (1, 4, 4)
    assert [[x.tensor for x in s.lifetimes] for s in storages((first, second, last))] == [
        [1, 2],
        [3],
    ]
    assert [s.end for s in storages((first, second, last))] == [3, 4]


def test_what_is_there_from_the_step_before_takes_memory_at_once() -> None:
    listed = [Lifetime(-1, 1, 2), Lifetime(0, 2, 3), Lifetime(1, 3, 3, stays=False)]
    assert bytes_during(line(), listed, 5) == [200, 300, 200, 100, 0]


def working_set(graph: Graph, index: int) -> int:
    """What an operator's best implementation has in memory beside the results before it, by the
    definition, of a graph in which one operator writes each tensor."""
    operator = graph.operators[index]
    size = [0 if t.resident else t.size_bytes for t in graph.tensors]
    before, todo = set[int](), {*operator.reads}
    for choice in operator.implementations:
        todo &= {*(operator.reads if choice.reads is None else choice.reads)}
    while todo:
        tensor = todo.pop()
        before |= {tensor} & graph.kept
        for other in graph.operators:
            if tensor in other.writes:
                reads = {*other.reads}
                for choice in other.implementations:
                    reads &= {*(other.reads if choice.reads is None else choice.reads)}
                todo |= reads
    if operator.phase is not Phase.FORWARD:
        early = {t for o in graph.operators[: graph.first_backward] for t in o.writes}
        before |= (early & {*graph.outputs}) | ({*graph.tangents} & graph.kept)
    plain = [(operator.reads, operator.workspace_bytes, operator.in_place)]
    for one in operator.implementations:
        reads = operator.reads if one.reads is None else one.reads
        plain.append((reads, one.workspace_bytes, one.in_place))
    return min(
        sum(size[t] for t in (before | {*reads}) - {*operator.writes})
        + sum(size[t] for t in operator.writes)
        - (size[operator.writes[0]] if in_place else 0)
        + scratch
        for reads, scratch, in_place in plain
    )


def test_bounds_are_their_definitions() -> None:
    """Not only below every program, which a weaker bound would be, too."""
    compared = 0
    for seed in range(150):
        rng = Random(seed)
        graph = random_graph(rng, rng.randint(1, 7), implementations=seed % 2 == 0)
        if any(one.writes is not None for o in graph.operators for one in o.implementations):
            continue
        needed, todo = set[int](), set(graph.kept)
        todo_ops = [i for i, o in enumerate(graph.operators) if o.has_effects]
        while todo or todo_ops:
            if todo:
                tensor = todo.pop()
                todo_ops += [i for i, o in enumerate(graph.operators) if tensor in o.writes]
                continue
            index = todo_ops.pop()
            if index in needed:
                continue
            needed.add(index)
            operator = graph.operators[index]
            reads = {*operator.reads}
            for one in operator.implementations:
                reads &= {*(operator.reads if one.reads is None else one.reads)}
            todo |= reads
        assert needed_operators(graph) == needed
        size = [0 if t.resident else t.size_bytes for t in graph.tensors]
        sets = [sum(size[t] for t in graph.kept)]
        early = {t for o in graph.operators[: graph.first_backward] for t in o.writes}
        if graph.first_backward < len(graph.operators) or graph.tangents:
            held = (early & {*graph.outputs}) | {*graph.tangents}
            sets.append(sum(size[t] for t in held) + graph.boundary_bytes)
        sets += [working_set(graph, index) for index in needed]
        assert memory_lower_bound(graph) == graph.resident_bytes + max(sets), seed
        times = [
            min(
                [graph.operators[i].time_s, *(x.time_s for x in graph.operators[i].implementations)]
            )
            for i in needed
        ]
        assert time_lower_bound(graph) == pytest.approx(sum(times))
        compared += 1
    assert compared > 60
    assert (relative_gap(3.0, 2.0), relative_gap(3.0, 0.0)) == (0.5, 0.0)


def test_two_operators_that_write_one_tensor_are_neither_needed() -> None:
    tensors = [Tensor("x", 1, TensorKind.INPUT), Tensor("a", 1), Tensor("b", 1)]
    other = Implementation("both", 1.0, 0, writes=(2, 1))
    operators = [
        Operator("f", (0,), (1,), 5.0),
        Operator("g", (0,), (2,), 7.0, 0, implementations=(other,)),
    ]
    graph = Graph(tensors, operators, outputs=(1, 2))
    assert needed_operators(graph) == {1}
