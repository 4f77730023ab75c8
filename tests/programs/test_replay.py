"""The cost semantics, by hand: what is charged when, and who waits for whom."""

import math

import pytest

from memopt.errors import InvalidProgramError
from memopt.models.device import Device
from memopt.models.graph import Graph, Implementation, Operator, Tensor, TensorKind
from memopt.models.instances import THREE_LAYERS_PEAK_BYTES, three_layers
from memopt.programs.instructions import (
    Compute,
    DropHost,
    Free,
    LossBoundary,
    Program,
    SwapIn,
    SwapOut,
)
from memopt.programs.liveness import store_all
from memopt.programs.replay import Direction, replay

LINK = Device(to_host_bytes_per_s=100, from_host_bytes_per_s=50)


def test_three_layers_store_all_by_hand():
    timeline = replay(three_layers(), store_all(three_layers()))
    resident = 64 + 400 + 300 + 200
    during = [300, 550, 600, 720, 1140, 1100, 1560, 1500, 1200, 1400, 1400]
    after = [300, 500, 600, 700, 1100, 900, 1500, 1200, 1000, 1400, 1100]
    assert timeline.step_bytes == tuple(resident + x for x in during)
    # The order in which d2 and a1 are freed does not matter to the peak.
    assert [x - resident for x in timeline.live_bytes][:7] == after[:7]
    assert timeline.live_bytes[-2:] == (resident + 1400, resident + 1100)
    assert timeline.peak_bytes == THREE_LAYERS_PEAK_BYTES == resident + 1560
    assert timeline.peak_instruction == 6
    assert timeline.time_s == 11.0
    assert timeline.total_stall_s == 0
    assert timeline.host_peak_bytes == 0
    assert timeline.arena_bytes is None


def line(*sizes, **fields):
    """x → t1 → t2 → ..., one second each; t_i has tensor index i, operator i-1."""
    tensors = [Tensor("x", 7, TensorKind.INPUT)]
    tensors += [Tensor(f"t{i}", size) for i, size in enumerate(sizes, 1)]
    operators = [Operator(f"f{i}", (i,), (i + 1,), 1.0) for i in range(len(sizes))]
    return Graph(tensors, operators, outputs=(len(sizes),), **fields)


def test_empty_program():
    timeline = replay(line(1), Program([]))
    assert (timeline.peak_bytes, timeline.time_s, timeline.peak_instruction) == (7, 0, None)


def test_resident_bytes_outside_the_graph_count():
    assert replay(line(1, extra_resident_bytes=50), Program([Compute(0, (1,))])).peak_bytes == 58


def test_transient_outputs_and_workspace_are_charged_while_the_operator_runs():
    graph = Graph(
        [Tensor("x", 0, TensorKind.INPUT), Tensor("y", 10), Tensor("mean", 3)],
        [Operator("norm", (0,), (1, 2), 1.0, workspace_bytes=100)],
    )
    timeline = replay(graph, Program([Compute(0, (2,))]))
    assert timeline.step_bytes == (113,)
    assert timeline.live_bytes == (3,)


def test_a_rerun_charges_a_tensor_that_is_still_live_once_more():
    graph = line(10)
    timeline = replay(graph, Program([Compute(0, (1,)), Compute(0, ())]))
    assert timeline.step_bytes == (17, 27)
    assert timeline.live_bytes == (17, 17)


def test_implementation_sets_time_workspace_reads_and_writes():
    fast = Implementation("fast", 0.25, 5, reads=(0,), writes=(1, 2))
    graph = Graph(
        [Tensor("x", 0, TensorKind.INPUT), Tensor("y", 10), Tensor("mask", 1)],
        [Operator("f", (0,), (1,), 1.0, implementations=(fast,))],
    )
    assert replay(graph, Program([Compute(0, (1,))])).step_bytes == (10,)
    timeline = replay(graph, Program([Compute(0, (1, 2), "fast")]))
    assert (timeline.step_bytes, timeline.live_bytes, timeline.time_s) == ((16,), (11,), 0.25)


def test_swap_timeline_by_hand():
    graph = line(200, 10, 10, 10)
    program = Program(
        [
            Compute(0, (1,)),  # 0-1
            SwapOut(1),  # to host 1-3
            Compute(1, (2,)),  # 1-2
            Free(1),  # waits 2-3
            Compute(2, (3,)),  # 3-4
            SwapIn(1),  # from host 4-8
            Compute(2, ()),  # 4-5: does not read t1
            Compute(1, ()),  # waits 5-8, 8-9
            Free(1),
            DropHost(1),
            Compute(3, (4,)),  # 9-10
        ]
    )
    timeline = replay(graph, program, LINK)
    assert timeline.start_s == (0, 1, 1, 3, 3, 4, 4, 8, 9, 9, 9)
    assert timeline.end_s == (1, 1, 2, 3, 4, 4, 5, 9, 9, 9, 10)
    assert timeline.stall_s == (0, 0, 0, 1, 0, 0, 0, 3, 0, 0, 0)
    assert [(x.direction, x.start_s, x.end_s) for x in timeline.transfers] == [
        (Direction.TO_HOST, 1, 3),
        (Direction.FROM_HOST, 4, 8),
    ]
    assert timeline.live_bytes == (207, 207, 217, 17, 27, 227, 227, 227, 27, 27, 37)
    assert timeline.host_bytes == (0, 200, 200, 200, 200, 200, 200, 200, 200, 0, 0)
    assert timeline.host_peak_bytes == 200
    assert timeline.step_bytes[3] == 217, "a Free's own moment is before it gives back"
    assert timeline.step_bytes[5] == 227, "a tensor swapped in counts from its SwapIn on"


def test_transfers_of_one_direction_queue_and_directions_overlap_only_if_duplex():
    graph = line(100, 100, 1)
    program = Program(
        [
            Compute(0, (1,)),
            Compute(1, (2,)),
            SwapOut(1),
            Free(1),  # waits to 3
            SwapOut(2),  # to host 3-4
            SwapIn(1),  # from host: 3-5, or 4-6 on one link
            Compute(2, (3,)),
            Free(1),
            Free(2),
        ]
    )
    for duplex, start_s in ((True, 3), (False, 4)):
        device = Device(to_host_bytes_per_s=100, from_host_bytes_per_s=50, duplex=duplex)
        timeline = replay(graph, program, device)
        assert [(x.start_s, x.end_s) for x in timeline.transfers] == [
            (2, 3),
            (3, 4),
            (start_s, start_s + 2),
        ]
    queued = Program([Compute(0, (1,)), Compute(1, (2,)), SwapOut(1), SwapOut(2)])
    assert [(x.start_s, x.end_s) for x in replay(graph, queued, LINK).transfers] == [(2, 3), (3, 4)]


def test_one_link_makes_a_swap_out_wait_for_a_swap_in():
    graph = Graph(
        [Tensor("x", 7, TensorKind.INPUT), Tensor("t1", 100), Tensor("t2", 100)],
        [Operator("f", (0,), (1,), 1.0), Operator("g", (0,), (2,), 1.0)],
    )
    program = Program(
        [
            Compute(0, (1,)),
            SwapOut(1),  # 1-2
            Free(1),
            SwapIn(1),  # 2-4
            Compute(1, (2,)),  # 2-3
            SwapOut(2),  # 3-4, or 4-5 on one link
        ]
    )
    for duplex, start_s in ((True, 3), (False, 4)):
        device = Device(to_host_bytes_per_s=100, from_host_bytes_per_s=50, duplex=duplex)
        assert replay(graph, program, device).transfers[-1].start_s == start_s


def test_swap_in_waits_for_its_own_swap_out():
    graph = line(100, 1)
    program = Program([Compute(0, (1,)), SwapOut(1), Free(1), SwapIn(1), Compute(1, (2,))])
    timeline = replay(graph, program, LINK)
    assert [(x.start_s, x.end_s) for x in timeline.transfers] == [(1, 2), (2, 4)]
    assert timeline.time_s == 5


def test_swap_out_of_a_tensor_on_its_way_in_waits_for_it():
    graph = line(100, 1)
    program = Program(
        [
            Compute(0, (1,)),
            SwapOut(1),
            Free(1),  # 1-2
            SwapIn(1),  # 2-4
            DropHost(1),  # waits to 4: the copy reads host memory
            SwapOut(1),  # 4-5
            Free(1),  # waits to 5
        ]
    )
    timeline = replay(graph, program, LINK)
    assert timeline.stall_s == (0, 0, 1, 0, 2, 0, 1)
    assert timeline.time_s == 5


def test_free_of_a_tensor_on_its_way_in_waits():
    graph = line(100, 1)
    program = Program([Compute(0, (1,)), SwapOut(1), Free(1), SwapIn(1), Free(1)])
    assert replay(graph, program, LINK).end_s == (1, 1, 2, 2, 4)


def test_step_ends_when_the_last_transfer_does():
    program = Program([Compute(0, (1,)), SwapOut(1)])
    assert replay(line(100), program, LINK).time_s == 2


def test_latency_and_infinite_bandwidth():
    program = Program([Compute(0, (1,)), SwapOut(1), Free(1)])
    assert replay(line(100), program, Device(transfer_latency_s=0.5)).time_s == 1.5
    assert replay(line(100), program).time_s == 1


def test_a_slow_link_costs_time_never_memory():
    graph = line(200, 10, 10)
    program = Program(
        [Compute(0, (1,)), SwapOut(1), Compute(1, (2,)), Free(1), SwapIn(1), Compute(2, (3,))]
    )
    slow = replay(graph, program, Device(to_host_bytes_per_s=1e-3))
    fast = replay(graph, program)
    assert slow.step_bytes == fast.step_bytes
    assert slow.time_s > 1e5 > fast.time_s


def test_loss_boundary_brings_all_tangents_and_the_loss():
    graph = three_layers()
    timeline = replay(graph, Program([LossBoundary()]))
    assert timeline.step_bytes == (graph.resident_bytes + 120,)
    assert timeline.live_bytes == (graph.resident_bytes + 100,)


def test_placement_gives_arena_and_what_is_outside():
    graph = Graph(
        [Tensor("x", 7, TensorKind.INPUT), Tensor("a", 10), Tensor("b", 20), Tensor("c", 30)],
        [
            Operator("f", (0,), (1, 2), 1.0, 5),
            Operator("g", (1,), (3,), 1.0, 100),
        ],
        outputs=(3,),
    )
    instructions = [Compute(0, (1,)), Compute(1, (3,)), Free(1)]
    placed = replay(graph, Program(instructions, [(0, 1, 8)]))
    assert placed.peak_bytes == 7 + 10 + 30 + 100
    assert placed.arena_bytes == 18
    assert placed.placed_peak_bytes == 18 + 7 + 30 + 100
    everything = replay(graph, Program(instructions, [(0, 1, 8), (0, 2, 18), (1, 3, 18)]))
    assert everything.arena_bytes == 48
    assert everything.placed_peak_bytes == 48 + 7 + 100


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        ([Compute(9, ())], "no such operator"),
        ([Compute(-1, ())], "no such operator"),
        ([Compute(0, (1,), "fast")], "no implementation 'fast'"),
        ([Compute(1, ())], "'t1' is not on the device"),
        ([Compute(0, (2,))], "does not write 't2'"),
        ([Compute(0, (1,)), Compute(0, (1,))], "instruction 1.*'t1' is on the device already"),
        ([Free(1)], "'t1' is not on the device"),
        ([Free(77)], "tensor 77 is not on the device"),
        ([SwapOut(1)], "not on the device"),
        ([Compute(0, (1,)), SwapOut(1), SwapOut(1)], "on the host already"),
        ([SwapIn(1)], "not on the host"),
        ([Compute(0, (1,)), SwapOut(1), SwapIn(1)], "on the device already"),
        ([DropHost(1)], "not on the host"),
        ([Free(0)], "'x' is not on the device"),
        (["free"], "not an instruction"),
    ],
)
def test_what_cannot_be_processed(instructions, message):
    with pytest.raises(InvalidProgramError, match=message):
        replay(line(1, 1), Program(instructions))


def test_infinite_rates_are_the_default_of_a_device():
    assert Device().swap_in_bytes_per_s == math.inf
