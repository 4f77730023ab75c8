"""Makes parameters and optimizer state of whole steps movable: they may live on the host.

The optimizer's state becomes one tensor of the graph for each trained parameter (all its state
moves together), which the parameter's update reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch

from memopt.models.budget import format_bytes
from memopt.models.device import Device, in_blocks
from memopt.models.graph import Graph, Tensor, TensorKind
from memopt.models.options import several
from memopt.programs.serialize import fingerprint
from memopt.step.build import Lowering
from memopt.step.host_updates import host_updates, lowered, with_choices
from memopt.step.optimizer_state import state_sizes
from memopt.step.profiled import Profiled, ProfiledStep
from memopt.step.shards import local_part
from memopt.step.step_optimizer import group_of
from memopt.step.step_parts import StepParts
from memopt.torch_private.tensors import SHARD, storage_key

KINDS = ("parameters", "gradients", "optimizer")


def parse_movable(movable: str | Collection[str]) -> frozenset[str]:
    """Parse a user's `movable=`.

    Raises:
        ValueError: it names something other than `KINDS`.
    """
    listed = several(movable)
    named = KINDS if listed == ("all",) else listed
    if not all(isinstance(one, str) and one in KINDS for one in named):
        raise ValueError(
            'movable= takes "parameters", "gradients", "optimizer", several of them in a tuple, or '
            f'"all", got {movable!r}'
        )
    return frozenset(named)


def state_name(parameter: str) -> str:
    """Return the name of the tensor that stands for a parameter's optimizer state."""
    return f"state of {parameter}"


def with_movable(
    profiled: Profiled | None,
    optimizer: torch.optim.Optimizer,
    movable: str | Collection[str],
    device: Device | None = None,
    *,
    repeated: bool = False,
) -> ProfiledStep:
    """Make tensors movable, so that a plan may keep them on the host between steps. (Gradients are
    made and freed in a whole step: they may move anyway.)

    Args:
        profiled: the whole step.
        optimizer: the step's optimizer.
        movable: the user's `movable=`.
        device: its host may run updates; None: the device runs them all.
        repeated: whether some tensors may stay on the device between steps (`Graph.repeated`).

    Raises:
        ValueError: it is no whole step, or its state is on the host already.
    """
    kinds = parse_movable(movable)
    parts = profiled.parts if isinstance(profiled, ProfiledStep) else None
    if not isinstance(profiled, ProfiledStep) or parts is None or profiled.host_state_bytes:
        raise ValueError(
            "movable= is for whole steps: pass the module, loss_fn=, optimizer=<a torch.optim "
            "instance> and whole_step=True, and leave out offload_optimizer"
        )
    block_bytes = 1 if profiled.record is None else profiled.record.block_bytes
    sizes = _state_sizes(parts, optimizer, block_bytes) if "optimizer" in kinds else {}
    taken = "parameters" in kinds
    parameters = movable_parameters(parts, profiled.lowering) if taken else ()
    graph = movable_graph(profiled.graph, parameters, sizes, repeated=repeated)
    plain = profiled.lowering.graph
    plain = movable_graph(plain, parameters, sizes, repeated=repeated, charged=False)
    lowering = replace(profiled.lowering, graph=plain)
    state_total = sum(sizes.values())
    record = profiled.record
    if record is not None:
        record = replace(record, fingerprint=fingerprint(lowering.graph))
    optimizer_left = profiled.optimizer
    if optimizer_left is not None:
        left_bytes = optimizer_left.bytes_total - state_total
        optimizer_left = replace(optimizer_left, bytes_total=left_bytes, parts=())
    size = format_bytes(graph.movable_bytes)
    made = replace(
        profiled,
        graph=graph,
        lowering=lowering,
        optimizer=optimizer_left,
        movable_state_bytes=state_total,
        record=record,
        notes=(f"May be on the host between steps: {size}.", *profiled.notes),
    )
    return made if device is None else with_host_updates(made, optimizer, device)


def with_host_updates(
    profiled: Profiled | None, optimizer: torch.optim.Optimizer, device: Device
) -> ProfiledStep:
    """Let the host run the updates of tensors that may be on the host between steps."""
    assert isinstance(profiled, ProfiledStep)
    assert profiled.parts is not None
    choices = host_updates(profiled.graph, profiled.parts, optimizer, device)
    graph = with_choices(profiled.graph, choices)
    return replace(profiled, graph=graph, lowering=lowered(profiled.lowering, choices))


def movable_as_planned(
    parts: StepParts,
    lowering: Lowering,
    planned: Graph,
    optimizer: torch.optim.Optimizer,
    block_bytes: int,
) -> Lowering:
    """Make tensors of a newly captured step movable, of the same kinds as in a planned one."""
    kinds = {planned.tensors[t].kind for t in planned.movable}
    states, parameters = dict[str, int](), tuple[int, ...]()
    if TensorKind.OPTIMIZER_STATE in kinds:
        states = _state_sizes(parts, optimizer, block_bytes)
    if TensorKind.PARAMETER in kinds:
        parameters = movable_parameters(parts, lowering)
    graph = movable_graph(
        lowering.graph, parameters, states, repeated=planned.repeated, charged=False
    )
    return replace(lowering, graph=graph)


def state_bytes(graph: Graph) -> int:
    """Return the bytes of optimizer state in the graph."""
    return sum(t.size_bytes for t in graph.tensors if t.kind is TensorKind.OPTIMIZER_STATE)


def movable_parameters(parts: StepParts, lowering: Lowering) -> tuple[int, ...]:
    """Return the parameters' tensors that can move: each is a whole storage, of one parameter, that
    only its update changes."""
    named = dict(parts.module.named_parameters(remove_duplicate=False))
    holders = Counter(lowering.storages[one.node][0] for one in parts.captured.primals)
    users = Counter(
        storage_key(local_part(tensor).untyped_storage())
        for tensor in (*dict.fromkeys(named.values()), *parts.module.buffers())
    )
    changed = {parts.captured.primals[i].node for i in parts.mutated}
    given = {site.name for site in parts.sites if site.value is not None}
    changed |= {one.node for one in parts.captured.primals if one.name in given}
    found = []
    for primal in parts.captured.primals:
        parameter, index = named.get(primal.name), lowering.storages[primal.node][0]
        if parameter is None or index is None or primal.node in changed:
            continue
        own = local_part(parameter)
        alone = holders[index] == 1 and users[storage_key(own.untyped_storage())] == 1
        if alone and own.untyped_storage().nbytes() == own.nbytes:
            found.append(index)
    results = {*lowering.graph.outputs, *lowering.graph.gradients}
    read = {t for operator in lowering.graph.operators for t in operator.reads}
    return tuple(sorted((set(found) & read) - results))


def _state_sizes(
    parts: StepParts, optimizer: torch.optim.Optimizer, block_bytes: int
) -> dict[str, int]:
    """Map trained parameters → bytes of their state, if they have any."""
    named: dict[str, Any] = dict(parts.module.named_parameters(remove_duplicate=False))
    found = {}
    for site in parts.sites:
        parameter = named[site.name]
        listed = state_sizes(optimizer, group_of(optimizer, parameter), parameter)
        size = sum(in_blocks(one, block_bytes) for one in listed)
        if size or (listed and hasattr(parameter, SHARD)):  # other ranks' parts have elements
            found[site.name.removeprefix("model.")] = size
    return found


def movable_graph(
    graph: Graph,
    parameters: tuple[int, ...],
    states: dict[str, int],
    *,
    repeated: bool = False,
    charged: bool = True,
) -> Graph:
    """Return the graph with movable parameters, and its updates' states as movable tensors.

    Args:
        graph: a whole step's graph.
        parameters: indices of the parameters' tensors.
        states: parameter's name → bytes of its state.
        repeated: whether some tensors may stay on the device between steps.
        charged: whether the graph charges the states as resident bytes so far.
    """
    tensors, operators = list(graph.tensors), list(graph.operators)
    movable = [*parameters]
    position = {operator.name: i for i, operator in enumerate(operators)}
    for name, size in states.items():
        movable.append(len(tensors))
        tensors.append(Tensor(state_name(name), size, TensorKind.OPTIMIZER_STATE))
        index = position[f"update.{name}"]
        reads = (*operators[index].reads, movable[-1])
        operators[index] = replace(operators[index], reads=reads)
    less = sum(states.values()) if charged else 0
    return replace(
        graph,
        tensors=tuple(tensors),
        operators=tuple(operators),
        movable=tuple(movable),
        repeated=repeated,
        extra_resident_bytes=graph.extra_resident_bytes - less,
    )
