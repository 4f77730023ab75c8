"""plan() and its steps: check, solve, validate, replay, wrap."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from memopt.errors import InvalidProgramError, MemoptError
from memopt.models.bounds import time_lower_bound
from memopt.models.budget import MINIMUM, format_bytes, parse_budget
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.plan import BaselineFigures, Plan
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program, SwapIn, SwapOut
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.chain_replay import replay_chain
from memopt.reductions.stage_map import has_updates
from memopt.reductions.validate_and_replay import judge
from memopt.refusal import infeasible
from memopt.strategies import Progress, Solution, Strategy, resolve
from memopt.strategies.host_budget import host_limit, parse_host_budget, with_host_budget
from memopt.strategies.kept import Planning
from memopt.strategies.store_all import chain_steps
from memopt.whole_step import left_on_host, takes_whole_step

if TYPE_CHECKING:
    from memopt.profiler.session import Profiled
    from memopt.reductions.linearize import Linearization

_NO_OPERATORS = (
    "order=True and place=True work on the operators of a graph; a Chain has none: plan "
    "the model itself or its Graph (strategies for chains take those, too)"
)

Mode: TypeAlias = Literal["measure", "estimate"]


def plan(
    model: Any,
    inputs: Any = None,
    *,
    budget: int | float | str | None = None,
    strategy: str | Strategy = "rotor",
    host_budget: int | str | None = None,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    device: Device | str | None = None,
    mode: Mode = "measure",
    optimizer: Any = None,
    order: bool = False,
    place: bool = False,
    whole_step: bool | None = None,
    offload_optimizer: bool = False,
    time_limit_s: float | None = None,
    cache: bool = True,
    progress: bool | Progress = True,
) -> Plan:
    """Plan a training step within a budget. Ctrl-C ends the solver with its best plan so far.

    Args:
        model: an nn.Module (with `inputs`): capture, profile, solve. Or a Chain, a Graph or a
            profiled model (`memopt.profiler.profile_model`): solve only.
        inputs: example inputs: a tensor, a tuple of positional or a dict of keyword arguments.
        budget: total device memory of a step: bytes, a share of the baseline peak in (0, 1],
            "6GiB" (2^30) or "6GB" (10^9), "min" (the smallest the strategy can meet), or None: no
            limit, but for an estimate the device's capacity.
        strategy: a name of `memopt.strategies()`, or an instance with your parameters.
        host_budget: the most that may be on the host at once, for strategies that move data:
            bytes, or a string such as "6GiB"; None: no limit.
        loss_fn: your loss, `loss_fn(output, *targets)`: its own memory is measured and charged.
        targets: what your loss takes beside the output: a tuple, or the only one.
        device: link rates and capacity: a Device, or a preset's name such as "H100"; None: the
            present machine's.
        mode: "measure" runs the model's kernels here; "estimate" computes nothing and prices
            them for `device` (the model may be on meta).
        optimizer: charge its state as resident: a torch.optim instance, or a name such as
            "sgd", "adamw", "adamw-fp32", "adamw-8bit".
        order: reorder the strategy's plan for a smaller peak (OLLA's pass).
        place: give its tensors addresses in one arena, where that keeps the budget.
        whole_step: plan the parameters' updates, too, each as early as it can be, for
            `Plan.train_step` instead of `Plan.apply`: needs `loss_fn`, an optimizer instance and
            a strategy for chains, or one for graphs that recomputes nothing ("olla",
            "store-all", "offload-graph"). None: where these last ones are given both.
        offload_optimizer: keep the optimizer's state on the host; each update brings its
            parameter's state and takes it back. Plans the whole step.
        time_limit_s: stop the solver after so many seconds with its best plan and bound; each of
            `order` and `place` likewise.
        cache: whether measured costs are kept on disk (MEMOPT_CACHE_DIR).
        progress: True shows a bar on a terminal; or your own callback.

    Raises:
        InfeasibleBudgetError: no plan fits; names the smallest feasible budget.
        CaptureError: the model cannot be captured.
        ValueError: unreadable budget, unknown strategy, misuse; the message has the remedy.
    """
    host_bytes = parse_host_budget(host_budget)
    chosen = with_host_budget(resolve(strategy), host_bytes)
    parse_budget(None if budget == MINIMUM else budget, 1)
    with _reporting(progress) as report:
        target = planned_device(device, mode)
        wanted = True if offload_optimizer and whole_step is None else whole_step
        whole = takes_whole_step(chosen, wanted, loss_fn, optimizer, mode)
        request = Request(
            loss_fn, targets, mode, target, optimizer, cache, whole, whole and offload_optimizer
        )
        profiled = profiled_for(model, inputs, request, report)
        if offload_optimizer:
            host_bytes = left_on_host(host_bytes, profiled, whole_step=whole)
            chosen = with_host_budget(chosen, host_bytes)
        if profiled is not None and "implementations" in chosen.features:
            from memopt.implementations import for_plan

            profiled = for_plan(profiled, chosen, target if mode == "estimate" else None, cache)
        if profiled is not None and (place or "place" in chosen.features):
            from memopt.executor.out_variants import for_placing

            profiled = for_placing(profiled)
        cost_model = profiled.graph if profiled is not None else model
        if budget is None and mode == "estimate":
            budget = target.capacity_bytes
        with _ending_at_ctrl_c(report) as told:
            made = solve(
                cost_model,
                budget,
                chosen,
                device=target,
                profiled=profiled,
                time_limit_s=time_limit_s,
                progress=told,
                order=order,
                place=place,
                host_budget_bytes=host_bytes,
            )
    return made


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
        progress=report,
    )


def solve(
    cost_model: Chain | Graph,
    budget: int | float | str | None,
    strategy: Strategy,
    *,
    device: Device,
    profiled: Profiled | None = None,
    time_limit_s: float | None = None,
    progress: Progress | None = None,
    linearization: Linearization | None = None,
    order: bool = False,
    place: bool = False,
    host_budget_bytes: int | None = None,
) -> Plan:
    """Solve, validate, replay and wrap; see `plan`. A caller with many solves of one graph passes
    its `linearization`, to have it made once."""
    if (order or place) and not isinstance(cost_model, Graph):
        raise ValueError(_NO_OPERATORS)
    baseline = baseline_figures(cost_model, profiled)
    target, view = _target(cost_model, strategy, linearization)
    reason = strategy.why_not(target)
    if reason is not None:
        raise ValueError(f"strategy {strategy.name!r} cannot plan this model: {reason}")

    def attempt(budget_bytes: int | None) -> Solution:
        return strategy.solve(
            target,
            budget_bytes,
            device=device,
            time_limit_s=time_limit_s,
            progress=progress,
        )

    budget_bytes: int | None
    attempts = Planning(strategy, cost_model, view, device, attempt)
    if budget == MINIMUM:
        least = attempts.smallest()
        if least is None:
            raise MemoptError(f"{strategy.name} does not know its smallest budget; name one")
        budget_bytes, solution = least
    else:
        budget_bytes = parse_budget(budget, baseline.peak_bytes)
        solution = attempts.within(budget_bytes)
    if not solution.plans:
        raise infeasible(solution, budget_bytes, strategy, cost_model, profiled)
    limits = budget_bytes, host_limit(strategy, host_budget_bytes)
    if (order or place) and isinstance(cost_model, Graph):
        from memopt.strategies.olla.arranging import arranged

        lower = view.lower if view is not None else None
        passes = {"order": order, "place": place}
        solution = arranged(cost_model, solution, lower, limits, device, passes, time_limit_s)
    return _wrap(cost_model, view, solution, strategy, limits, baseline, device, profiled)


def _target(
    cost_model: Chain | Graph, strategy: Strategy, known: Linearization | None
) -> tuple[Chain | Graph, Linearization | None]:
    """What the strategy solves, and the linearization to lower its schedule with."""
    if strategy.needs == "chain" and isinstance(cost_model, Graph):
        from memopt.reductions.linearize import linearize
        from memopt.reductions.updates import linearize_step

        view = known or (linearize_step if has_updates(cost_model) else linearize)(cost_model)
        return view.chain, view
    return cost_model, None


def baseline_figures(cost_model: Chain | Graph, profiled: Profiled | None) -> BaselineFigures:
    """The step without memopt: the profile's, or the cost model's own order replayed."""
    if profiled is not None:
        base = profiled.baseline
        return BaselineFigures(base.peak_bytes, base.step_time_s, base.measured)
    if isinstance(cost_model, Chain):
        chain_timeline = replay_chain(cost_model, chain_steps(cost_model))
        return BaselineFigures(chain_timeline.peak_bytes, chain_timeline.time_s, False)
    timeline = replay(cost_model, store_all(cost_model))
    return BaselineFigures(timeline.peak_bytes, timeline.time_s, False)


def _wrap(
    cost_model: Chain | Graph,
    view: Any,
    solution: Solution,
    strategy: Strategy,
    limits: tuple[int | None, int | None],
    baseline: BaselineFigures,
    device: Device,
    profiled: Profiled | None,
) -> Plan:
    """The plan of a solution; `limits` are bytes on the device and on the host."""
    program = solution.program
    if view is not None and solution.steps is not None and program is None:
        program = view.lower(solution.steps)
    elif program is not None and isinstance(cost_model, Graph) and not strategy.decides_in_place:
        program = with_in_place(cost_model, program)
    chain = view.chain if view is not None else None
    chain = cost_model if isinstance(cost_model, Chain) else chain
    moves = "offload" in strategy.features
    violation, figures = judge(
        cost_model, solution.steps, program, limits[0], device, limits[1], offloading=moves
    )
    peak_bytes, time_s = figures.peak_bytes, figures.time_s
    if violation is not None:
        raise InvalidProgramError(f"{strategy.name} made an invalid plan: {violation}")
    bound_s = solution.lower_bound_s
    return Plan(
        status=solution.status,
        strategy=strategy,
        budget=limits[0],
        host_budget=limits[1],
        peak_bytes=peak_bytes,
        resident_bytes=cost_model.resident_bytes,
        step_time_s=time_s,
        lower_bound_s=min(time_s, time_lower_bound(cost_model) if bound_s is None else bound_s),
        baseline=baseline,
        device=device,
        program=program,
        chain_steps=solution.steps,
        graph=cost_model if isinstance(cost_model, Graph) else None,
        chain=chain,
        host_peak_bytes=figures.host_peak_bytes,
        compute_time_s=cost_model.compute_time_s,
        stats=solution.stats,
        notes=(*_notes(cost_model, profiled), *_link_notes(program, device)),
        profiled=profiled,
        record=None if profiled is None else profiled.record,
    )


def _notes(cost_model: Chain | Graph, profiled: Profiled | None) -> tuple[str, ...]:
    if profiled is None:
        return ()
    from memopt.profiler.loss_notes import loss_notes

    notes = profiled.notes
    state = profiled.optimizer
    if state is not None and state.bytes_total:
        notes = (f"Resident: {format_bytes(state.bytes_total)} of {state.name} state.", *notes)
    whole = isinstance(cost_model, Graph) and has_updates(cost_model)
    charged = isinstance(cost_model, Graph) and cost_model.boundary_bytes > 0
    return (*loss_notes(profiled.captured, covered=whole or charged), *notes)


def _link_notes(program: Program | None, device: Device) -> tuple[str, ...]:
    moves = program is not None and any(isinstance(x, SwapOut | SwapIn) for x in program)
    if not moves or device.is_linked:
        return ()
    return (
        f"The link of the device {device.name!r} has no speed: transfers count as free. Give one "
        "(device=memopt.measure_device(), a preset such as 'A100', or a memopt.Device).",
    )


def _reporting(progress: bool | Progress) -> AbstractContextManager[Progress]:
    from memopt.report.progress import reporting

    return reporting(progress)


def _ending_at_ctrl_c(report: Progress) -> AbstractContextManager[Progress]:
    from memopt.report.progress import ending_at_ctrl_c

    return ending_at_ctrl_c(report)


def strategies() -> dict[str, str]:
    """Names of all strategies, each with one sentence about it."""
    from memopt.report.texts import first_sentence
    from memopt.strategies import STRATEGIES

    return {s.name: first_sentence(type(s).__doc__ or "") for s in STRATEGIES}


def profile(
    model: Any,
    inputs: Any,
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    optimizer: Any = None,
    device: Device | str | None = None,
    mode: Mode = "measure",
    cache: bool = True,
    progress: bool | Progress = True,
) -> Graph:
    """Capture and price a model's training step, measured here or estimated for `device`; the
    graph can be planned, linearized (`graph.to_chain()`) and saved without torch. Arguments as in
    `plan`."""
    request = Request(loss_fn, targets, mode, planned_device(device, mode), optimizer, cache)
    with _reporting(progress) as report:
        profiled = profiled_for(model, inputs, request, report)
    if profiled is None:
        raise ValueError("profile takes an nn.Module and its example inputs")
    return profiled.graph
