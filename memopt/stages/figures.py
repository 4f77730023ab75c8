"""A plan's figures for a step that is captured again.

The program is checked against the graph that is built from the capture. A plan file's own graph is
trusted for times, and for memory where it counts more. If the plan has a budget and was measured on
this kind of device, each kernel's workspace and results are measured here, once.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from memopt.errors import PlanFileError
from memopt.models.budget import format_bytes
from memopt.models.graph import Graph, Phase
from memopt.models.same_graph import graph_difference, with_figures, without_implementations
from memopt.pricing.cache import ProfileCache
from memopt.pricing.measure import MeasureOptions, costs_of
from memopt.pricing.updates import update_costs
from memopt.stages.base import Recapture
from memopt.step.backend import backend_of, estimated_backend
from memopt.step.build import Lowering
from memopt.step.movable import state_bytes
from memopt.step.optimizer_state import optimizer_state
from memopt.step.signature import signature
from memopt.step.step_parts import update_name


def with_planned_figures(step: Recapture) -> Recapture:
    """Price a captured step with the figures of the plan's graph.

    Raises:
        PlanFileError: the graphs differ, or the optimizer keeps other state than planned.
    """
    plan = step.plan
    update_bytes: dict[str, int] = {}
    if step.made.parts is not None:
        step, update_bytes = _with_optimizer_state(step)
    lowering = step.made.lowering
    planned = plan.graph if lowering.alternatives else without_implementations(plan.graph)
    # Priced graphs count the scalars that every step holds; the captured one does not yet.
    block_bytes = plan.record.block_bytes if plan.record is not None else 1
    backend = estimated_backend(block_bytes) if block_bytes > 1 else backend_of(step.device)
    extra_bytes = lowering.graph.extra_resident_bytes + backend.step_scalars_bytes
    lowering = replace(lowering, graph=replace(lowering.graph, extra_resident_bytes=extra_bytes))
    differs = graph_difference(planned, lowering.graph)
    if differs is not None:
        raise PlanFileError(f"this plan is not one of this model: {differs}. {step.plan_again()}")
    sizes: dict[int, int] = {}
    workspaces: dict[tuple[int, str | None], int] = {}
    if _is_measured_here(step):
        sizes, workspaces = _measured(step, lowering)
        for index, operator in enumerate(lowering.graph.operators):
            if operator.name in update_bytes:
                workspaces[index, None] = update_bytes[operator.name]
    graph = with_figures(lowering.graph, planned, sizes, workspaces)
    return step.lowered(replace(lowering, graph=graph))


def _with_optimizer_state(step: Recapture) -> tuple[Recapture, dict[str, int]]:
    """Find the optimizer's state on the device and on the host.

    Returns:
        The step with this state, and the workspace bytes of each update measured here.

    Raises:
        PlanFileError: the plan is for another amount of state than the optimizer keeps.
    """
    plan, found = step.plan, step.made
    parts, optimizer = found.parts, step.optimizer
    assert plan.record is not None
    assert parts is not None
    assert optimizer is not None
    state = optimizer_state(optimizer, step.model.parameters(), plan.record.block_bytes)
    own_bytes = backend_of(step.device).step_scalars_bytes + plan.record.library_bytes
    own_bytes += found.lowering.graph.extra_resident_bytes
    stays_bytes = plan.graph.extra_resident_bytes - own_bytes
    moved_bytes = state_bytes(found.lowering.graph)
    apart_bytes = state.bytes_total - moved_bytes
    if plan.record.ranks > 1 and stays_bytes > apart_bytes:
        stays_bytes = apart_bytes  # the plan's are those of the rank with the largest shards
    hosted_bytes = apart_bytes - stays_bytes
    in_one_place = stays_bytes in (state.count_bytes, apart_bytes)
    if not in_one_place or hosted_bytes > _update_bytes(plan.graph):
        raise PlanFileError(
            f"this plan is for {format_bytes(stays_bytes)} of optimizer state, and this "
            f"{state.name} keeps {format_bytes(state.bytes_total)}. {step.plan_again()}"
        )
    found = replace(
        found,
        state=replace(state, bytes_total=stays_bytes),
        host_state_bytes=hosted_bytes,
        movable_state_bytes=moved_bytes,
    )
    update_bytes: dict[str, int] = {}
    if plan.budget is not None:
        options = MeasureOptions(cache=ProfileCache())
        costs = update_costs(parts, optimizer, step.device, hosted_bytes > 0, options)
        known = [site for site in parts.sites if site.name in costs]
        update_bytes = {update_name(site): costs[site.name][1] for site in known}
    return replace(step, found=found), update_bytes


def _update_bytes(graph: Graph) -> int:
    """Sum the updates' workspaces, which include the state that they bring from the host."""
    return sum(one.workspace_bytes for one in graph.operators if one.phase is Phase.UPDATE)


def _is_measured_here(step: Recapture) -> bool:
    """Whether the plan is from a file, has a budget, and was measured on this kind of device."""
    plan = step.plan
    if plan.profiled is not None or plan.record is None or plan.budget is None:
        return False
    same = plan.record.block_bytes == backend_of(step.device).block_bytes
    return plan.baseline.measured and same


def _measured(
    step: Recapture, lowering: Lowering
) -> tuple[dict[int, int], dict[tuple[int, str | None], int]]:
    """Measure the sizes of tensors, and the workspaces of the kernels that the program runs."""
    operators = lowering.graph.operators
    run = {(run.op, run.implementation) for _, run in step.plan.program.computes}
    calls = [
        (op, name)
        for op, name in sorted(run, key=lambda pair: (pair[0], pair[1] or ""))
        if 0 <= op < len(operators) and operators[op].phase is not Phase.UPDATE
        if name is None or (op, name) in lowering.alternatives
    ]
    nodes: list[Node] = [lowering.node_of(*call) for call in calls]
    options = MeasureOptions(cache=ProfileCache())
    sizes: dict[int, int] = {}
    workspaces: dict[tuple[int, str | None], int] = {}
    signatures = list(map(signature, nodes))
    captured = step.made.captured
    costs = costs_of(signatures, step.device, options, captured=captured, timed=False)
    for (op, name), cost in zip(calls, costs, strict=True):
        workspaces[op, name] = cost.workspace_bytes
        if len(operators[op].writes) == len(cost.output_bytes) and name is None:
            sizes |= dict(zip(operators[op].writes, cost.output_bytes, strict=True))
    return sizes, workspaces
