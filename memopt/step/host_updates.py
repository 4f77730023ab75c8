"""Prices updates on the host, as implementations of a whole step's update operators."""

from __future__ import annotations

from dataclasses import replace

import torch

from memopt.models.device import Device
from memopt.models.graph import Graph, Implementation, Operator
from memopt.step.backend import backend_of
from memopt.step.build import Lowering
from memopt.step.step_optimizer import group_of
from memopt.step.step_parts import StepParts, update_name

ON_HOST = "on the host"
"""The implementation's name, in plan files too."""


def host_updates(
    graph: Graph,
    parts: StepParts,
    optimizer: torch.optim.Optimizer,
    device: Device,
) -> dict[str, Implementation]:
    """Return operator → its update on the host, for the operators that can run there: parameter and
    state may live on the host, and the gradient is one tensor that nothing keeps.

    An update is priced by the bytes that it reads and writes, at the host's measured rate; without
    a rate none is returned. Its bits are the device's only where the device is the host itself.
    """
    rate = device.host_update_bytes_per_s
    if rate is None:
        return {}
    place = parts.captured.device or torch.device("cpu")
    named = dict(parts.module.named_parameters(remove_duplicate=False))
    movable = frozenset(graph.movable)
    operators = {operator.name: operator for operator in graph.operators}
    found = {}
    for site in parts.sites:
        operator = operators[update_name(site)]
        group = group_of(optimizer, named[site.name])
        there = backend_of(place).on_host or not (group.get("fused") or group.get("capturable"))
        there = there and site.gradient.meta["val"].dtype.is_floating_point
        if site.value is None and there and _may_run_there(graph, operator, movable):
            sizes = [graph.tensors[t].size_bytes for t in operator.reads]
            held = [graph.tensors[t].size_bytes for t in operator.reads if t in movable]
            found[operator.name] = Implementation(
                ON_HOST,
                (sum(sizes) + sum(held)) / rate,
                # Temporaries, and the state that the first step makes.
                max(operator.workspace_bytes, sum(held)),
                reads=(),
                writes=(),
                exact=backend_of(place).on_host,
                on_host=True,
            )
    return found


def _may_run_there(graph: Graph, operator: Operator, movable: frozenset[int]) -> bool:
    made = [t for t in operator.reads if not graph.tensors[t].resident]
    held = {t for t in operator.reads if graph.tensors[t].resident}
    computed = len(made) == 1 and made[0] in graph.producer and made[0] not in graph.kept
    return operator.changes_in_place and not operator.random and computed and held <= movable


def as_planned(graph: Graph) -> dict[str, Implementation]:
    """Return the host's updates in a planned graph, by the names of their operators."""
    pairs = ((o.name, choice) for o in graph.operators for choice in o.implementations)
    return {name: choice for name, choice in pairs if choice.on_host}


def with_choices(graph: Graph, choices: dict[str, Implementation]) -> Graph:
    """Return the graph with these implementations, by the names of their operators."""
    operators = tuple(
        replace(one, implementations=(*one.implementations, choices[one.name]))
        if one.name in choices
        else one
        for one in graph.operators
    )
    return replace(graph, operators=operators)


def lowered(lowering: Lowering, choices: dict[str, Implementation]) -> Lowering:
    """Return the lowering with these implementations, each with the node of the update itself."""
    if not choices:
        return lowering
    pairs = enumerate(zip(lowering.graph.operators, lowering.nodes, strict=True))
    nodes = {(i, ON_HOST): node for i, (operator, node) in pairs if operator.name in choices}
    graph = with_choices(lowering.graph, choices)
    return replace(lowering, graph=graph, alternatives={**lowering.alternatives, **nodes})
