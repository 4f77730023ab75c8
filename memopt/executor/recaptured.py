"""A plan for a model, or a whole step, that was captured anew: is its graph the planned one, and
does the plan hold?

What runs is checked against the graph that is built from the capture. Of a plan file's own graph
only the times are believed, and memory where it counts more; where the plan is within a budget and
was measured on such a device, every kernel's workspace and results are measured here, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import Node

from memopt.errors import InvalidProgramError, PlanFileError
from memopt.executor.out_variants import allocator_owned
from memopt.models.budget import Budget, format_bytes
from memopt.models.device import in_blocks
from memopt.models.graph import Graph, Phase
from memopt.models.record import difference
from memopt.models.same_graph import (
    as_captured,
    graph_difference,
    with_figures,
    without_implementations,
)
from memopt.profiler.backend import LARGEST_BLOCK_BYTES, backend_of, estimated_backend
from memopt.profiler.baseline import Baseline, Loss
from memopt.profiler.build import Lowering
from memopt.profiler.cache import ProfileCache
from memopt.profiler.capture import Captured
from memopt.profiler.compiled.choice import planned_kernels
from memopt.profiler.host_updates import as_planned, lowered
from memopt.profiler.input_errors import diagnosed
from memopt.profiler.inputs import Call, device_of
from memopt.profiler.measure import MeasureOptions, costs_of
from memopt.profiler.movable import movable_as_planned, state_bytes
from memopt.profiler.optimizer_state import OptimizerState, optimizer_state
from memopt.profiler.record import example_call, record_of
from memopt.profiler.signature import signature
from memopt.profiler.step_capture import StepModule, capture_step, update_name, with_updates
from memopt.profiler.step_optimizer import check_splittable
from memopt.profiler.step_session import ProfiledStep, update_costs
from memopt.programs.instructions import Program
from memopt.programs.serialize import fingerprint
from memopt.programs.violations import Violation
from memopt.reductions.stage_map import has_updates
from memopt.reductions.validate_and_replay import validate_and_replay

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


def planned_lowering(
    plan: PlanRecord,
    lowering: Lowering,
    captured: Captured,
    device: torch.device,
    more: str = "",
    update_bytes: Mapping[str, int] = MappingProxyType({}),
) -> Lowering:
    """The lowering of a model that was captured anew, its graph with the plan's figures; the
    program is valid for that graph and within the budget.

    Args:
        plan: with a graph and a program.
        lowering: of the captured model, with the alternatives that the plan knows.
        captured: the model.
        device: where it is.
        more: for messages, see `again`.
        update_bytes: operator → workspace of each update, measured here.

    Raises:
        PlanFileError: the graphs differ, or the plan does not hold; the message says where.
    """
    planned = plan.graph if lowering.alternatives else without_implementations(plan.graph)
    # The scalars that every step holds, as priced graphs count them.
    block_bytes = plan.record.block_bytes if plan.record is not None else 1
    backend = estimated_backend(block_bytes) if block_bytes > 1 else backend_of(device)
    extra_bytes = lowering.graph.extra_resident_bytes + backend.step_scalars_bytes
    lowering = replace(lowering, graph=replace(lowering.graph, extra_resident_bytes=extra_bytes))
    differs = graph_difference(planned, lowering.graph)
    if differs is not None:
        raise PlanFileError(f"this plan is not one of this model: {differs}. {again(plan, more)}")
    sizes: dict[int, int] = {}
    workspaces: dict[tuple[int, str | None], int] = {}
    if _is_measured_here(plan, device):
        sizes, workspaces = _measured(plan, lowering, captured, device)
        for index, operator in enumerate(lowering.graph.operators):
            if operator.name in update_bytes:
                workspaces[index, None] = update_bytes[operator.name]
    graph = with_figures(lowering.graph, planned, sizes, workspaces)
    if plan.program.offsets is not None:
        graph = replace(graph, allocator_owned=allocator_owned(replace(lowering, graph=graph)))
    _check_plan(plan, graph, more)
    return replace(lowering, graph=graph)


def _check_plan(plan: PlanRecord, graph: Graph, more: str) -> None:
    """Validate and replay a plan's program on a graph.

    Raises:
        PlanFileError: it is not valid there, or not within the plan's budgets.
    """
    problem: Violation | Exception | str | None
    try:
        budget = Budget(plan.budget, plan.host_budget)
        problem, _ = validate_and_replay(graph, plan.program, budget, plan.device)
    except (InvalidProgramError, IndexError) as error:
        problem = error
    if problem is None and _wasteful(graph, plan.program):
        problem = "its addresses leave more room than all its tensors together need"
    if problem is not None:
        raise PlanFileError(
            f"this plan does not hold for this model: {problem}. {again(plan, more)}"
        )


def _wasteful(graph: Graph, program: Program | None) -> bool:
    """Whether an arena is larger than any placement of its tensors has to be."""
    rows = (program.offsets or ()) if program is not None else ()
    sizes = [graph.tensors[tensor].size_bytes for _, tensor, _ in rows]
    ends = [offset + size for (_, _, offset), size in zip(rows, sizes, strict=True)]
    # Blocks of every allocator, CUDA's included.
    return max(ends, default=0) > sum(in_blocks(size, LARGEST_BLOCK_BYTES) for size in sizes)


def _is_measured_here(plan: PlanRecord, device: torch.device) -> bool:
    """Whether the plan's memory is that of this kind of device, and somebody relies on it."""
    record = plan.record
    if plan.profiled is not None or record is None or plan.budget is None:
        return False
    same = record.block_bytes == backend_of(device).block_bytes
    return plan.baseline.measured and same


def _measured(
    plan: PlanRecord, lowering: Lowering, captured: Captured, device: torch.device
) -> tuple[dict[int, int], dict[tuple[int, str | None], int]]:
    """Sizes of tensors, and workspaces of the kernels that the program runs."""
    operators = lowering.graph.operators
    run = {(run.op, run.implementation) for _, run in plan.program.computes}
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
    costs = costs_of(signatures, device, options, captured=captured, timed=False)
    for (op, name), cost in zip(calls, costs, strict=True):
        workspaces[op, name] = cost.workspace_bytes
        if len(operators[op].writes) == len(cost.output_bytes) and name is None:
            sizes |= dict(zip(operators[op].writes, cost.output_bytes, strict=True))
    return sizes, workspaces


def where_graphs_differ(plan: PlanRecord, captured: Graph) -> str:
    """For messages: where a captured graph first differs from the planned one, if that is found."""
    resized = plan.record.resized if plan.record is not None else ()
    where = graph_difference(as_captured(plan.graph, resized), captured)
    return "" if where is None else f": {where}"


def again(plan: PlanRecord, more: str = "") -> str:
    """How to plan again, for messages; `more`: arguments beside the inputs, each with a comma."""
    return (
        f"Plan again: memopt.plan(model, inputs, {more}budget={plan.budget}, "
        f"strategy={plan.strategy.name!r})"
    )


_OF_A_STEP = "loss_fn=..., targets=..., optimizer=..., whole_step=True, "


def with_step(
    plan: PlanRecord, model: nn.Module, loss_fn: Any, optimizer: torch.optim.Optimizer
) -> PlanRecord:
    """The plan with its step captured from `model`; as it is unless it comes from a file and is of
    a whole step.

    Raises:
        PlanFileError: model, mode, loss or optimizer are not the planned ones; the message says
            what differs.
        ValueError: the optimizer cannot be split.
    """
    record, graph = plan.record, plan.graph
    if plan.profiled is not None or record is None or graph is None or not has_updates(graph):
        return plan
    check_splittable(optimizer, model)
    call = example_call(record)
    loss = Loss(loss_fn, call.args[0])
    user_call = Call(call.args[1:], call.kwargs)
    device = device_of(model, call)
    module = StepModule(model, loss_fn)
    differs = difference(record, record_of(module, call, device))
    block_bytes, rules = record.block_bytes, record.rules
    if differs is None:
        with diagnosed(model, user_call, loss):
            fuse = planned_kernels(record, device, block_bytes)
            parts = capture_step(model, user_call, loss, optimizer, block_bytes, fuse, rules)
        captured, lowering = with_updates(parts, parts.lowering, {})
        lowering = movable_as_planned(parts, lowering, graph, optimizer, block_bytes)
        if fingerprint(lowering.graph) != record.fingerprint:
            differs = (
                "the captured steps differ (another loss, trained parameters or their order; "
                f"planned with torch {record.torch_version}, this is {torch.__version__})"
            ) + where_graphs_differ(plan, lowering.graph)
    if differs is not None:
        raise PlanFileError(
            f"this plan is for another step: {differs.replace('model.', '')}. "
            + again(plan, _OF_A_STEP)
        )
    state = optimizer_state(optimizer, model.parameters(), block_bytes)
    own_bytes = backend_of(device).step_scalars_bytes + record.library_bytes
    own_bytes += lowering.graph.extra_resident_bytes
    stays_bytes = graph.extra_resident_bytes - own_bytes
    hosted_bytes = _hosted_bytes(plan, graph, state, stays_bytes)
    update_bytes = {}
    if plan.budget is not None:
        costs = update_costs(parts, optimizer, device, hosted=hosted_bytes > 0)
        known = [site for site in parts.sites if site.name in costs]
        update_bytes = {update_name(site): costs[site.name][1] for site in known}
    lowering = lowered(lowering, as_planned(graph))
    lowering = planned_lowering(plan, lowering, captured, device, _OF_A_STEP, update_bytes)
    base = plan.baseline
    profiled = ProfiledStep(
        lowering.graph,
        lowering,
        captured,
        Baseline(base.peak_bytes, base.step_time_s, base.measured),
        device,
        record=record,
        optimizer=replace(state, bytes_total=stays_bytes),
        parts=parts,
        user_call=user_call,
        host_state_bytes=hosted_bytes,
        movable_state_bytes=state_bytes(graph),
    )
    return replace(plan, profiled=profiled)


def _hosted_bytes(plan: PlanRecord, graph: Graph, state: OptimizerState, stays_bytes: int) -> int:
    """Bytes of optimizer state that updates bring themselves, if `stays_bytes` never move.

    Raises:
        PlanFileError: the plan is for other state than the optimizer keeps.
    """
    apart_bytes = state.bytes_total - state_bytes(graph)
    hosted_bytes = apart_bytes - stays_bytes
    if stays_bytes not in (0, apart_bytes) or hosted_bytes > _update_bytes(graph):
        raise PlanFileError(
            f"this plan is for {format_bytes(stays_bytes)} of optimizer state, and this "
            f"{state.name} keeps {format_bytes(state.bytes_total)}. {again(plan, _OF_A_STEP)}"
        )
    return hosted_bytes


def _update_bytes(graph: Graph) -> int:
    """Workspaces of all updates: state that is on the host between them is charged there."""
    return sum(one.workspace_bytes for one in graph.operators if one.phase is Phase.UPDATE)
