"""Whole steps of estimated models: their updates, and the tensors that may live on the host."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import torch
from torch.fx import Node

from memopt.models.device import Device
from memopt.models.graph import Graph, Operator, Phase
from memopt.pricing.flops import Work
from memopt.pricing.roofline import work_time_s
from memopt.step.movable import movable_graph
from memopt.step.optimizer_state import optimizer_state
from memopt.step.profiled import Profiled


def whole_step(profiled: Profiled, optimizer: str | None, device: Device) -> Graph:
    """Give an estimated step an update of each trained parameter, priced by the bytes that it reads
    and writes; parameters and their optimizer state are movable.

    Args:
        profiled: of `estimate_model`, without an optimizer.
        optimizer: a name; None: no state.
        device: to price for.
    """
    graph, storages = profiled.graph, profiled.lowering.storages
    operators, states = list(graph.operators), dict[str, int]()
    updated: set[int] = set()
    primals = profiled.captured.primals
    holders = Counter(storages[one.node][0] for one in primals)
    parameters = list[int]()
    for primal, gradient in zip(primals, profiled.captured.gradients, strict=True):
        tensor = storages[primal.node][0]
        if primal.kind != "parameter" or tensor is None or holders[tensor] > 1:
            continue
        parameters.append(tensor)
        made = storages[gradient][0] if isinstance(gradient, Node) else None
        if made is None:
            continue
        value = primal.node.meta["val"]
        like = torch.empty(value.shape, dtype=value.dtype, device="meta", requires_grad=True)
        held = optimizer_state(optimizer, [like], device.block_bytes).bytes_total
        states |= {primal.name: held} if held else {}
        moved = 3 * graph.tensors[tensor].size_bytes + 2 * held
        operators.append(
            Operator(
                f"update.{primal.name}",
                (made, tensor),
                (),
                work_time_s(Work("", "", 0.0, moved), device),
                phase=Phase.UPDATE,
                recomputable=False,
                target="memopt.update",
            )
        )
        updated.add(made)
    read = {t for operator in operators for t in operator.reads}
    results = tuple(t for t in graph.gradients if t not in updated)
    step = replace(graph, operators=tuple(operators), gradients=results)
    kept = {*graph.outputs, *results}
    movable = tuple(sorted(t for t in parameters if t in read and t not in kept))
    return movable_graph(step, movable, states, charged=False)
