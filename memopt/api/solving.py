"""Making a plan: stages prepare the step, a strategy solves it, passes finish its program."""

from __future__ import annotations

import math
import time
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from memopt.api.finish import FinishedProgram, finish
from memopt.api.ranks import find_ranks, planned_by_first, planning_ranks, profiling_together
from memopt.api.recalled import noting_stops, recalled
from memopt.api.refusal import infeasible, unit_meant
from memopt.api.request import PlanRequest
from memopt.api.reserved import planned_within
from memopt.api.whole_step import (
    check_engine,
    check_movable,
    check_rules,
    left_on_host,
    takes_whole_step,
)
from memopt.errors import MemoptError
from memopt.models.bounds import time_lower_bound
from memopt.models.budget import (
    MINIMUM,
    Budget,
    WrittenBudget,
    check_budget,
    format_bytes,
    parse_budget,
)
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.garbage import full_collections_deferred
from memopt.models.graph import Graph
from memopt.models.options import Mode, PassOptions
from memopt.models.presets import find_device
from memopt.models.progress import Progress
from memopt.plan_record import BaselineFigures, PlanRecord
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.moved import resident_bytes_under
from memopt.programs.replay import replay
from memopt.reductions.stage_map import has_updates
from memopt.stages import STAGES, Preparation, prepared
from memopt.strategies import Solution, Strategy, resolve
from memopt.strategies.host_budget import host_limit, parse_host_budget, with_host_budget
from memopt.strategies.named_budgets import Planning
from memopt.strategies.target import Target

if TYPE_CHECKING:
    from memopt.reductions.chain_view import ChainView
    from memopt.step.profiled import Profiled

_LEAST_BYTES = 2**20
_NO_OPERATORS = (
    "order=True and place=True work on operators; of a Chain {} plans schedules: take a strategy "
    'that plans its operators, such as "monet", or plan the model itself'
)


def make_plan(model: Any, inputs: Any, wanted: PlanRequest) -> PlanRecord:
    """Prepare a model's step, or take a cost model as it is, and plan it; see `memopt.plan`."""
    if isinstance(model, (Chain, Graph, type)) or not hasattr(model, "named_modules"):
        return _made(model, inputs, wanted)
    from memopt.torch_private.engine_hooks import as_in_forward

    check_engine(model, wanted)
    with as_in_forward(model):
        found = find_ranks(model, inputs, wanted.pricing.mode)
        made = _made(model, inputs, wanted)
        del found  # held until here, to be used again
        return made


@full_collections_deferred()
def _made(model: Any, inputs: Any, wanted: PlanRequest) -> PlanRecord:
    limits, pricing = wanted.limits, wanted.pricing
    host_bytes = parse_host_budget(limits.host_budget)
    chosen = with_host_budget(resolve(wanted.strategy), host_bytes)
    if wanted.step.movable or wanted.step.steady_state:
        check_movable(wanted, chosen)
    check_budget(limits.budget, limits.time_limit_s)
    with reporting_on(wanted.progress) as report:
        device = planned_device(pricing.device, pricing.mode)
        check_rules(wanted, chosen)
        step = Preparation(
            model,
            inputs,
            chosen,
            device,
            wanted.step,
            pricing,
            takes_whole_step(chosen, wanted),
            report,
            place=wanted.passes.place,
            charges=wanted.charges,
            ranks=planning_ranks(model, pricing.mode),
            budget=limits.budget,
        )
        with profiling_together(step.ranks, model, inputs, wanted):
            step = prepared(STAGES, step)
            if wanted.step.offload_optimizer:
                host_bytes = left_on_host(host_bytes, step.profiled, whole_step=step.whole_step)
                chosen = with_host_budget(chosen, host_bytes)
        plan = _planned(step, chosen, host_bytes, wanted)
        _check_copies(plan, step)
        return plan


def _check_copies(plan: PlanRecord, step: Preparation) -> None:
    """Refuse a plan with transfers for a device that computes in the host's memory."""
    if step.profiled is None or not plan.program.has_transfers:
        return
    from memopt.step.backend import backend_of

    where = step.profiled.torch_device
    if not backend_of(where).copies:
        raise ValueError(
            f"this plan moves tensors to the host, but {where} computes in the host's own memory, "
            'where that frees nothing: plan with one that only recomputes, strategy="rotor"'
        )


def _planned(
    step: Preparation, strategy: Strategy, host_budget_bytes: int | None, wanted: PlanRequest
) -> PlanRecord:
    """Plan a prepared step."""
    profiled, budget, card_bytes = step.profiled, step.budget, None
    if budget is None and step.pricing.mode == "estimate":
        budget = card_bytes = step.device.capacity_bytes
    with _ending_at_ctrl_c(step.report) as stopping:
        stopped: list[str] = []
        report = noting_stops(stopping, stopped)
        solve_for = partial(
            solve,
            profiled.graph if profiled is not None else step.model,
            strategy=strategy,
            device=step.device,
            profiled=profiled,
            time_limit_s=wanted.limits.time_limit_s,
            progress=report,
            order=wanted.passes.order,
            place=wanted.passes.place,
            host_budget_bytes=host_budget_bytes,
        )

        def make() -> PlanRecord:
            within = partial(planned_within, solve_for, budget, step.charges, card_bytes)
            plan = planned_by_first(step.ranks, profiled, within)
            return replace(plan, notes=(*plan.notes, *stopped))

        return recalled(step, strategy, host_budget_bytes, wanted, make)


def budget_on(device: Device | str, budget: int | str | None) -> tuple[Device, int]:
    """Return a device to estimate for, and the bytes of it that may be used.

    Raises:
        ValueError: no capacity, or too few bytes for any model.
    """
    place = planned_device(device, "estimate")
    limit = place.capacity_bytes if budget is None else parse_budget(budget, 1)
    if limit is None:
        raise ValueError(f"the device {place.name!r} has no capacity_bytes: pass budget=")
    if limit < _LEAST_BYTES:
        meant = unit_meant(limit) or 'Name it with a unit, such as "24GiB".'
        raise ValueError(f"a budget of {limit} bytes holds no model. {meant.strip()}")
    return place, limit


def planned_device(device: Device | str | None, mode: Mode) -> Device:
    """Return the device that plan's and profile's arguments name.

    Raises:
        ValueError: an unknown name or mode, or an estimate for no device.
    """
    if mode not in ("measure", "estimate"):
        raise ValueError(f'mode is "measure" or "estimate", got {mode!r}')
    if isinstance(device, str):
        return find_device(device)
    if device is None and mode == "estimate":
        raise ValueError(
            'mode="estimate" needs the device to estimate for: device="H100" (or another preset), '
            "a memopt.Device, or memopt.measure_device() for this machine"
        )
    return device or Device()


@full_collections_deferred()
def solve(
    cost_model: Chain | Graph,
    budget: WrittenBudget,
    strategy: Strategy,
    *,
    device: Device,
    profiled: Profiled | None = None,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    view: ChainView | None = None,
    order: bool = False,
    place: bool = False,
    host_budget_bytes: int | None = None,
) -> PlanRecord:
    """Solve a cost model and finish the program; see `plan`. A caller that solves one graph often
    passes its `view`, so that it is made once."""
    began_s = time.monotonic()
    end_s = began_s + (math.inf if time_limit_s is None else time_limit_s)
    target = Target.of(strategy, cost_model, view)
    if (order or place) and target.bare_chain is not None:
        raise ValueError(_NO_OPERATORS.format(strategy.name))
    graph = target.graph
    baseline = baseline_figures(graph, profiled)
    reason = target.why_not()
    if reason is not None:
        raise ValueError(f"strategy {strategy.name!r} cannot plan this model: {reason}")

    def attempt(budget_bytes: int | None) -> Solution:
        # All attempts share the time.
        now_s = time.monotonic()
        return strategy.in_search(now_s - began_s).solve_from(
            known,
            target.solved,
            budget_bytes,
            device=device,
            time_limit_s=None if time_limit_s is None else max(0.0, end_s - now_s),
            progress=progress,
        )

    budget_bytes: int | None
    known: list[Program] = []
    attempts = Planning(target, device, attempt, end_s, known)
    if budget == MINIMUM:
        least = attempts.smallest()
        if least is None:
            raise MemoptError(
                f"{strategy.name} cannot tell its smallest budget: pass budget= in bytes"
            )
        budget_bytes, solution = least
    else:
        budget_bytes = parse_budget(budget, baseline.peak_bytes)
        solution = attempts.within(budget_bytes)
    target = target.resolved(solution)
    limit = Budget(budget_bytes, host_limit(strategy, host_budget_bytes))
    passes = PassOptions(order=order, place=place)
    finished = finish(target, solution, limit, device, passes, time_limit_s)
    if isinstance(finished, Solution):
        raise infeasible(finished, budget_bytes, strategy, target.graph, profiled)
    return finished_record(target, finished, limit, baseline, device, profiled)


def baseline_figures(graph: Graph, profiled: Profiled | None) -> BaselineFigures:
    """Return the figures without memopt: the profile's, or those of the graph's order replayed."""
    if profiled is not None:
        base = profiled.baseline
        return BaselineFigures(base.peak_bytes, base.step_time_s, base.measured)
    timeline = replay(graph, store_all(graph))
    return BaselineFigures(timeline.peak_bytes, timeline.time_s, False)


def finished_record(
    target: Target,
    finished: FinishedProgram,
    budget: Budget,
    baseline: BaselineFigures,
    device: Device,
    profiled: Profiled | None,
) -> PlanRecord:
    """Make the plan of a finished program."""
    graph, solution, program = target.graph, finished.solution, finished.program
    time_s, bound_s = finished.figures.time_s, solution.lower_bound_s
    return PlanRecord(
        status=solution.status,
        strategy=target.strategy,
        budget=budget.device_bytes,
        host_budget=budget.host_bytes,
        peak_bytes=finished.figures.peak_bytes,
        resident_bytes=resident_bytes_under(graph, program),
        step_time_s=time_s,
        lower_bound_s=min(time_s, time_lower_bound(graph) if bound_s is None else bound_s),
        baseline=baseline,
        device=device,
        program=program,
        chain_steps=solution.steps,
        graph=graph,
        chain=None if target.view is None else target.view.chain,
        is_of_chain=target.bare_chain is not None,
        host_peak_bytes=finished.figures.host_peak_bytes,
        compute_time_s=graph.compute_time_s,
        stats=solution.stats,
        stages=(*(() if profiled is None else profiled.stages), *finished.passes),
        notes=(*_notes(graph, profiled), *_link_notes(program, device)),
        profiled=profiled,
        record=None if profiled is None else profiled.record,
    )


def _notes(graph: Graph, profiled: Profiled | None) -> tuple[str, ...]:
    if profiled is None:
        return ()
    from memopt.capture.training_call import call_notes
    from memopt.profiler.session import checkpoint_notes, loss_notes
    from memopt.user_code.opaque_operators import opaque_notes

    notes = profiled.notes
    state = profiled.optimizer
    if state is not None and state.bytes_total > state.count_bytes:
        notes = (f"Resident: {format_bytes(state.bytes_total)} of {state.name} state.", *notes)
    covered = has_updates(graph) or graph.boundary_bytes > 0
    captured, model = profiled.captured, profiled.captured.model()
    of_call = () if model is None else call_notes(model, captured.call)
    of_call = (*checkpoint_notes(captured), *opaque_notes(captured.module), *of_call)
    return (*loss_notes(captured, covered=covered), *of_call, *notes)


def _link_notes(program: Program, device: Device) -> tuple[str, ...]:
    if not program.has_transfers or device.is_linked:
        return ()
    return (
        f"The link of the device {device.name!r} has no speed: transfers count as free. Give one "
        "(device=memopt.measure_device(), a preset such as 'A100', or a memopt.Device).",
    )


def reporting_on(progress: bool | Progress) -> AbstractContextManager[Progress]:
    """Open the progress report of planning: a bar on a terminal, or the user's callback."""
    from memopt.report.progress import reporting

    return reporting(progress)


def _ending_at_ctrl_c(report: Progress) -> AbstractContextManager[Progress]:
    from memopt.report.progress import ending_at_ctrl_c

    return ending_at_ctrl_c(report)
