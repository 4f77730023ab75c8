"""The way of a plan: profile, solve, finish, validate, replay, wrap."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from memopt.api.ranks import agreed_on, planned_by_first, planning_ranks, profiling_together
from memopt.api.refusal import infeasible
from memopt.api.reserved import planned_within
from memopt.api.whole_step import check_movable, check_rules, left_on_host, takes_whole_step
from memopt.errors import InvalidProgramError, MemoptError
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
from memopt.models.charges import NO_CHARGES, Charges
from memopt.models.device import Device
from memopt.models.garbage import full_collections_put_off
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.models.step_rules import PLAIN, StepRules
from memopt.plan_record import BaselineFigures, PlanRecord
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.moved import resident_bytes_under
from memopt.programs.replay import replay
from memopt.reductions.stage_map import has_updates
from memopt.strategies import Progress, Solution, Strategy, resolve
from memopt.strategies.host_budget import host_limit, parse_host_budget, with_host_budget
from memopt.strategies.named_budgets import Planning
from memopt.strategies.target import Target

if TYPE_CHECKING:
    from memopt.profiler.session import Profiled
    from memopt.reductions.chain_view import ChainView

_NO_OPERATORS = (
    "order=True and place=True work on the operators of a graph; a Chain has none: plan "
    "the model itself or its Graph (strategies for chains take those, too)"
)

Mode: TypeAlias = Literal["measure", "estimate"]
Returns: TypeAlias = Literal["all", "loss"]


@dataclass(frozen=True)
class PlanRequest:
    """What `memopt.plan` is asked for beside the model and its inputs; its arguments, which see.
    `charges`: of the loop around a wrapped model."""

    budget: WrittenBudget = None
    strategy: str | Strategy = "rotor"
    host_budget: int | str | None = None
    loss_fn: Callable[..., Any] | None = None
    targets: tuple[Any, ...] = ()
    device: Device | str | None = None
    mode: Mode = "measure"
    optimizer: Any = None
    order: bool = False
    place: bool = False
    whole_step: bool | None = None
    offload_optimizer: bool = False
    movable: str | tuple[str, ...] = ()
    steady_state: bool = False
    accumulate: bool = False
    charges: Charges = NO_CHARGES
    rules: StepRules = PLAIN
    time_limit_s: float | None = None
    cache: bool = True
    progress: bool | Progress = True
    returns: Returns = "all"
    kernels: str = "aten"


def parse_returns(returns: str) -> Returns:
    """A user's `returns=`.

    Raises:
        ValueError: it is neither "all" nor "loss".
    """
    if returns not in ("all", "loss"):
        raise ValueError(f'returns= is "all" or "loss", got {returns!r}')
    return "loss" if returns == "loss" else "all"


@full_collections_put_off()
def make_plan(model: Any, inputs: Any, wanted: PlanRequest) -> PlanRecord:
    """Profile a model, if it is one, and plan its step; see `memopt.plan`."""
    host_bytes = parse_host_budget(wanted.host_budget)
    chosen = with_host_budget(resolve(wanted.strategy), host_bytes)
    if wanted.movable or wanted.steady_state:
        check_movable(wanted, chosen)
    check_budget(wanted.budget, wanted.time_limit_s)
    with reporting_on(wanted.progress) as report:
        target = planned_device(wanted.device, wanted.mode)
        check_rules(wanted, chosen)
        whole = takes_whole_step(chosen, wanted)
        ranks = planning_ranks(model, wanted.mode)
        with profiling_together(ranks, model, inputs, wanted):
            profiled = profiled_for(model, inputs, _priced(wanted, target, whole), report)
            if wanted.accumulate or wanted.charges:
                from memopt.profiler.accumulation import beside

                profiled = beside(profiled, wanted.accumulate, wanted.charges, whole_step=whole)
            if wanted.movable:
                from memopt.profiler.movable import with_movable

                host = target if chosen.features.host_updates else None
                profiled = with_movable(
                    profiled, wanted.optimizer, wanted.movable, host, repeated=wanted.steady_state
                )
            if wanted.offload_optimizer:
                host_bytes = left_on_host(host_bytes, profiled, whole_step=whole)
                chosen = with_host_budget(chosen, host_bytes)
            profiled = _extended(profiled, chosen, wanted, target)
            profiled, budget = agreed_on(ranks, profiled, wanted.budget)
        cost_model = profiled.graph if profiled is not None else model
        if budget is None and wanted.mode == "estimate":
            budget = target.capacity_bytes
        with _ending_at_ctrl_c(report) as told:
            solve_for = partial(
                solve,
                cost_model,
                strategy=chosen,
                device=target,
                profiled=profiled,
                time_limit_s=wanted.time_limit_s,
                progress=told,
                order=wanted.order,
                place=wanted.place,
                host_budget_bytes=host_bytes,
            )
            return planned_by_first(
                ranks, profiled, lambda: planned_within(solve_for, budget, wanted.charges)
            )


def _extended(
    profiled: Profiled | None, chosen: Strategy, wanted: PlanRequest, target: Device
) -> Profiled | None:
    """The profile with what the strategy may choose from."""
    if profiled is not None and chosen.features.implementations:
        from memopt.implementations import for_plan

        profiled = for_plan(
            profiled,
            chosen.only_exact_implementations(),
            target if wanted.mode == "estimate" else None,
            wanted.cache,
        )
    if profiled is not None and (wanted.place or chosen.features.place):
        from memopt.executor.out_variants import for_placing

        profiled = for_placing(profiled)
    return profiled


@dataclass(frozen=True)
class Request:
    """How a module is to be profiled."""

    loss_fn: Callable[..., Any] | None
    targets: tuple[Any, ...]
    mode: Mode
    device: Device
    optimizer: Any
    cache: bool
    whole_step: bool = False
    offload_optimizer: bool = False
    returns: Returns = "all"
    kernels: str = "aten"
    rules: StepRules = PLAIN


def _priced(wanted: PlanRequest, target: Device, whole: bool) -> Request:
    return Request(
        wanted.loss_fn,
        wanted.targets,
        wanted.mode,
        target,
        wanted.optimizer,
        wanted.cache,
        whole,
        whole and wanted.offload_optimizer,
        parse_returns(wanted.returns),
        wanted.kernels,
        wanted.rules,
    )


def planned_device(device: Device | str | None, mode: Mode) -> Device:
    """The device of plan's and profile's arguments.

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


def profiled_for(model: Any, inputs: Any, request: Request, report: Progress) -> Profiled | None:
    """A module profiled as requested; None for a cost model, which needs no profile.

    Raises:
        ValueError: neither, or arguments that do not go together.
    """
    if isinstance(model, (Chain, Graph)):
        module_only = (inputs, request.loss_fn, request.optimizer)
        if any(value is not None for value in module_only):
            raise ValueError("inputs, loss_fn and optimizer go with a module, not a cost model")
        return None
    from memopt.profiler import profiled_of

    return profiled_of(
        model,
        inputs,
        loss_fn=request.loss_fn,
        targets=request.targets,
        optimizer=request.optimizer,
        estimate_for=request.device if request.mode == "estimate" else None,
        cache=request.cache,
        whole_step=request.whole_step,
        offload_optimizer=request.offload_optimizer,
        loss_alone=request.returns == "loss",
        kernels=request.kernels,
        rules=request.rules,
        progress=report,
    )


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
    """Solve, validate, replay and wrap; see `plan`. A caller with many solves of one graph passes
    its `view`, to have it made once."""
    if (order or place) and isinstance(cost_model, Chain):
        raise ValueError(_NO_OPERATORS)
    target = Target.of(strategy, cost_model, view)
    graph = target.graph
    baseline = baseline_figures(graph, profiled)
    reason = target.why_not()
    if reason is not None:
        raise ValueError(f"strategy {strategy.name!r} cannot plan this model: {reason}")

    def attempt(budget_bytes: int | None) -> Solution:
        return strategy.solve(
            target.solved,
            budget_bytes,
            device=device,
            time_limit_s=time_limit_s,
            progress=progress,
        )

    budget_bytes: int | None
    attempts = Planning(target, device, attempt)
    if budget == MINIMUM:
        least = attempts.smallest()
        if least is None:
            raise MemoptError(f"{strategy.name} does not know its smallest budget; name one")
        budget_bytes, solution = least
    else:
        budget_bytes = parse_budget(budget, baseline.peak_bytes)
        solution = attempts.within(budget_bytes)
    limit = Budget(budget_bytes, host_limit(strategy, host_budget_bytes))
    if order or place:
        from memopt.strategies.olla.order_and_place import ordered_and_placed

        lower = target.view.lower if target.view is not None else None
        passes = {"order": order, "place": place}
        solution = ordered_and_placed(graph, solution, lower, limit, device, passes, time_limit_s)
    if not solution.plans:
        raise infeasible(solution, budget_bytes, strategy, graph, profiled)
    return _wrap(target, solution, limit, baseline, device, profiled)


def baseline_figures(graph: Graph, profiled: Profiled | None) -> BaselineFigures:
    """The step without memopt: the profile's, or the graph's own order replayed."""
    if profiled is not None:
        base = profiled.baseline
        return BaselineFigures(base.peak_bytes, base.step_time_s, base.measured)
    timeline = replay(graph, store_all(graph))
    return BaselineFigures(timeline.peak_bytes, timeline.time_s, False)


def _wrap(
    target: Target,
    solution: Solution,
    budget: Budget,
    baseline: BaselineFigures,
    device: Device,
    profiled: Profiled | None,
) -> PlanRecord:
    """The plan of a solution."""
    graph, strategy = target.graph, target.strategy
    program = target.program(solution, budget.device_bytes, device)
    assert program is not None
    violation, figures = target.check(program, budget, device)
    peak_bytes, time_s = figures.peak_bytes, figures.time_s
    if violation is not None:
        raise InvalidProgramError(f"{strategy.name} made an invalid plan: {violation}")
    bound_s = solution.lower_bound_s
    return PlanRecord(
        status=solution.status,
        strategy=strategy,
        budget=budget.device_bytes,
        host_budget=budget.host_bytes,
        peak_bytes=peak_bytes,
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
        host_peak_bytes=figures.host_peak_bytes,
        compute_time_s=graph.compute_time_s,
        stats=solution.stats,
        notes=(*_notes(graph, profiled), *_link_notes(program, device)),
        profiled=profiled,
        record=None if profiled is None else profiled.record,
    )


def _notes(graph: Graph, profiled: Profiled | None) -> tuple[str, ...]:
    if profiled is None:
        return ()
    from memopt.profiler.session import checkpoint_notes, loss_notes
    from memopt.profiler.training_call import call_notes

    notes = profiled.notes
    state = profiled.optimizer
    if state is not None and state.bytes_total:
        notes = (f"Resident: {format_bytes(state.bytes_total)} of {state.name} state.", *notes)
    covered = has_updates(graph) or graph.boundary_bytes > 0
    captured, model = profiled.captured, profiled.captured.model()
    told = () if model is None else call_notes(model, captured.call)
    told = (*checkpoint_notes(captured), *told)
    return (*loss_notes(captured, covered=covered), *told, *notes)


def _link_notes(program: Program, device: Device) -> tuple[str, ...]:
    if not program.has_transfers or device.is_linked:
        return ()
    return (
        f"The link of the device {device.name!r} has no speed: transfers count as free. Give one "
        "(device=memopt.measure_device(), a preset such as 'A100', or a memopt.Device).",
    )


def reporting_on(progress: bool | Progress) -> AbstractContextManager[Progress]:
    """How far a step of planning is: a bar on a terminal, or the user's callback."""
    from memopt.report.progress import reporting

    return reporting(progress)


def _ending_at_ctrl_c(report: Progress) -> AbstractContextManager[Progress]:
    from memopt.report.progress import ending_at_ctrl_c

    return ending_at_ctrl_c(report)
