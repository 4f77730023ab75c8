"""A plan for a model that was captured anew: is its graph the planned one, and does the plan hold?

What runs is checked against the graph that is built from the capture. Of a plan file's own graph
only the times are believed, and memory where it counts more; where the plan is within a budget and
was measured on such a device, every kernel's workspace and results are measured here, once.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from memopt.errors import InvalidProgramError, PlanFileError
from memopt.executor.out_variants import allocator_owned
from memopt.models.device import in_blocks
from memopt.models.graph import Graph, Phase
from memopt.models.same_graph import (
    as_captured,
    graph_difference,
    with_figures,
    without_implementations,
)
from memopt.profiler.backend import LARGEST_BLOCK_BYTES, backend_of, estimated_backend
from memopt.profiler.build import Lowering
from memopt.profiler.cache import ProfileCache
from memopt.profiler.capture import Captured
from memopt.profiler.measure import MeasureOptions, memory_of
from memopt.programs.instructions import Program
from memopt.programs.violations import Violation
from memopt.reductions.validate_and_replay import judge

if TYPE_CHECKING:
    from memopt.plan_record import PlanRecord


def planned_lowering(
    plan: PlanRecord,
    lowering: Lowering,
    captured: Captured,
    device: torch.device,
    more: str = "",
    update_bytes: dict[str, int] | None = None,
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
    assert plan.graph is not None
    assert plan.program is not None
    planned = plan.graph if lowering.alternatives else without_implementations(plan.graph)
    lowering = _with_scalars(plan, lowering, device)
    differs = graph_difference(planned, lowering.graph)
    if differs is not None:
        raise PlanFileError(f"this plan is not one of this model: {differs}. {again(plan, more)}")
    sizes: dict[int, int] = {}
    workspaces: dict[tuple[int, str | None], int] = {}
    if _is_measured_here(plan, device):
        sizes, workspaces = _measured(plan, lowering, captured, device)
        for index, operator in enumerate(lowering.graph.operators):
            if operator.name in (update_bytes or {}):
                workspaces[index, None] = (update_bytes or {})[operator.name]
    graph = with_figures(lowering.graph, planned, sizes, workspaces)
    if plan.program.offsets is not None:
        graph = replace(graph, allocator_owned=allocator_owned(replace(lowering, graph=graph)))
    _check_plan(plan, graph, more)
    return replace(lowering, graph=graph)


def _with_scalars(plan: PlanRecord, lowering: Lowering, device: torch.device) -> Lowering:
    """A lowering whose graph counts the scalars that every step holds, as priced graphs do."""
    block_bytes = plan.record.block_bytes if plan.record is not None else 1
    backend = estimated_backend(block_bytes) if block_bytes > 1 else backend_of(device)
    extra_bytes = lowering.graph.extra_resident_bytes + backend.step_scalars_bytes
    return replace(lowering, graph=replace(lowering.graph, extra_resident_bytes=extra_bytes))


def _check_plan(plan: PlanRecord, graph: Graph, more: str) -> None:
    """Validate and replay a plan's program on a graph.

    Raises:
        PlanFileError: it is not valid there, or not within the plan's budgets.
    """
    problem: Violation | Exception | str | None
    try:
        problem, _ = judge(graph, None, plan.program, plan.budget, plan.device, plan.host_budget)
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
    assert plan.program is not None
    operators = lowering.graph.operators
    run = {(run.op, run.implementation) for _, run in plan.program.computes}
    calls: list[tuple[int, str | None]] = []
    nodes: list[Node] = []
    for op, name in sorted(run, key=lambda pair: (pair[0], pair[1] or "")):
        known = 0 <= op < len(operators) and operators[op].phase is not Phase.UPDATE
        if known and (name is None or (op, name) in lowering.alternatives):
            calls.append((op, name))
            nodes.append(lowering.node_of(op, name))
    options = MeasureOptions(cache=ProfileCache())
    sizes: dict[int, int] = {}
    workspaces: dict[tuple[int, str | None], int] = {}
    for call, node, cost in zip(
        calls, nodes, memory_of(nodes, device, options, captured), strict=True
    ):
        workspaces[call] = cost.workspace_bytes
        held = [t for t in lowering.storages[node] if t is not None]
        if len(held) == len(cost.output_bytes) and call[1] is None:
            written = operators[call[0]].writes
            sizes |= {t: n for t, n in zip(held, cost.output_bytes, strict=True) if t in written}
    return sizes, workspaces


def where_graphs_differ(plan: PlanRecord, captured: Graph) -> str:
    """For messages: where a captured graph first differs from the planned one, if that is found."""
    assert plan.graph is not None
    resized = plan.record.resized if plan.record is not None else ()
    where = graph_difference(as_captured(plan.graph, resized), captured)
    return "" if where is None else f": {where}"


def again(plan: PlanRecord, more: str = "") -> str:
    """How to plan again, for messages; `more`: arguments beside the inputs, each with a comma."""
    return (
        f"Plan again: memopt.plan(model, inputs, {more}budget={plan.budget}, "
        f"strategy={plan.strategy.name!r})"
    )
