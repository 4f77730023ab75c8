"""The network stream of the replay, and the validator's law of collectives, by hand."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from memopt.models.bounds import time_lower_bound
from memopt.models.budget import Budget
from memopt.models.collective import Collective, CollectiveKind
from memopt.models.device import Device
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
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
from memopt.programs.network_use import network_use
from memopt.programs.replay import Timeline, replay
from memopt.programs.validate import ViolationCode, memory_use, validate
from tests.network.search import graph_with_collectives
from tests.random_programs import random_program

SHARD1, SHARD2, X, W1, A, W2, Y, DY, G = range(9)
GATHER = Collective(CollectiveKind.ALL_GATHER, 8, 100)
SCATTER = Collective(CollectiveKind.REDUCE_SCATTER, 8, 100)


def two_layers() -> Graph:
    """Two gathered weights, two layers, and the gradient of the second, scattered."""
    parameter = TensorKind.PARAMETER
    tensors = [
        Tensor("shard1", 10, parameter),
        Tensor("shard2", 10, parameter),
        Tensor("x", 5, TensorKind.INPUT),
        Tensor("w1", 80),
        Tensor("a", 7),
        Tensor("w2", 80),
        Tensor("y", 3, TensorKind.OUTPUT),
        Tensor("dy", 3, TensorKind.GRADIENT),
        Tensor("g", 11, TensorKind.GRADIENT),
    ]
    back = Phase.BACKWARD
    operators = [
        Operator("gather1", (SHARD1,), (W1,), 4.0, collective=GATHER),
        Operator("layer1", (X, W1), (A,), 3.0),
        Operator("gather2", (SHARD2,), (W2,), 4.0, collective=GATHER),
        Operator("layer2", (A, W2), (Y,), 2.0),
        Operator("backward", (DY, A, W2), (G,), 1.0, 0, back, collective=SCATTER),
    ]
    return Graph(tensors, operators, (Y,), (G,), (DY,))


GRAPH = two_layers()
STARTED_EARLY = (
    Compute(0, (W1,)),
    Compute(2, (W2,)),
    Compute(1, (A,)),
    Free(W1),
    Compute(3, (Y,)),
    LossBoundary(),
    Compute(4, (G,)),
    Free(W2),
    Free(A),
)


def timed(*instructions: object, device: Device | None = None) -> Timeline:
    program = Program(instructions)  # type: ignore[arg-type]  # of the union
    assert validate(GRAPH, program) is None
    return replay(GRAPH, program, device)


def test_a_reader_waits_for_the_collective() -> None:
    timeline = timed(*store_all(GRAPH))
    # gather1, layer1, gather2, layer2, backward: one after the other.
    assert timeline.time_s == 4 + 3 + 4 + 2 + 1
    spans = [(x.tensor, x.start_s, x.end_s) for x in timeline.collectives]
    assert spans == [(W1, 0.0, 4.0), (W2, 7.0, 11.0), (G, 13.0, 14.0)]
    assert timeline.total_stall_s == 4 + 4 + 1


def test_collectives_overlap_what_is_computed_and_queue_behind_each_other() -> None:
    timeline = timed(*STARTED_EARLY)
    assert [(x.start_s, x.end_s) for x in timeline.collectives] == [(0, 4), (4, 8), (10, 11)]
    # layer1 waits until 4 and runs until 7; layer2 from 8 to 10; W2 is read until 11.
    assert timeline.start_s[2] == 4
    assert timeline.start_s[4] == 8
    assert timeline.time_s == 11
    assert time_lower_bound(GRAPH) == 9 == GRAPH.network_time_s
    assert GRAPH.compute_time_s == 5


@pytest.mark.parametrize("workspace_bytes", [0, 5])
def test_what_computing_hides(workspace_bytes: int) -> None:
    """Layer 1 hides 3 of the second gather's 4 seconds. Waiting at once for a gather that needs
    memory of its own hides nothing."""
    first = replace(GRAPH.operators[0], workspace_bytes=workspace_bytes)
    graph = replace(GRAPH, operators=(first, *GRAPH.operators[1:]))
    used = network_use(replay(graph, Program(STARTED_EARLY)))
    assert (used.time_s, used.exposed_s) == (9.0, 6.0)


def test_results_take_memory_from_the_start() -> None:
    timeline = timed(*STARTED_EARLY)
    resident = 25
    assert timeline.step_bytes[:3] == (resident + 80, resident + 160, resident + 160 + 7)


def test_what_is_sent_is_held_until_it_is_over() -> None:
    free_a = timed(*STARTED_EARLY).stall_s[7]
    assert free_a == 1.0  # Free(W2), which `backward` reads


def test_what_is_not_kept_is_waited_for_at_once() -> None:
    again = (*STARTED_EARLY[:4], Compute(0, ()), *STARTED_EARLY[4:])
    assert timed(*again).stall_s[4] == 4.0 + 8.0 - 7.0


def test_a_copy_to_the_host_waits_for_the_data() -> None:
    moved = (
        Compute(0, (W1,)),
        SwapOut(W1),
        Free(W1),
        SwapIn(W1),
        DropHost(W1),
        *STARTED_EARLY[1:],
    )
    timeline = timed(*moved, device=Device(to_host_bytes_per_s=80.0))
    assert [(x.start_s, x.end_s) for x in timeline.transfers] == [(4, 5), (5, 6)]


@pytest.mark.parametrize("earlier", [0, 1])
def test_collectives_keep_the_graphs_order(earlier: int) -> None:
    order = [Compute(2, (W2,)), Compute(0, (W1,))]
    swapped = Program([*order, *STARTED_EARLY[2:]])
    found = validate(GRAPH, swapped)
    assert found is not None
    assert (found.code, found.instruction) == (ViolationCode.COLLECTIVE_ORDER, 1)
    # Running one again neither reorders nor replaces: after its first run, it is free.
    again = [
        *STARTED_EARLY[:4],
        *([Compute(0, (W1,)), Free(W1)] if earlier else ()),
        *STARTED_EARLY[4:],
    ]
    assert validate(GRAPH, Program(again)) is None


def test_none_may_be_left_out() -> None:
    tensors = (*GRAPH.tensors, Tensor("sum", 4))
    told = Operator("tell", (A,), (9,), 1.0, collective=SCATTER)
    graph = replace(
        GRAPH, tensors=tensors, operators=(*GRAPH.operators[:4], told, GRAPH.operators[4])
    )
    last = replace(STARTED_EARLY[6], op=5)  # type: ignore[type-var]
    program = Program([*STARTED_EARLY[:6], last, *STARTED_EARLY[7:]])
    found = validate(graph, program)
    assert found is not None
    assert found.code is ViolationCode.OPERATOR_MISSING
    assert any(x.op == 4 for _, x in store_all(graph).computes)


def test_a_collective_runs_one_way() -> None:
    with pytest.raises(ValueError, match="one way"):
        replace(GRAPH.operators[0], random=True)


@pytest.mark.parametrize("seed", range(25))
def test_memory_is_the_validators(seed: int) -> None:
    rng = Random(seed)
    graph = graph_with_collectives(rng, 4)
    program = random_program(rng, graph, recomputations=2, swaps=2)
    timeline = replay(graph, program, Device(to_host_bytes_per_s=7.0))
    use = memory_use(graph, program)
    assert (use.peak, use.host_peak) == (timeline.peak_bytes, timeline.host_peak_bytes)
    assert validate(graph, program, Budget(use.peak, use.host_peak)) is None
    assert timeline.time_s >= time_lower_bound(graph) - 1e-9
    for one, later in zip(timeline.collectives, timeline.collectives[1:], strict=False):
        assert one.end_s <= later.start_s
