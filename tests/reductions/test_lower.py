"""Lowering chain schedules: valid programs, never above the chain's own peak or time."""

from __future__ import annotations

import random

import pytest

from memopt.errors import InvalidProgramError
from memopt.models.device import Device
from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.models.steps import ChainStep, Move
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Compute, DropHost, LossBoundary, SwapIn, SwapOut
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.linearize import Linearization, linearize
from memopt.reductions.lower import lower_steps
from tests.models.training_graphs import (
    Builder,
    drawing,
    overwriting,
    random_schedule,
    random_training_graph,
    store_all_steps,
    with_random_transfers,
)
from tests.strategies.offload.replay_offload import replay_offload


def check(lin: Linearization, steps: tuple[ChainStep, ...]) -> None:
    """The laws of lowering."""
    chain = replay_chain(lin.chain, steps)
    program = with_in_place(lin.graph, lower_steps(lin, steps, keep_unread=True))
    exact = replay(lin.graph, program)
    assert validate(lin.graph, program) is None
    assert exact.peak_bytes <= chain.peak_bytes
    assert exact.time_s == pytest.approx(chain.time_s)
    pruned = replay(lin.graph, program := lin.lower(steps))
    assert validate(lin.graph, program) is None
    assert pruned.peak_bytes <= exact.peak_bytes
    assert pruned.time_s <= exact.time_s + 1e-9


def graph_of(seed: int) -> Graph:
    rng = random.Random(seed)
    if seed % 3 == 0:
        graph = random_graph(rng, 1 + seed % 14)
    else:
        graph = random_training_graph(seed, layers=1 + seed % 13)
    return overwriting(rng, graph) if seed % 2 else graph


@pytest.mark.parametrize("seed", range(240))
def test_any_schedule_of_any_graph(seed: int) -> None:
    lin = linearize(graph_of(seed), max_span=None if seed % 2 else seed % 11)
    check(lin, store_all_steps(lin.chain))
    for k in range(6):
        check(lin, random_schedule(lin.chain, seed * 10 + k, detours=0.15 * k))


@pytest.mark.parametrize("seed", range(60))
def test_random_operators_draw_in_the_graphs_order(seed: int) -> None:
    """Backward operators change places between stages, but no two that draw."""
    lin = linearize(drawing(random.Random(seed), graph_of(seed)), max_span=seed % 11)
    for k in range(3):
        check(lin, random_schedule(lin.chain, seed * 10 + k, detours=0.15 * k))


def test_the_chain_is_no_dearer_than_it_must_be() -> None:
    """In many schedules the chain's peak is the program's to the byte."""
    equal = []
    for seed in range(60):
        lin = linearize(graph_of(seed))
        for k in range(4):
            steps = random_schedule(lin.chain, seed * 10 + k, detours=0.15 * k)
            program = lower_steps(lin, steps, keep_unread=True)
            peak = replay_chain(lin.chain, steps).peak_bytes
            equal.append(replay(lin.graph, program).peak_bytes == peak)
    assert sum(equal) > 0.3 * len(equal)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(20))
def test_any_schedule_of_many_graphs(block: int) -> None:
    for seed in range(240 + 100 * block, 340 + 100 * block):
        test_any_schedule_of_any_graph(seed)


@pytest.mark.parametrize("seed", range(120))
def test_schedules_with_transfers(seed: int) -> None:
    """Memory is never above the chain's. Time may be: what runs once is charged in the chain with
    the loss, so transfers overlap with other operators."""
    rng = random.Random(seed)
    lin = linearize(graph_of(seed))
    device = Device(to_host_bytes_per_s=rng.choice((1, 5, 40)), duplex=rng.random() < 0.5)
    for k in range(4):
        steps = random_schedule(lin.chain, seed * 10 + k, detours=0.1 * k)
        steps = with_random_transfers(lin.chain, steps, seed * 10 + k)
        chain = replay_offload(lin.chain, steps, device)
        for program in (
            lin.lower(steps),
            with_in_place(lin.graph, lower_steps(lin, steps, keep_unread=True)),
        ):
            assert validate(lin.graph, program) is None
            figures = replay(lin.graph, program, device)
            assert figures.peak_bytes <= chain.peak_bytes
            assert figures.host_peak_bytes <= chain.host_peak_bytes


def test_a_moved_stage_by_hand() -> None:
    """x_2 leaves after its forward and comes back for B^3, which reads a^2."""
    lin = blocks(2)
    words = [
        "Fall1",
        "Fall2",
        "offload2",
        "Fall3",
        "release2",
        "Fall4",
        "B4",
        "prefetch2",
        "B3",
        "B2",
        "B1",
    ]
    steps = tuple(ChainStep(Move(word[:-1]), int(word[-1])) for word in words)
    program = lin.lower(steps)
    assert validate(lin.graph, program) is None
    saved = lin.stages[1].saved
    assert {x.tensor for x in program if isinstance(x, SwapOut)} == saved
    assert {x.tensor for x in program if isinstance(x, SwapIn)} == saved
    assert {x.tensor for x in program if isinstance(x, DropHost)} == saved
    kinds = [type(x) for x in program]
    assert kinds.index(LossBoundary) < kinds.index(SwapIn)
    figures = replay(lin.graph, program)
    assert figures.host_peak_bytes == lin.chain.stages[1].saved_bytes
    assert figures.time_s == pytest.approx(lin.graph.compute_time_s)


@pytest.mark.parametrize(
    ("words", "moved", "back"),
    [
        ("B4 B3 prefetch2 B2 B1", {4}, {4}),
        ("B4 prefetch2 B3 B2 B1", {4, 7}, {4}),
        ("B4 B3 prefetch2 Fck3 B2 B1", {4, 7}, {4, 7}),
    ],
    ids=("read before", "read after", "dropped, then read"),
)
def test_a_moved_stage_whose_activation_stays(words: str, moved: set[int], back: set[int]) -> None:
    """x_2 = {a, a^2} leaves while a^2 stays on its own, until B^3 drops it."""
    lin = blocks(3, saves=(0,))
    assert (lin.stages[1].saved, lin.stages[1].output) == ({4, 7}, 7)
    early = "Fall1 Fall2 Fck2 offload2 release2 Fall3 Fall4 Fall5 B5"
    steps = tuple(ChainStep(Move(w[:-1]), int(w[-1])) for w in f"{early} {words}".split())
    program = lower_steps(lin, steps, keep_unread=True)
    assert validate(lin.graph, program) is None
    assert {x.tensor for x in program if isinstance(x, SwapOut)} == moved
    assert {x.tensor for x in program if isinstance(x, SwapIn)} == back
    assert {x.tensor for x in program if isinstance(x, DropHost)} == moved


def blocks(count: int, saves: tuple[int, ...] = ()) -> Linearization:
    """Blocks of two matrix products, the second of which saves its input only; `saves` is (0,)
    where a block's sum saves its result."""
    build = Builder()
    x = build.tensor("input", 10, TensorKind.INPUT)
    (x,) = build.layer("stem", (x, build.parameter()), (10,), (0,))
    for i in range(count):
        (a,) = build.layer(f"up{i}", (x, build.parameter()), (40,), (0,))
        (b,) = build.layer(f"down{i}", (a, build.parameter()), (10,), (0,))
        (x,) = build.layer(f"sum{i}", (x, b), (10,), (), saves)
    build.outputs.append(x)
    build.backward()
    return linearize(build.graph())


def test_store_all_is_the_frameworks_own_step() -> None:
    lin = blocks(4)
    program = lin.lower(store_all_steps(lin.chain))
    assert (
        replay(lin.graph, program).peak_bytes == replay(lin.graph, store_all(lin.graph)).peak_bytes
    )
    assert sum(isinstance(x, LossBoundary) for x in program) == 1


def test_a_rerun_stops_before_what_nobody_reads() -> None:
    """B^ℓ does not read a^ℓ: a stage re-run for its backward skips its last operators."""
    lin = blocks(2)
    assert len(lin.chain) == 4
    steps = tuple(
        ChainStep(move, stage)
        for move, stage in (
            (Move.FORWARD_ALL, 1),
            (Move.FORWARD_CHECKPOINT, 2),
            (Move.FORWARD_ALL, 3),
            (Move.FORWARD_ALL, 4),
            (Move.BACKWARD, 4),
            (Move.BACKWARD, 3),
            (Move.FORWARD_ALL, 2),
            (Move.BACKWARD, 2),
            (Move.BACKWARD, 1),
        )
    )
    check(lin, steps)
    runs = [x.op for x in lin.lower(steps) if isinstance(x, Compute)]
    assert [runs.count(i) for i in range(7)] == [1, 2, 1, 1, 1, 1, 1]
    every = [x.op for x in lower_steps(lin, steps, keep_unread=True) if isinstance(x, Compute)]
    assert [every.count(i) for i in range(7)] == [1, 2, 2, 2, 1, 1, 1]


def test_results_are_written_once() -> None:
    """Re-running batch norm keeps its output again, not its statistics."""
    build = Builder()
    x = build.tensor("input", 10, TensorKind.INPUT)
    x, _, running = build.layer("norm", (x, build.parameter()), (10, 2, 5), (0,), (1,))
    build.needs_gradient.discard(running)
    (y,) = build.layer("linear", (x, build.parameter()), (10,), (0,))
    (z,) = build.layer("linear", (y, build.parameter()), (10,), (0,))
    build.outputs += [running, z]
    build.backward()
    lin = linearize(build.graph())
    steps = (
        ChainStep(Move.FORWARD_CHECKPOINT, 1),
        ChainStep(Move.FORWARD_NO_SAVE, 2),
        ChainStep(Move.FORWARD_ALL, 3),
        ChainStep(Move.FORWARD_ALL, 4),
        ChainStep(Move.BACKWARD, 4),
        ChainStep(Move.BACKWARD, 3),
        ChainStep(Move.FORWARD_ALL, 1),
        ChainStep(Move.FORWARD_ALL, 2),
        ChainStep(Move.BACKWARD, 2),
        ChainStep(Move.BACKWARD, 1),
    )
    check(lin, steps)
    norms = [x for x in lin.lower(steps) if isinstance(x, Compute) and x.op == 0]
    assert [running in norm.outputs for norm in norms] == [True, False]


def test_an_invalid_schedule_is_refused() -> None:
    lin = blocks(2)
    with pytest.raises(InvalidProgramError, match="B\\^1"):
        lin.lower((ChainStep(Move.FORWARD_ALL, 1),))


def test_inference() -> None:
    build = Builder()
    x = build.tensor("input", 10, TensorKind.INPUT)
    (x,) = build.layer("linear", (x, build.parameter()), (10,))
    build.outputs.append(x)
    lin = linearize(build.graph())
    check(lin, store_all_steps(lin.chain))
    assert not any(isinstance(x, LossBoundary) for x in lin.lower(store_all_steps(lin.chain)))


def test_a_step_whose_backward_needs_no_tangents() -> None:
    """It has its loss boundary all the same."""
    tensors = [Tensor("w", 8, TensorKind.PARAMETER), *(Tensor(name, 8) for name in "yg")]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("b", (0,), (2,), 1.0, 0, Phase.BACKWARD),
    ]
    lin = linearize(Graph(tensors, operators, outputs=(1,), gradients=(2,)))
    check(lin, store_all_steps(lin.chain))
    assert LossBoundary() in lin.lower(store_all_steps(lin.chain)).instructions
