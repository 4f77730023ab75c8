"""Whole steps of estimated models: their updates, and the tensors that may live on the host."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from memopt.models.device import Device, in_blocks
from memopt.models.graph import Graph, Operator, Phase, TensorKind
from memopt.models.optimizer_names import update_bytes
from memopt.pricing.flops import Work
from memopt.pricing.roofline import work_time_s
from memopt.step.movable import movable_graph
from memopt.step.optimizer_state import OptimizerState


def whole_step(graph: Graph, state: OptimizerState, device: Device) -> Graph:
    """Give an estimated step an update of each trained parameter, priced by the bytes that it reads
    and writes (`update_bytes`); parameters and their optimizer state are movable.

    A gradient belongs to a parameter of its size. Of several, the one made first belongs to the one
    that the forward reads last. (Which of a block's equal ones it is makes no difference to memory
    and time.)

    Args:
        graph: the step up to its gradients; optimizer state is not charged.
        state: the optimizer's, shared by the parameters as their bytes are.
        device: to price for.
    """
    readers, producer, tensors = graph.readers, graph.producer, graph.tensors
    made, used = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
    for gradient in sorted(set(graph.gradients) & producer.keys(), key=producer.__getitem__):
        made[tensors[gradient].size_bytes].append(gradient)
    kept = {*graph.outputs, *graph.gradients}
    parameters = [
        t
        for t, tensor in enumerate(tensors)
        if tensor.kind is TensorKind.PARAMETER and readers[t] and t not in kept
    ]
    for parameter in sorted(parameters, key=lambda t: -readers[t][0]):
        used[tensors[parameter].size_bytes].append(parameter)
    pairs = [
        pair for size, listed in made.items() for pair in zip(listed, used[size], strict=False)
    ]
    pairs.sort(key=lambda pair: producer[pair[0]])
    total = sum(tensors[parameter].size_bytes for _, parameter in pairs)
    operators, states = list(graph.operators), dict[str, int]()
    for gradient, parameter in pairs:
        size = tensors[parameter].size_bytes
        held = in_blocks(state.bytes_total * size // total, device.block_bytes)
        name = tensors[parameter].name
        states |= {name: held} if held else {}
        work = Work("", "", 0.0, update_bytes(state.name, size, held))
        operators.append(
            Operator(
                f"update.{name}",
                (gradient, parameter),
                (),
                work_time_s(work, device),
                phase=Phase.UPDATE,
                recomputable=False,
                target="memopt.update",
            )
        )
    updated = {gradient for gradient, _ in pairs}
    results = tuple(t for t in graph.gradients if t not in updated)
    step = replace(graph, operators=tuple(operators), gradients=results)
    return movable_graph(step, tuple(parameters), states, charged=False)
