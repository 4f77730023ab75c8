"""fits(): whether a model trains on a device, with which strategy, how fast, at which batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from memopt.api.cluster import on_mesh
from memopt.api.planning import solve
from memopt.api.refusal import unit_meant
from memopt.api.reserved import reserved_bytes, within_card
from memopt.api.size_search import largest_size
from memopt.api.solving import planned_device
from memopt.errors import InfeasibleBudgetError
from memopt.models.budget import MINIMUM, format_bytes, parse_budget
from memopt.models.device import Device
from memopt.models.mesh import Mesh
from memopt.models.options import Mode, Pricing, Returns, StepOptions, parse_returns, several
from memopt.models.progress import Progress
from memopt.plan_record import PlanRecord
from memopt.report.peak import fixed_bytes, fixed_sum
from memopt.report.progress import reporting
from memopt.report.texts import aligned, format_seconds, or_dash
from memopt.stages import profiled_for
from memopt.strategies import Strategy, resolve
from memopt.strategies.named_budgets import Planning
from memopt.strategies.target import Target

DEFAULT_STRATEGIES = ("store-all", "sequential", "auto")


@dataclass(frozen=True, slots=True)
class Fit:
    """One strategy's answer at the asked batch. Bytes are totals, resident included.

    Attributes:
        strategy: its name.
        fits: whether a plan fits the budget.
        peak_bytes: the plan's peak; None without a plan.
        reserved_bytes: what CUDA's allocator reserves for it, as simulated; None on other devices.
            Where that is more than the device has, nothing fits.
        step_time_s: the plan's step time; None without a plan.
        overhead: extra time over running every operator once, as a share of that.
        smallest_budget_bytes: the least budget the strategy is known to meet; None: unknown.
        largest_batch: the largest batch found to fit; None: not searched, or none fits.
        proved: whether a batch of one more was found not to fit.
        note: why the strategy does not apply; "" if it does.
    """

    strategy: str
    fits: bool
    peak_bytes: int | None = None
    step_time_s: float | None = None
    overhead: float | None = None
    smallest_budget_bytes: int | None = None
    largest_batch: int | None = None
    proved: bool = False
    note: str = ""
    reserved_bytes: int | None = None


@dataclass(frozen=True)
class Fits:
    """The answer of `fits()`, a table; `print` shows it.

    Attributes:
        device: the device that the answer is for.
        budget_bytes: total device memory allowed.
        batch: the batch that `rows` are for; None if `inputs` was no function of it.
        standing: (name, bytes) of memory that no plan can free.
        rows: one per strategy, in the order asked.
        notes: what to know about the figures.
    """

    device: Device
    budget_bytes: int
    batch: int | None
    standing: tuple[tuple[str, int], ...]
    rows: tuple[Fit, ...]
    notes: tuple[str, ...] = ()

    def best(self) -> Fit | None:
        """Return the fastest row that fits; None if nothing does."""
        fitting = [row for row in self.rows if row.fits and row.step_time_s is not None]
        return min(fitting, key=lambda row: row.step_time_s or 0.0, default=None)

    def __str__(self) -> str:
        head = ("strategy", "fits", "peak", "reserved", "step time", "overhead", "smallest budget")
        table: list[tuple[str, ...]] = [head if self.batch is None else (*head, "largest batch")]
        table += [self._cells(row) for row in self.rows]
        lines = [
            f"{self.device.name}: {format_bytes(self.budget_bytes)}"
            + ("" if self.batch is None else f", batch {self.batch}"),
            f"held whatever the plan: {fixed_sum(self.standing)}",
        ]
        lines += aligned(table)
        lines += [f"{row.strategy}: {row.note}" for row in self.rows if row.note]
        return "\n".join([*lines, *self.notes])

    def _cells(self, row: Fit) -> tuple[str, ...]:
        cells = (
            row.strategy,
            "yes" if row.fits else "no",
            or_dash(row.peak_bytes, format_bytes),
            or_dash(row.reserved_bytes, format_bytes),
            or_dash(row.step_time_s, format_seconds),
            or_dash(row.overhead, lambda share: f"{share:+.1%}"),
            or_dash(row.smallest_budget_bytes, format_bytes),
        )
        if self.batch is None:
            return cells
        least = "" if row.proved or row.largest_batch is None else "≥ "
        return (*cells, or_dash(row.largest_batch, lambda batch: f"{least}{batch}"))


def fits(
    model: Any,
    inputs: Any,
    *,
    device: Device | str | None = None,
    optimizer: Any = None,
    budget: int | str | None = None,
    strategies: Sequence[str | Strategy] | str | Strategy = DEFAULT_STRATEGIES,
    batch: int | None = None,
    max_batches: int = 12,
    loss_fn: Callable[..., Any] | None = None,
    targets: Any = (),
    mode: Mode = "estimate",
    mesh: Mesh | None = None,
    returns: Returns = "all",
    progress: bool | Progress = True,
) -> Fits:
    """Find out whether and how a model trains on a device, as one table.

    Args:
        model: the nn.Module; it may be on meta in an estimate.
        inputs: example inputs; or a function from a batch size to them, for which the largest
            batch is searched, too.
        device: a preset's name or a Device; needed for an estimate.
        optimizer: whose state is resident; see `plan`.
        budget: total device memory; None: the device's capacity.
        strategies: names or instances, in the table's order.
        batch: the batch size of the rows, with a function of inputs; None: 1.
        max_batches: batch sizes captured at most in the search. A search that runs out of them
            reports the largest that fitted ("≥").
        loss_fn: your loss; its memory is charged.
        targets: what your loss takes beside the output; a function of the batch size if `inputs`
            is one.
        mode: "estimate" or "measure"; see `plan`.
        mesh: the ranks of a cluster that need not exist; the answer is for one of them. `model` is
            then a function of a DeviceMesh, and inputs are one rank's; see `plan`.
        returns: "all" or "loss"; see `plan`.
        progress: True shows a bar on a terminal; or your own callback.

    Raises:
        ValueError: no budget and no capacity; misuse. CaptureError: as in `plan`.
    """
    place = planned_device(device, mode)
    budget_bytes = place.capacity_bytes if budget is None else parse_budget(budget, 1)
    if budget_bytes is None:
        raise ValueError(f"the device {place.name!r} has no capacity_bytes: pass budget=")
    searched = callable(inputs)
    if batch is not None and not searched:
        raise ValueError("batch= goes with a function from a batch size to inputs")
    with reporting(progress) as report:

        def profiled(size: int) -> Any:
            given, aims = (inputs(size), targets) if searched else (inputs, targets)
            aims = aims(size) if callable(aims) else aims
            step = StepOptions(loss_fn, aims, optimizer, returns=parse_returns(returns))
            with on_mesh(model, mesh, mode) as built:
                return profiled_for(built, given, step, Pricing(device, mode), place, report)

        chosen = [resolve(strategy) for strategy in several(strategies)]
        search = _BatchSearch(profiled, place, budget_bytes, max_batches)
        first = batch or 1
        rows = tuple(search.row(strategy, first, searched) for strategy in chosen)
        start = search.at(first)
    parts = start.optimizer.parts if start.optimizer is not None else ()
    return Fits(
        device=place,
        budget_bytes=budget_bytes,
        batch=first if searched else None,
        standing=fixed_bytes(start.graph, parts),
        rows=rows,
        notes=(*_of_ranks(mesh), *_measured_here(device, place, start), *start.notes),
    )


def _measured_here(asked: Device | str | None, device: Device, profiled: Any) -> tuple[str, ...]:
    if asked is None or not profiled.baseline.measured:
        return ()
    return (
        f"Times and bytes were measured on this machine's {profiled.torch_device.type}; of "
        f'{device.name} are capacity and links alone. mode="estimate" prices the step for it.',
    )


def _of_ranks(mesh: Mesh | None) -> tuple[str, ...]:
    return () if mesh is None else (f"Each of {mesh.ranks:,} ranks ({mesh}).",)


class _BatchSearch:
    """Profiles by batch size, each made once, and the strategies' answers for them."""

    def __init__(
        self,
        profiled: Callable[[int], Any],
        device: Device,
        budget_bytes: int,
        max_batches: int,
    ) -> None:
        self._profiled, self._device, self._budget_bytes = profiled, device, budget_bytes
        self._max_batches = max_batches
        self._known: dict[int, Any] = {}
        self._planned: dict[tuple[Strategy, int], tuple[PlanRecord | None, str]] = {}

    def at(self, batch: int) -> Any:
        """Return the profile at a batch size."""
        if batch not in self._known:
            self._known[batch] = self._profiled(batch)
        return self._known[batch]

    def row(self, strategy: Strategy, batch: int, search: bool) -> Fit:
        """Make a strategy's row; `search` also looks for the largest batch."""
        try:
            smallest = self._smallest(strategy, batch)
        except ValueError as error:
            return Fit(strategy.name, False, note=str(error))
        largest, proved = self._largest(strategy, batch, smallest) if search else (None, False)
        common = {
            "smallest_budget_bytes": smallest,
            "largest_batch": largest,
            "proved": proved,
        }
        plan, why_not = self._on_card(strategy, batch)
        if plan is None:
            return Fit(strategy.name, False, **common, note=why_not)  # type: ignore[arg-type]
        return Fit(
            strategy.name,
            True,
            peak_bytes=plan.peak_bytes,
            step_time_s=plan.step_time_s,
            overhead=plan.overhead,
            reserved_bytes=reserved_bytes(plan) or None,
            **common,  # type: ignore[arg-type]
        )

    def _on_card(self, strategy: Strategy, batch: int) -> tuple[PlanRecord | None, str]:
        """Return the plan within the budget for which the allocator reserves no more than the
        device has; or None, and why there is none although the budget is large enough."""
        asked = (strategy, batch)
        if asked not in self._planned:
            solve_for = partial(self._plan, strategy, batch)
            card_bytes, why_not, plan = self._device.capacity_bytes, "", None
            try:
                plan = solve_for(self._budget_bytes)
                why_not = _more_reserved(plan, card_bytes)
                if why_not:
                    plan = within_card(solve_for, self._budget_bytes, card_bytes)
            except InfeasibleBudgetError:
                plan, why_not = None, why_not or unit_meant(self._budget_bytes).strip()
            self._planned[asked] = plan, "" if plan is not None else why_not
        return self._planned[asked]

    def _plan(self, strategy: Strategy, batch: int, budget: int | str) -> Any:
        found = self.at(batch)
        return solve(found.graph, budget, strategy, device=self._device, profiled=found)

    def _smallest(self, strategy: Strategy, batch: int) -> int:
        graph = self.at(batch).graph
        target = Target.of(strategy, graph)
        if strategy.refines_smallest(target.solved):
            return int(self._plan(strategy, batch, MINIMUM).peak_bytes)
        attempt = partial(strategy.solve, graph, device=self._device)
        found = Planning(target, self._device, attempt).smallest_budget()
        if found is None:
            raise ValueError(f"{strategy.name} knows no budget that it can meet")
        return found

    def _largest(self, strategy: Strategy, first: int, smallest: int) -> tuple[int | None, bool]:
        """Find the largest batch that fits, and whether it is proved."""

        def may_try(batch: int) -> bool:
            return batch in self._known or len(self._known) < self._max_batches

        known = {first: smallest}

        def needed(batch: int) -> int:
            return known.setdefault(batch, self._smallest(strategy, batch))

        while True:
            found = largest_size(needed, first, self._budget_bytes, may_try, known)
            if found[0] is None or self._on_card(strategy, found[0])[0] is not None:
                return found
            # The allocator would reserve more than there is.
            known[found[0]] = self._budget_bytes + 1


def _more_reserved(plan: PlanRecord, card_bytes: int | None) -> str:
    """Return a note that the allocator reserves more for a plan than the device has; "" if it does
    not."""
    reserved = reserved_bytes(plan)
    if card_bytes is None or reserved <= card_bytes:
        return ""
    return (
        f"its plan's {format_bytes(plan.peak_bytes)} would fit, but CUDA's allocator reserves "
        f"{format_bytes(reserved)} for them, and no other plan was found for which it reserves at "
        f"most {format_bytes(card_bytes)}"
    )
