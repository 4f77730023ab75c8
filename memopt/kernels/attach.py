"""All families of implementations, and the functions that attach and price them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from memopt.kernels import (
    attention,
    batch_norm,
    convolution,
    cross_entropy,
    norms,
    pooling,
)
from memopt.kernels.convolution import LIBRARIES
from memopt.kernels.elementwise import (
    ACTIVATIONS,
    CLIPPED,
    SMOOTH,
    attach_dropout,
    attach_savings,
)
from memopt.kernels.site import Attach, Sites
from memopt.models.device import Device
from memopt.models.graph import Graph, Tensor
from memopt.models.stage_record import EXACT, ROUNDING, with_record
from memopt.models.variants import undominated
from memopt.pricing.flops import work
from memopt.pricing.measure import MeasureOptions, costs_of
from memopt.pricing.roofline import work_time_s
from memopt.pricing.workspace import with_state, workspace_in_parts
from memopt.step.backend import backend_of, estimated_backend
from memopt.step.build import Lowering
from memopt.step.profiled import Profiled
from memopt.step.signature import describe_value, signature

FAMILIES: tuple[tuple[str, Attach], ...] = (
    ("clipped", partial(attach_savings, CLIPPED)),
    ("dropout", attach_dropout),
    ("pooling", pooling.attach),
    ("activations", partial(attach_savings, ACTIVATIONS)),
    ("smooth", partial(attach_savings, SMOOTH)),
    ("batch norm", batch_norm.attach_batch_norm),
    ("layer norm", norms.attach_layer_norm),
    ("group norm", norms.attach_group_norm),
    ("convolution", convolution.attach),
    ("convolution from what made its input", convolution.attach_again),
    ("convolution by libraries", convolution.attach_libraries),
    ("attention", attention.attach),
    ("cross-entropy", cross_entropy.attach),
    ("cross-entropy by rows", cross_entropy.attach_rows),
)
"""(name, function that attaches it); a new family is a function and a row here."""


def attach(
    lowering: Lowering,
    *,
    families: Iterable[tuple[str, Attach]] = FAMILIES,
    exact_only: bool = False,
    block_bytes: int = 1,
) -> Lowering:
    """Return a lowering whose operators have alternatives, unpriced. Deterministic: the same
    lowering and families give the same tensors and names."""
    sites = Sites(lowering, exact_only=exact_only, block_bytes=block_bytes)
    for _, add in families:
        add(sites)
    return sites.lowering()


def with_implementations(
    profiled: Profiled,
    *,
    families: Iterable[tuple[str, Attach]] = FAMILIES,
    exact_only: bool = False,
    device: Device | None = None,
    options: MeasureOptions | None = None,
) -> Profiled:
    """Return a profiled model whose operators have priced alternatives.

    Args:
        profiled: the result of `profile_model` or `estimate_model`; it stays unchanged.
        families: rows like those of FAMILIES; add your own.
        exact_only: leave out alternatives that change rounding.
        device: estimate for it, as `estimate_model` does; None: measure on the model's device.
        options: how hard to measure.
    """
    if device is not None:
        block_bytes = device.block_bytes
    else:
        block_bytes = backend_of(profiled.torch_device).block_bytes
    lowering = attach(
        profiled.lowering, families=families, exact_only=exact_only, block_bytes=block_bytes
    )
    lowering = _allowed(lowering, profiled)
    nodes = lowering.alternatives
    figures: dict[tuple[int, str], dict[str, Any]]
    if device is not None:
        lowering = lowering.without(
            {key for key, node in nodes.items() if node.target in LIBRARIES}
        )
        nodes = lowering.alternatives
        figures = {key: _estimated(node, device) for key, node in nodes.items()}
        for index, operator in enumerate(lowering.graph.operators):
            for choice in operator.implementations:
                figures[index, choice.name]["workspace_bytes"] += choice.workspace_bytes
    else:
        calls = list(map(signature, nodes.values()))
        costs = costs_of(calls, profiled.torch_device, options or MeasureOptions())
        figures = {
            key: {"time_s": cost.time_s, "workspace_bytes": cost.workspace_bytes}
            for key, cost in zip(nodes, costs, strict=True)
        }
    graph = _priced(profiled.graph, lowering, figures, pruned=device is not None)
    graph = with_state(graph, estimated_backend(block_bytes))
    stages = with_record(profiled.stages, "alternatives", EXACT if exact_only else ROUNDING)
    return replace(profiled, graph=graph, lowering=lowering, stages=stages)


def _allowed(lowering: Lowering, profiled: Profiled) -> Lowering:
    """Remove alternatives that the parameters' present values rule out. Parameters without
    values (meta, fake), and those behind a cast, are left to the kernel's own check."""
    model = profiled.captured.model()
    parameters = {} if model is None else dict(nn.Module.named_parameters(model))
    values = {
        primal.node: parameters[primal.name]
        for primal in profiled.captured.primals
        if primal.kind == "parameter" and primal.name in parameters
    }

    def refused(node: Node) -> bool:
        if node.meta["memopt_requires"] is None:
            return False
        test, arguments = node.meta["memopt_requires"]
        given = [values.get(a, a) if isinstance(a, Node) else a for a in arguments]
        if any(isinstance(a, Node | torch.Tensor) and not _has_values(a) for a in given):
            return False
        with torch.no_grad():
            return not test(*given)

    return lowering.without({key for key, node in lowering.alternatives.items() if refused(node)})


def _has_values(given: Node | torch.Tensor) -> bool:
    """Return whether a value is a real tensor: a captured model may be a copy of fake tensors."""
    return type(given) in (torch.Tensor, torch.nn.Parameter) and given.device.type != "meta"  # type: ignore[union-attr]  # a tensor


def _estimated(node: Node, device: Device) -> dict[str, Any]:
    """Return an alternative's roofline time, that of similar calls or of its bytes; and what those
    calls need on the CPU, if it runs them."""
    like = node.meta["memopt_like"] or ((node, 1.0),)
    parts = node.meta["memopt_parts"]
    runs = like if parts and device.rules != "cuda" else ()
    needed = (workspace_in_parts(signature(x), describe_value(x), parts) for x, _ in runs)
    scratch_s: float = node.meta["memopt_moved_bytes"] / (
        device.memory_bytes_per_s * device.memory_fraction
    )
    time_s = scratch_s + sum(
        share * work_time_s(work(signature(one), describe_value(one)), device)
        for one, share in like
    )
    return {"time_s": time_s, "workspace_bytes": max(needed, default=0)}


def _priced(
    graph: Graph,
    lowering: Lowering,
    figures: dict[tuple[int, str], dict[str, Any]],
    pruned: bool,
) -> Graph:
    """Return the priced graph with the lowering's extra tensors and alternatives. `figures` are by
    (operator, name). `pruned` leaves out dominated alternatives; measured ones all stay, since
    near ties would change from run to run."""
    extras: tuple[Tensor, ...] = lowering.graph.tensors[len(graph.tensors) :]
    operators = []
    for i, (old, new) in enumerate(zip(graph.operators, lowering.graph.operators, strict=True)):
        priced = (replace(c, **figures[i, c.name]) for c in new.implementations)
        operator = replace(old, implementations=tuple(priced))
        if pruned:
            better = undominated(operator, graph.resident)
            operator = replace(operator, implementations=better)
        operators.append(operator)
    return replace(graph, tensors=(*graph.tensors, *extras), operators=tuple(operators))
