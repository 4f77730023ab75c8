"""compare(): fills a Comparison, one profile for all its cells, and runs the plans if asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from memopt.api.cells import CellCache
from memopt.api.cluster import on_mesh
from memopt.api.comparison import Cell, Comparison
from memopt.api.plan import Plan
from memopt.api.planning import solve
from memopt.api.refusal import unit_meant
from memopt.api.solving import baseline_figures, planned_device
from memopt.api.spread import budgets_between, enough_bytes
from memopt.api.thread_pool import Finished, default_workers, run_all
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.budget import MINIMUM, WrittenBudget, parse_budget
from memopt.models.chain import Chain
from memopt.models.checks import check_time_limit
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.mesh import Mesh
from memopt.models.options import Mode, Pricing, Returns, StepOptions, parse_returns, several
from memopt.models.progress import Progress
from memopt.plan_record import BaselineFigures
from memopt.report.progress import reporting
from memopt.stages import profiled_for
from memopt.strategies import STRATEGIES, Status, Strategy, resolve
from memopt.strategies.target import Target, chain_view

if TYPE_CHECKING:
    from memopt.reductions.chain_view import ChainView
    from memopt.step.profiled import Profiled

DEFAULT = (
    "store-all",
    "sequential",
    "revolve",
    "rotor",
    "rotor-optimal",
    "greedy",
    "vdnn",
    "dynprog",
    "tflms",
    "offload-graph",
    "monet",
    "olla",
)
"""The strategies compared by default: every family but joint and auto, which run others."""

DEFAULT_LIMIT_S = 10.0
"""Seconds for each cell of a default comparison, where no limit is given."""

POINTS = 5
"""How many budgets, evenly from the smallest feasible one to the baseline's peak, by default."""


def compare(
    model: Any,
    inputs: Any = None,
    *,
    budgets: Sequence[WrittenBudget] | WrittenBudget = None,
    strategies: Sequence[str | Strategy] | str | Strategy | None = None,
    points: int = POINTS,
    run: bool = False,
    loss_fn: Callable[..., Any] | None = None,
    targets: tuple[Any, ...] = (),
    device: Device | str | None = None,
    mode: Mode = "measure",
    optimizer: Any = None,
    kernels: str = "aten",
    time_limit_s: float | None = None,
    workers: int | None = None,
    cache: bool = True,
    mesh: Mesh | None = None,
    returns: Returns = "all",
    progress: bool | Progress = True,
) -> Comparison:
    """Plan one model with several strategies at several budgets. It is profiled once.

    Ctrl-C ends the comparison and returns the cells that are done (`complete` is False then). A
    running solver may treat it as its time limit and return its best plan first. Finished cells
    are kept on disk: the same comparison later plans only the missing ones.

    Args:
        model: as `memopt.plan`: an nn.Module (with `inputs`), a profiled model, a Chain, a Graph.
        inputs: example inputs.
        budgets: one or several, each as for `memopt.plan` ("min": the smallest that any of the
            strategies can meet); None: `points` of them, from that smallest one to what suffices
            without a plan.
        strategies: one or several, names or instances; None: of every family those that can plan
            this model, those that move data only for a device whose link is known. Joint wants a
            minute for each plan: name it to compare it.
        points: how many budgets where none are named, at least 2.
        run: also run every plan on the real model, in turn with each other and with the unplanned
            step, and measure peak and step time. The model is left as it was.
        loss_fn, targets, device, mode, optimizer, kernels: as for `memopt.plan`.
        time_limit_s: seconds for each cell; None: ten, or with `strategies` no limit but theirs.
        workers: how many cells are planned at a time, in threads; None: as many as there are
            usable cores, at most four. Plans do not depend on it unless a time limit cuts them
            short; planning times do. Real steps always run alone.
        cache: keep kernels' costs and finished cells on disk, and reuse those that are there.
        mesh, returns: as for `memopt.plan`; with a mesh nothing can be run.
        progress: True shows a bar on a terminal; or your own callback.

    Raises:
        CaptureError: the model cannot be captured.
        ValueError: unreadable budget, unknown strategy, misuse; the message has the remedy.
    """
    if workers is not None and (not isinstance(workers, int) or workers < 1):
        raise ValueError(f"compare: workers must be at least 1, got {workers!r}")
    check_time_limit(time_limit_s)
    if not isinstance(points, int) or points < 2:
        raise ValueError(f"compare: points must be at least 2, got {points!r}")
    if run and mesh is not None:
        raise ValueError("compare: the ranks of mesh= are not there to run: leave run= out")
    target = planned_device(device, mode)
    chosen = None if strategies is None else tuple(resolve(one) for one in several(strategies))
    if chosen is None and time_limit_s is None:
        time_limit_s = DEFAULT_LIMIT_S
    budgets = None if budgets is None else several(budgets)
    for budget in budgets or ():
        parse_budget(None if budget == MINIMUM else budget, 1)
    with reporting(progress) as report:
        step = StepOptions(loss_fn, targets, optimizer, returns=parse_returns(returns))
        pricing = Pricing(device, mode, kernels, cache)
        planning_share = 0.3 if run else 0.8
        with on_mesh(model, mesh, mode) as built:
            profiled = profiled_for(
                built, inputs, step, pricing, target, lambda f, what: report(0.2 * f, what)
            )
        real = _real_model(profiled) if run else None
        cost_model: Chain | Graph = profiled.graph if profiled is not None else model
        table = _Table(
            cost_model, profiled, target, time_limit_s, chosen, workers or default_workers(), cache
        )

        def planning(fraction: float, what: str) -> None:
            report(0.2 + planning_share * fraction, what)

        made = table.fill(budgets, points, planning)
        if real is None or not made.complete:
            return made
        return _measured(made, real, loss_fn, targets, lambda f, w: report(0.5 + 0.5 * f, w))


def default_strategies(
    cost_model: Chain | Graph, view: ChainView, device: Device
) -> tuple[tuple[Strategy, ...], tuple[str, ...]]:
    """Return the strategies that are compared by default, and why others of them are left out.

    Args:
        cost_model: the chain or graph to plan.
        view: its graph and its chain.
        device: strategies that move data are left out if the speed of its link is unknown, since
            every transfer would look free.
    """
    chosen: list[Strategy] = []
    unlinked: list[str] = []
    refused: list[str] = []
    for one in STRATEGIES:
        if one.name not in DEFAULT:
            continue
        reason = Target.of(one, cost_model, view).why_not()
        if one.features.offload and not device.is_linked:
            unlinked.append(one.name)
        elif reason is not None:
            refused.append(f"not compared: {reason}")
        else:
            chosen.append(one)
    if unlinked:
        refused.append(
            f"not compared: {', '.join(unlinked)}: they move data, and the link's speed is unknown "
            "(device=memopt.measure_device(), or a preset)"
        )
    return tuple(chosen), tuple(refused)


class _Table:
    """A comparison under construction, with the state that its cells share."""

    def __init__(
        self,
        cost_model: Chain | Graph,
        profiled: Profiled | None,
        device: Device,
        time_limit_s: float | None,
        chosen: tuple[Strategy, ...] | None,
        workers: int,
        cache: bool,
    ) -> None:
        self.cost_model, self.profiled, self.device = cost_model, profiled, device
        self.time_limit_s, self.workers = time_limit_s, workers
        self.view = chain_view(cost_model)
        self.graph = self.view.graph
        self.baseline = baseline_figures(self.graph, profiled)
        self.left_out: tuple[str, ...] = ()
        if chosen is None:
            chosen, self.left_out = default_strategies(cost_model, self.view, device)
        self.strategies = chosen
        if not self.strategies:
            raise ValueError("compare: no strategy to compare; name some in strategies=")
        names = [one.name for one in self.strategies]
        self.labels = [
            one.name if names.count(one.name) == 1 else repr(one) for one in self.strategies
        ]
        refers = (profiled, self.baseline)
        self.cache = CellCache(self.view, device, time_limit_s, *refers) if cache else None

    def fill(
        self, budgets: Sequence[WrittenBudget] | None, points: int, progress: Progress
    ) -> Comparison:
        """Make every cell; after an interrupt, return those that are done."""
        found = Finished[Cell](complete=False)
        sizes = self._budgets(budgets, points, progress)
        if sizes is not None:
            tasks = [
                self._task(strategy, label, size, "planning")
                for strategy, label in zip(self.strategies, self.labels, strict=True)
                for size in sizes
            ]
            found = run_all(tasks, self.workers, progress)
        cells = tuple(found.results[number] for number in sorted(found.results))
        return Comparison(
            cells,
            self.baseline,
            self.graph.compute_time_s,
            complete=found.complete,
            left_out=self.left_out,
        )

    def _budgets(
        self, budgets: Sequence[WrittenBudget] | None, points: int, progress: Progress
    ) -> list[int | None] | None:
        """Return the budgets in bytes; None if interrupted."""
        peak = self.baseline.peak_bytes
        floor = None
        if budgets is None or MINIMUM in budgets:
            floor = self._floor(progress)
            if floor is None:
                return None
        if budgets is None:
            assert floor is not None
            return [*budgets_between(floor, enough_bytes(self.graph, self.baseline), points)]
        sizes = [floor if b == MINIMUM else parse_budget(b, peak) for b in budgets]
        return list(dict.fromkeys(sizes))

    def _floor(self, progress: Progress) -> int | None:
        """Return the smallest budget that any of the strategies can meet; None if interrupted."""
        tasks = [
            self._task(strategy, label, MINIMUM, "smallest budget")
            for strategy, label in zip(self.strategies, self.labels, strict=True)
        ]
        found = run_all(tasks, self.workers, lambda _fraction, what: progress(0.0, what))
        if not found.complete:
            return None
        floors = [
            cell.budget_bytes
            for cell in found.results.values()
            if cell.budget_bytes is not None and cell.plan is not None
        ]
        if not floors:
            raise ValueError("compare: no strategy knows its smallest budget; pass budgets=")
        return min(floors)

    def _task(
        self, strategy: Strategy, label: str, budget: int | str | None, what: str
    ) -> Callable[[Progress], Cell]:
        """Return the task that makes a cell: it reads it from disk, or plans and stores it."""

        def task(progress: Progress) -> Cell:
            interrupted = False

            def report(fraction: float, detail: str) -> None:
                nonlocal interrupted
                try:
                    progress(fraction, f"{label}: {detail}")
                except KeyboardInterrupt:
                    interrupted = True
                    raise

            report(0.0, what)
            known = None if self.cache is None else self.cache.load(strategy, label, budget)
            if known is not None:
                return known
            cell = self._cell(strategy, label, budget, report)
            if interrupted and cell.plan is None:
                raise KeyboardInterrupt
            if self.cache is not None and not interrupted:
                self.cache.store(strategy, budget, cell)
            return cell

        return task

    def _cell(
        self, strategy: Strategy, label: str, budget: int | str | None, progress: Progress
    ) -> Cell:
        size = None if isinstance(budget, str) else budget
        begin = time.perf_counter()

        def empty(
            status: Status, note: str, smallest_bytes: int | None = None, applies: bool = True
        ) -> Cell:
            spent_s = time.perf_counter() - begin
            cell = Cell(label, size, status, spent_s, note=note, applies=applies)
            return replace(cell, smallest_budget_bytes=smallest_bytes)

        reason = Target.of(strategy, self.cost_model, self.view).why_not()
        if reason is not None:
            return empty(Status.UNKNOWN, reason, applies=False)
        try:
            plan = solve(
                self.cost_model,
                budget,
                strategy,
                device=self.device,
                profiled=self.profiled,
                time_limit_s=self.time_limit_s,
                progress=progress,
                view=self.view,
            )
        except InfeasibleBudgetError as error:
            if not error.proved:
                return empty(Status.UNKNOWN, str(error), error.smallest_budget_bytes)
            meant = "" if self.profiled is None else unit_meant(error.budget_bytes).strip()
            return empty(Status.INFEASIBLE, meant, error.smallest_budget_bytes)
        except (MemoptError, MemoryError) as error:
            return empty(Status.UNKNOWN, str(error))
        return Cell.of(label, plan, time.perf_counter() - begin)


def _real_model(profiled: Profiled | None) -> Any:
    """Return the module to run the plans on."""
    if profiled is None:
        raise ValueError("run=True runs a model: pass an nn.Module and inputs, not a cost model")
    if not profiled.baseline.measured:
        raise ValueError('run=True runs the model here: compare with mode="measure"')
    model = profiled.captured.model()
    if model is None:
        raise ValueError("run=True: the profiled model is gone; keep a reference to it")
    return model


def _measured(
    made: Comparison,
    model: Any,
    loss_fn: Callable[..., Any] | None,
    targets: tuple[Any, ...],
    progress: Progress,
) -> Comparison:
    """Add measured peaks and times; plans with equal programs are run as one."""
    from memopt.executor.check import measure_in_turn

    plans: list[Plan] = []
    number: dict[int, int] = {}
    for index, cell in enumerate(made.cells):
        if cell.plan is None:
            continue
        same = (i for i, plan in enumerate(plans) if plan.program == cell.plan.program)
        number[index] = next(same, len(plans))
        if number[index] == len(plans):
            plans.append(cell.plan)
    if not plans:
        return made
    try:
        unplanned, figures = measure_in_turn(
            plans, model, loss_fn=loss_fn, targets=targets, progress=progress
        )
    except KeyboardInterrupt:
        return replace(made, complete=False)
    cells = list(made.cells)
    for index, which in number.items():
        peak, seconds = figures[which]
        cells[index] = replace(cells[index], measured_peak_bytes=peak, measured_time_s=seconds)
    baseline = BaselineFigures(*unplanned, measured=True)
    return replace(made, cells=tuple(cells), measured_baseline=baseline)
