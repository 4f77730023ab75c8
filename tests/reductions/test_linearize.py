"""Linearize: where graphs are cut, what stages cost, what is held."""

from __future__ import annotations

import random

import pytest

from memopt.models.generate import random_graph
from memopt.models.graph import Graph, Operator, Phase, Tensor, TensorKind
from memopt.models.steps import ChainStep, Move
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.cuts import find_cuts, parameter_free, worthwhile
from memopt.reductions.linearize import Linearization, linearizations, linearize
from tests.models.training_graphs import Builder, random_training_graph, store_all_steps


def names(lin: Linearization) -> list[str | None]:
    """Names of a^1..a^{n-1} without their numbers."""
    return [
        None if s.output is None else lin.graph.tensors[s.output].name.split(".")[0]
        for s in lin.stages
    ]


def longest_stage_share(lin: Linearization) -> float:
    """The share of the step's compute time in its longest stage."""
    times = [stage.forward_time_s + stage.backward_time_s for stage in lin.chain.stages]
    return max(times) / sum(times)


def perceptron(layers: int = 3, size: int = 10) -> Builder:
    """Linear layers that save their inputs: a plain chain."""
    build = Builder()
    x = build.tensor("input", size, TensorKind.INPUT)
    for i in range(layers):
        weight = build.parameter(4)
        (x,) = build.layer(f"linear{i}", (x, weight), (size,), (0, 1), module=f"layers.{i}")
    build.outputs.append(x)
    return build


def test_a_plain_chain_has_a_stage_per_layer() -> None:
    build = perceptron()
    build.backward()
    graph = build.graph(tangents_held=False)
    lin = linearize(graph)
    assert names(lin) == ["linear0", "linear1", None]
    assert [stage.name for stage in lin.chain.stages] == [
        *(f"layers.{i}" for i in range(3)),
        "loss",
    ]
    assert [stage.output_bytes for stage in lin.chain.stages] == [10, 10, 0, 0]
    assert [stage.gradient_bytes for stage in lin.chain.stages] == [10, 10, 10, 0]
    assert [stage.parameter_gradient_bytes for stage in lin.chain.stages] == [4, 4, 4, 0]
    assert lin.chain.input_bytes == 0
    # Input 10 and three weights of 4, and the output, which the user receives.
    assert lin.chain.resident_bytes == 10 + 3 * 4 + 10
    assert lin.held == {graph.outputs[0]}
    assert lin.chain.compute_time_s == pytest.approx(graph.compute_time_s)
    backward = [operator for stage in lin.stages for operator in stage.backward]
    assert sorted(backward) == list(range(graph.first_backward, len(graph.operators)))


def test_stage_figures_by_hand() -> None:
    """One stage of two operators, every figure checked: conv (10) and relu (20) to the loss."""
    tensors = [
        Tensor("x", 7, TensorKind.INPUT),
        Tensor("w", 3, TensorKind.PARAMETER),
        Tensor("first", 5),
        Tensor("conv", 10),
        Tensor("relu", 20),
        Tensor("sum", 1, TensorKind.OUTPUT),
        Tensor("tangent", 1, TensorKind.GRADIENT),
        Tensor("d_relu", 20),
        Tensor("d_conv", 10),
        Tensor("d_first", 5),
        Tensor("d_w", 3),
    ]
    bw = Phase.BACKWARD
    operators = [
        Operator("first", (0, 1), (2,), 1.0),
        Operator("conv", (2, 1), (3,), 4.0, workspace_bytes=8),
        Operator("relu", (3,), (4,), 1.0),
        Operator("sum", (4,), (5,), 0.5),
        Operator("sum_backward", (6,), (7,), 0.5, phase=bw),
        Operator("relu_backward", (7, 4), (8,), 2.0, phase=bw),
        Operator("conv_backward", (8, 2), (9,), 4.0, phase=bw, workspace_bytes=6),
        Operator("first_backward", (9, 0), (10,), 1.0, phase=bw),
    ]
    lin = linearize(Graph(tensors, operators, (5,), (10,), (6,), boundary_bytes=9))
    # conv's own output is saved by nobody, so there is no cut at it.
    assert names(lin) == ["first", "relu", None]
    first, middle, last, loss = lin.chain.stages
    assert (middle.forward_time_s, middle.backward_time_s) == (5.0, 4.0)
    assert (middle.output_bytes, middle.saved_bytes, middle.gradient_bytes) == (20, 20, 10)
    # relu runs with first (5), conv (10) and relu (20).
    assert middle.forward_overhead_bytes == middle.no_save_overhead_bytes == 10
    # relu_backward reads relu's output alone, so it is in the next stage, and relu is gone at
    # once here: conv_backward runs with first (5), d_conv, d_first and 6.
    assert lin.stages[1].backward == (6,)
    assert middle.backward_overhead_bytes == (5 + 10 + 5 + 6) - (5 + 20 + 10 + 5)
    assert lin.stages[2].backward == (4, 5)
    assert (first.parameter_gradient_bytes, middle.parameter_gradient_bytes) == (3, 0)
    # sum only makes a result: it runs once, and its time is charged where that is true.
    assert lin.stages[2].rerun == ()
    assert (last.forward_time_s, loss.backward_time_s) == (0.0, 0.5)
    assert (loss.backward_overhead_bytes, loss.parameter_gradient_bytes) == (9, 1)


def test_residual_blocks_are_cut_between_only() -> None:
    build = Builder()
    x = build.tensor("input", 10, TensorKind.INPUT)
    for i in range(3):
        (a,) = build.layer(f"a{i}", (x, build.parameter()), (30,), (0,))
        (b,) = build.layer(f"b{i}", (a, build.parameter()), (10,), (0,))
        (x,) = build.layer(f"sum{i}", (x, b), (10,))
    build.outputs.append(x)
    build.backward()
    lin = linearize(build.graph())
    assert names(lin) == ["a0", "sum0", "sum1", None]


def test_batch_norm_results_do_not_prevent_cuts() -> None:
    """New running statistics are results of the step: held, charged, and not written again."""
    build = Builder()
    x = build.tensor("input", 10, TensorKind.INPUT)
    for i in range(3):
        (x,) = build.layer(f"conv{i}", (x, build.parameter()), (10,), (0,))
        x, _, running = build.layer(f"norm{i}", (x, build.parameter()), (10, 2, 25), (0,), (1,))
        build.outputs.append(running)
        build.needs_gradient.discard(running)
        (x,) = build.layer(f"relu{i}", (x,), (10,), (), (0,))
    build.outputs.append(x)
    build.backward()
    graph = build.graph()
    lin = linearize(graph)
    assert names(lin) == ["conv0", "relu0", "conv1", "relu1", "conv2", None]
    assert lin.chain.resident_bytes == graph.resident_bytes + 3 * 25 + 10
    # A re-run of norm, beside conv (10), writes the statistics once more (10 + 2 + 25); relu (10)
    # and the mean (2) are saved.
    assert lin.chain.stages[1].forward_overhead_bytes == (10 + 37) - 10 - 12
    assert lin.chain.stages[1].saved_bytes == 12


@pytest.mark.parametrize("size", [1, 50])
def test_a_mask_shared_by_all_layers_is_held(size: int) -> None:
    build = Builder()
    x = build.tensor("input", 10, TensorKind.INPUT)
    (mask,) = build.layer("mask", (x,), (size,))
    for i in range(3):
        (x,) = build.layer(f"attention{i}", (x, mask, build.parameter()), (10,), (0, 1))
    build.outputs.append(x)
    build.backward()
    lin = linearize(build.graph())
    assert names(lin) == ["attention0", "attention1", None]
    assert mask in lin.held
    assert mask not in lin.stages[0].saved
    assert lin.stages[0].once == (0,)


def test_a_parameter_free_tensor_inside_one_stage_is_not_held() -> None:
    build = perceptron(2)
    (noise,) = build.layer("noise", (0,), (9,))
    x = build.outputs.pop()
    (x,) = build.layer("noisy", (x, noise, build.parameter()), (10,), (0, 1))
    (x,) = build.layer("last", (x, build.parameter()), (10,), (0,))
    build.outputs.append(x)
    build.backward()
    lin = linearize(build.graph())
    assert names(lin) == ["linear0", "linear1", "noisy", None]
    assert noise in parameter_free(lin.graph)
    assert noise not in lin.held
    assert noise in lin.stages[2].saved


def test_without_parameters_inputs_are_the_trunk() -> None:
    build = Builder()
    x = build.tensor("input", 10, TensorKind.INPUT)
    build.needs_gradient.add(x)
    for i in range(3):
        (x,) = build.layer(f"f{i}", (x,), (10,), (0,))
    build.outputs.append(x)
    build.backward()
    graph = build.graph()
    assert parameter_free(graph) == frozenset()
    assert names(linearize(graph)) == ["f0", "f1", None]


def test_tied_weights_gradient_crosses_the_whole_chain() -> None:
    """The embedding's gradient starts in the head and is completed in the first stage."""
    build = Builder()
    ids = build.tensor("input", 10, TensorKind.INPUT)
    table = build.parameter(100)
    (x,) = build.layer("embedding", (ids, table), (10,), (0,))
    for i in range(2):
        (x,) = build.layer(f"block{i}", (x, build.parameter(3)), (10,), (0,))
    (x,) = build.layer("head", (x, table), (40,), (0, 1))
    build.outputs.append(x)
    build.backward()
    lin = linearize(build.graph(tangents_held=False))
    assert names(lin) == ["embedding", "block0", "block1", None]
    # The head's share of the table's gradient waits for the embedding's.
    assert [stage.gradient_bytes for stage in lin.chain.stages] == [110, 110, 110, 40, 0]
    assert [stage.parameter_gradient_bytes for stage in lin.chain.stages] == [100, 3, 3, 0, 0]


def test_outputs_on_the_way_do_not_prevent_cuts() -> None:
    build = perceptron(4)
    build.outputs.insert(0, build.saves[1][1][0])
    build.backward()
    lin = linearize(build.graph())
    assert len(lin.chain) == 5
    assert names(lin) == ["linear0", None, "linear2", None]
    assert lin.chain.stages[1].output_bytes == 0
    assert lin.held == set(lin.graph.outputs)


def test_an_operator_that_runs_once_is_held() -> None:
    build = perceptron(2)
    x = build.outputs.pop()
    y, mask = build.layer("dropout", (x,), (10, 2), (), (1,), recomputable=False)
    (y,) = build.layer("last", (y, build.parameter()), (10,), (0,))
    build.outputs.append(y)
    build.backward()
    lin = linearize(build.graph())
    assert {mask, build.saves[2][1][0]} <= lin.held
    assert all(2 not in stage.rerun for stage in lin.stages)


def u_net(depth: int = 6) -> Graph:
    """Small storages skip from the way down to the way up, past large ones."""
    build = Builder()
    x = build.tensor("input", 10, TensorKind.INPUT)
    (x,) = build.layer("stem", (x, build.parameter()), (10,), (0,))
    skips = []
    for i in range(depth):
        (x,) = build.layer(f"wide{i}", (x, build.parameter()), (50,), (0,))
        (x,) = build.layer(f"down{i}", (x, build.parameter()), (5,), (0,))
        skips.append(x)
        (x,) = build.layer(f"pool{i}", (x, build.parameter()), (10,), (0,))
    for i in range(depth):
        (x,) = build.layer(f"up{i}", (x, skips.pop(), build.parameter()), (50,), (0, 1))
        (x,) = build.layer(f"mix{i}", (x, build.parameter()), (10,), (0,))
    build.outputs.append(x)
    build.backward()
    return build.graph()


def test_long_skips_give_one_long_stage_unless_they_are_held() -> None:
    graph = u_net()
    plain = linearize(graph, max_span=graph.first_backward)
    assert longest_stage_share(plain) > 0.6
    assert plain.held == set(graph.outputs)
    chosen = linearize(graph)
    assert longest_stage_share(chosen) < 0.2
    skips = {i for i, t in enumerate(graph.tensors) if t.name.startswith("down")}
    assert chosen.held > set(graph.outputs)
    assert chosen.held <= skips | set(graph.outputs)
    assert chosen.recomputing_peak_bytes < 0.7 * plain.recomputing_peak_bytes


def test_residual_trunks_are_not_held_unless_asked() -> None:
    build = Builder()
    x = build.tensor("input", 10, TensorKind.INPUT)
    (x,) = build.layer("stem", (x, build.parameter()), (10,), (0,))
    for i in range(4):
        (a,) = build.layer(f"a{i}", (x, build.parameter()), (30,), (0,))
        (b,) = build.layer(f"b{i}", (a, build.parameter()), (10,), (0,))
        (x,) = build.layer(f"sum{i}", (x, b), (10,))
    build.outputs.append(x)
    build.backward()
    graph = build.graph()
    trunk = {i for i, t in enumerate(graph.tensors) if t.name.split(".")[0] in ("stem", "sum0")}
    assert trunk.isdisjoint(linearize(graph).held)
    finer = linearize(graph, max_span=2)
    assert trunk <= finer.held
    assert len(finer.chain) > len(linearize(graph).chain)
    assert linearizations(graph)[0].max_span == graph.first_backward
    with pytest.raises(ValueError, match="at least 0"):
        linearize(graph, max_span=-1)


def test_the_recomputing_peak_is_a_schedules() -> None:
    """`recomputing_peak_bytes` is what replaying that schedule gives."""
    for seed in range(40):
        lin = linearize(random_training_graph(seed))
        steps = []
        for stage in range(len(lin.chain), 0, -1):
            moves = [Move.FORWARD_CHECKPOINT, *[Move.FORWARD_NO_SAVE] * (stage - 2)]
            steps += [ChainStep(move, k) for k, move in enumerate(moves[: stage - 1], start=1)]
            steps += [ChainStep(Move.FORWARD_ALL, stage), ChainStep(Move.BACKWARD, stage)]
        assert replay_chain(lin.chain, steps).peak_bytes == lin.recomputing_peak_bytes


def test_unsaved_storages_are_no_cuts_unless_cheap() -> None:
    """A sum before a ReLU is not worth a stage; a small storage before an upsampling is."""
    build = Builder()
    x = build.tensor("input", 40, TensorKind.INPUT)
    (x,) = build.layer("conv", (x, build.parameter()), (40,), (0,))
    (x,) = build.layer("sum", (x,), (40,))
    (x,) = build.layer("relu", (x,), (40,), (), (0,))
    (x,) = build.layer("pool", (x, build.parameter()), (10,), (0,))
    (x,) = build.layer("upsample", (x,), (40,))
    (x,) = build.layer("conv", (x, build.parameter()), (40,), (0,))
    (x,) = build.layer("conv", (x, build.parameter()), (40,), (0,))
    build.outputs.append(x)
    build.backward()
    graph = build.graph()
    found = find_cuts(graph)
    assert len(found) == 6
    kept = [graph.tensors[cut.tensor or 0].name.split(".")[0] for cut in worthwhile(graph, found)]
    assert kept == ["relu", "pool", "upsample", "conv"]


def test_a_user_checkpoint_inside_the_model_merges_stages() -> None:
    """Backward operators that recompute a segment read its input: its stages are one."""
    tensors = [
        Tensor("x", 4, TensorKind.INPUT),
        Tensor("w", 4, TensorKind.PARAMETER),
        *(Tensor(f"y{i}", 4) for i in range(1, 5)),
        Tensor("tangent", 4, TensorKind.GRADIENT),
        *(Tensor(f"again{i}", 4) for i in (2, 3)),
        *(Tensor(f"d{i}", 4) for i in (3, 2, 1)),
        Tensor("d_w", 4),
    ]
    bw = Phase.BACKWARD
    operators = [
        *(Operator(f"f{i}", (i + 1 if i else 0, 1), (i + 2,), 1.0) for i in range(4)),
        Operator("f1_again", (2,), (7,), 1.0, phase=bw),
        Operator("f2_again", (7,), (8,), 1.0, phase=bw),
        Operator("b3", (6, 4), (9,), 1.0, phase=bw),
        Operator("b2", (9, 8), (10,), 1.0, phase=bw),
        Operator("b1", (10, 7), (11,), 1.0, phase=bw),
        Operator("b0", (11, 0), (12,), 1.0, phase=bw),
    ]
    lin = linearize(Graph(tensors, operators, (5,), (12,), (6,)))
    stage = next(s for s in lin.stages if 4 in s.backward)
    assert {4, 5} <= set(stage.backward)
    # f1_again reads y1, so it cannot be later than the stage after y1's.
    assert 1 in stage.forward


def test_inference_and_graphs_without_operators_are_one_stage() -> None:
    build = perceptron()
    lin = linearize(build.graph())
    assert len(lin.chain) == 2
    empty = linearize(Graph([Tensor("x", 4, TensorKind.INPUT)], [], outputs=(0,)))
    assert len(empty.chain) == 2
    assert empty.chain.resident_bytes == 4


def test_updates_are_refused() -> None:
    tensors = [Tensor("x", 1, TensorKind.INPUT), Tensor("y", 1), Tensor("g", 1), Tensor("z", 1)]
    operators = [
        Operator("f", (0,), (1,), 1.0),
        Operator("b", (1,), (2,), 1.0, phase=Phase.BACKWARD),
        Operator("u", (2,), (3,), 1.0, phase=Phase.UPDATE),
    ]
    with pytest.raises(ValueError, match="parameter updates"):
        linearize(Graph(tensors, operators))


def test_to_chain_is_the_linearized_chain() -> None:
    graph = random_training_graph(3)
    assert graph.to_chain() == linearize(graph).chain


@pytest.mark.parametrize("seed", range(60))
def test_every_operator_has_its_stage(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_training_graph(seed) if seed % 2 else random_graph(rng, 1 + seed % 12)
    lin = linearize(graph, max_span=None if seed % 3 else seed % 8)
    forward = [i for stage in lin.stages for i in stage.forward]
    assert forward == list(range(graph.first_backward))
    backward = [i for stage in reversed(lin.stages) for i in stage.backward]
    assert sorted(backward) == list(range(graph.first_backward, len(graph.operators)))
    done: set[int] = set()
    for i in backward:
        sources = {graph.producer.get(t, -1) for t in graph.operators[i].reads}
        assert {s for s in sources if s >= graph.first_backward} <= done
        done.add(i)
    assert lin.chain.compute_time_s == pytest.approx(graph.compute_time_s)


def test_store_all_of_the_chain_is_close_to_the_graphs() -> None:
    ratios = []
    for seed in range(100):
        graph = random_training_graph(seed)
        lin = linearize(graph)
        chain = replay_chain(lin.chain, store_all_steps(lin.chain)).peak_bytes
        ratios.append(chain / replay(graph, store_all(graph)).peak_bytes)
    assert sum(ratios) / len(ratios) < 1.05
