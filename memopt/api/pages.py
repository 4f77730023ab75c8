"""Making the pages about plans and comparisons from their records."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from memopt.api.solving import solve
from memopt.api.spread import budgets_between, enough_bytes
from memopt.comparison_record import CellRecord, ComparisonRecord
from memopt.errors import MemoptError
from memopt.models.budget import MINIMUM, WrittenBudget
from memopt.models.chain import Chain
from memopt.models.graph import Graph
from memopt.models.progress import Progress
from memopt.plan_record import PlanRecord
from memopt.report.page.data import Subject
from memopt.report.page.document import Page
from memopt.strategies import Status, Strategy, resolve
from memopt.strategies.target import chain_view

if TYPE_CHECKING:
    from memopt.reductions.chain_view import ChainView
    from memopt.report.lanes import StepLanes
    from memopt.report.step_check import StepCheck

NEARBY_LIMIT_S = 60.0
"""After so many seconds a plan's page plans no further plans, and says so."""


def page_of_plan(
    plan: PlanRecord,
    *,
    points: int,
    progress: Progress,
    title: str | None = None,
    measured: StepLanes | None = None,
    check: StepCheck | None = None,
) -> Page:
    """Make a plan's page (see `Plan.report`); `measured` and `check` are a recorded step's.

    Raises:
        ValueError: `points` is 1 or negative.
    """
    if points < 0 or points == 1:
        raise ValueError(f"report: points must be 0 or at least 2, got {points}")
    cells = [CellRecord.of(plan.strategy.name, plan, 0.0)]
    notes: tuple[str, ...] = ()
    if points:
        found, notes = _nearby(plan, points, progress)
        cells += found
    comparison = ComparisonRecord(tuple(cells), plan.baseline, plan.compute_time_s)
    return Page(_subject(comparison, plan, title, notes, measured, check))


def page_of_comparison(
    comparison: ComparisonRecord[CellRecord], opened: PlanRecord | None, title: str | None = None
) -> Page:
    """Make a comparison's page (see `Comparison.report`).

    Raises:
        ValueError: the comparison has no plan.
    """
    if opened is None:
        raise ValueError("report: no cell of this comparison has a plan; raise the budgets")
    return Page(_subject(comparison, opened, title))


def _subject(
    comparison: ComparisonRecord[CellRecord],
    opened: PlanRecord,
    title: str | None,
    notes: tuple[str, ...] = (),
    measured: StepLanes | None = None,
    check: StepCheck | None = None,
) -> Subject:
    optimizer = None if opened.profiled is None else opened.profiled.optimizer
    return Subject(
        title=title or _name(opened),
        comparison=comparison,
        opened=opened,
        texts=_texts(opened),
        optimizer_parts=() if optimizer is None else optimizer.parts,
        savings=_savings(opened),
        measured=measured,
        check=check,
        notes=notes,
    )


def _name(plan: PlanRecord) -> str:
    if plan.record is not None:
        return plan.record.model.rpartition(".")[2]
    return "chain" if plan.is_of_chain else "graph"


def _texts(plan: PlanRecord) -> Mapping[int, str]:
    """Map tensors to dtype and shape: from the captured graph, or else from the plan's file."""
    if plan.profiled is not None:
        from memopt.step.tensor_texts import tensor_texts

        return tensor_texts(plan.profiled.lowering)
    if plan.record is None:
        return {}
    known = {name: f"{spec.dtype} {list(spec.shape)}" for name, spec in plan.record.tensors}
    tensors = enumerate(plan.graph.tensors)
    return {i: known[tensor.name] for i, tensor in tensors if tensor.name in known}


def _savings(plan: PlanRecord) -> tuple[tuple[str, int], ...]:
    """List optimizers with less state than the planned one, and the bytes that they free."""
    if plan.profiled is None or plan.profiled.optimizer is None or plan.record is None:
        return ()
    import torch

    from memopt.step.optimizer_state import smaller_states

    state = plan.profiled.optimizer
    trained = [
        torch.empty(spec.shape, dtype=getattr(torch, spec.dtype), device="meta", requires_grad=True)
        for _, spec in plan.record.tensors
        if spec.requires_grad
    ]
    smaller = smaller_states(state, trained, plan.record.block_bytes)
    return tuple((f"{name} instead of {state.name}", size) for name, size in smaller)


def _nearby(
    plan: PlanRecord, points: int, progress: Progress
) -> tuple[list[CellRecord], tuple[str, ...]]:
    """Plan with the plan's strategy at `points` budgets, from its smallest to what suffices without
    a plan, and once without recomputation. Return the cells, and a note if some were left out."""
    deadline = time.monotonic() + NEARBY_LIMIT_S
    cost_model = plan.chain if plan.is_of_chain and plan.chain is not None else plan.graph
    view = chain_view(cost_model)
    cells: list[CellRecord] = []
    wanted: list[tuple[Strategy, WrittenBudget]] = [(plan.strategy, MINIMUM)]
    plain = resolve("store-all")
    try:
        while wanted:
            strategy, budget = wanted.pop(0)
            progress(len(cells) / (points + 1), f"{strategy.name}: plans beside this one")
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return cells, (_left_out(len(cells), points, "time ran out"),)
            cells.append(_cell(plan, cost_model, view, strategy, budget, left_s))
            if budget == MINIMUM:
                floor = cells[0].peak_bytes or plan.peak_bytes
                above = budgets_between(floor, enough_bytes(plan.graph, plan.baseline), points)
                wanted = [*((plan.strategy, one) for one in above[1:]), (plain, None)]
    except KeyboardInterrupt:
        return cells, (_left_out(len(cells), points, "interrupted"),)
    return cells, ()


def _left_out(made: int, points: int, why: str) -> str:
    return f"Beside this plan, {made} of {points + 1} were made: {why}."


def _cell(
    plan: PlanRecord,
    cost_model: Chain | Graph,
    view: ChainView,
    strategy: Strategy,
    budget: WrittenBudget,
    time_limit_s: float,
) -> CellRecord:
    """Plan the same step with another strategy or budget, and this plan's other settings."""
    begin = time.perf_counter()
    try:
        made = solve(
            cost_model,
            budget,
            strategy,
            device=plan.device,
            profiled=plan.profiled,
            time_limit_s=time_limit_s,
            view=view,
            order=plan.ran("order"),
            place=plan.ran("place"),
            host_budget_bytes=plan.host_budget,
        )
    except (MemoptError, ValueError) as error:
        spent_s = time.perf_counter() - begin
        bytes_ = budget if isinstance(budget, int) else None
        return CellRecord(strategy.name, bytes_, Status.UNKNOWN, spent_s, note=str(error))
    # A plan from a file keeps the baseline of its planning.
    made = replace(made, baseline=plan.baseline)
    return CellRecord.of(strategy.name, made, time.perf_counter() - begin)
