"""The ladder: ways to make a training step fit a device, in the order of their cost in tokens/s."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from memopt.api.cluster import examples_of, sharded_over, tokens_of
from memopt.api.moved_rungs import moved_plan
from memopt.api.reserved import holding, reserved_bytes, soon_within_card
from memopt.api.solving import budget_on, reporting_on, solve
from memopt.errors import InfeasibleBudgetError, MemoptError
from memopt.models.device import Device
from memopt.models.garbage import full_collections_deferred
from memopt.models.graph import Graph
from memopt.models.optimizer_names import in_8_bits, optimizer_name
from memopt.models.options import Pricing, StepOptions
from memopt.models.progress import Progress
from memopt.plan_record import PlanRecord
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.report.ladder import (
    CHUNKED,
    FEWER_BITS,
    FROZEN,
    MOVED,
    OFFLOAD,
    RECOMPUTE,
    TILED,
    Ladder,
    Rung,
    busy_shares,
    memory_parts,
    offload_pays,
    trained_otherwise,
)
from memopt.stages import profiled_for
from memopt.strategies import resolve
from memopt.strategies.target import chain_view

if TYPE_CHECKING:
    from memopt.profiler.variants import StepVariant, VariantStep
    from memopt.reductions.chain_view import ChainView

Only: TypeAlias = Literal["all", "asked", "devices"]
_SAVES = 0.97
"""A loss in chunks that leaves more of the peak than this is planned no further."""
_MOST_SLOWER = 1.5
"""Activations are not moved where that surely takes so much longer than recomputing them."""
_WAYS = {"store-all": "", "rotor": RECOMPUTE, "dynprog": OFFLOAD}
"""Strategy → how a rung says that it is used."""


@dataclass(frozen=True)
class _Way:
    """A rung to try: the changes of the step, and their names."""

    variant: StepVariant
    optimizer: str | None
    chunked: bool
    said: tuple[str, ...]


@dataclass(frozen=True)
class LadderRequest:
    """What a ladder is asked for."""

    device: Device
    budget_bytes: int
    optimizer: str | None = None
    lora: int = 0
    ranks: int = 1
    dtype: str | None = None


@full_collections_deferred()
def ladder(
    model: Any,
    inputs: Any,
    *,
    device: Device | str,
    budget: int | str | None = None,
    optimizer: str | None = "adamw",
    lora: int = 0,
    rank: int = 16,
    ranks: int = 1,
    step: StepOptions | None = None,
    only: Only = "all",
    progress: bool | Progress = True,
    heard: Callable[[Rung], None] | None = None,
) -> Ladder:
    """Estimate whether a step fits a device, what takes the memory, and how to make it fit.

    Args:
        model: an nn.Module, which stays as it is; it may be on meta.
        inputs: of one device's step: a tensor, a tuple of positional or a dict of keyword
            arguments.
        device: a preset's name or a Device.
        budget: total device memory; None: the device's capacity.
        optimizer: a name, or None.
        lora: rank of the adapters that the step is trained with; 0: it trains the parameters.
        rank: of the adapters that a rung may add.
        ranks: devices that parameters are sharded over; rungs may take more of them.
        step: your loss and its targets, and what the step returns.
        only: "asked": no change but recomputed and moved activations; "devices": and more devices.
        progress: True shows a bar on a terminal; or your own callback.
        heard: is called with each rung as soon as it is known.

    Raises:
        ValueError: no capacity, an unknown optimizer. CaptureError: as in `memopt.plan`.
    """
    place, limit = budget_on(device, budget)
    if optimizer is not None and not isinstance(optimizer, str):
        raise ValueError("the ladder changes the optimizer: name it, such as optimizer='adamw'")
    name = None if optimizer is None else optimizer_name(optimizer)
    asked = LadderRequest(place, limit, name, lora, ranks, _dtype_of(model))
    with reporting_on(progress) as report:
        made = _LadderMaker(asked, model, inputs, step or StepOptions(), report)
        return made.ladder(rank, only, heard or (lambda _rung: None))


def _dtype_of(model: Any) -> str | None:
    dtypes = [str(p.dtype) for p in model.parameters() if p.is_floating_point()]
    most = max(dtypes, key=dtypes.count, default=None)
    return None if most is None else most.removeprefix("torch.")


class _LadderMaker:
    """Tries ways to fit; see `ladder`."""

    def __init__(
        self, asked: LadderRequest, model: Any, inputs: Any, step: StepOptions, report: Progress
    ) -> None:
        from memopt.profiler.variants import Variants

        self._asked, self._inputs = asked, inputs

        def price(built: Any, given: Any, kernels: str) -> Any:
            how = Pricing(asked.device, "estimate", kernels)
            return profiled_for(built, given, step, how, asked.device, lambda _s, _w: None)

        self._variants = Variants(model, inputs, asked.device, price, sharded_over)
        self._report = report
        self._peaks: dict[_Way, int] = {}
        self._views: dict[int, tuple[Graph, ChainView]] = {}
        self._beside_bytes = 0

    def ladder(self, rank: int, only: Only, heard: Callable[[Rung], None]) -> Ladder:
        """Try every way, the asked one first."""
        asked = self._asked
        ways = list(self._ways(rank))
        if only != "all":
            own = ways[0].variant
            ways = [w for w in ways if not w.chunked and w.optimizer == asked.optimizer]
            if only == "asked":
                ways = [w for w in ways if replace(w.variant, tiled=False) == own]
            else:
                ways = [w for w in ways if replace(w.variant, ranks=own.ranks) == own]
        rungs: list[Rung] = []
        for number, way in enumerate(ways):
            self._report(number / len(ways), ", ".join(way.said) or "as asked")
            if _needless(way, rungs, asked.ranks):
                continue
            for rung in self._rungs(way, offload_pays(rungs)):
                rungs.append(rung)
                heard(rung)
        if (first := self._graph(ways[0])) is None:
            raise MemoptError("nothing was estimated")
        whole, held_bytes, step = first
        whole = replace(whole, extra_resident_bytes=held_bytes + whole.extra_resident_bytes)
        rungs.sort(key=lambda r: (not r.fits, -r.rate_of_one, r.needed_bytes or 0))
        return Ladder(
            device=asked.device,
            budget_bytes=asked.budget_bytes,
            ranks=asked.ranks,
            dtype=asked.dtype,
            optimizer=asked.optimizer,
            lora=asked.lora,
            unit="tokens/s" if tokens_of(self._inputs) else "examples/s",
            parts=memory_parts(whole, step.with_optimizer(asked.optimizer).state.parts),
            rungs=tuple(rungs),
            notes=step.notes,
        )

    def _ways(self, rank: int) -> Iterator[_Way]:
        """Yield the ways, the asked one first: each changes what the next one keeps."""
        from memopt.profiler.variants import StepVariant

        asked = self._asked
        own = StepVariant(rank=asked.lora, ranks=asked.ranks)
        first: tuple[str, ...] = ()
        yield _Way(own, asked.optimizer, False, ())
        if asked.dtype == "float32":
            yield from self._tiles(own, first)
            own, first = replace(own, dtype="bfloat16"), ("bfloat16",)
            yield _Way(own, asked.optimizer, False, first)
        yield _Way(own, asked.optimizer, True, (*first, CHUNKED))
        yield from self._tiles(own, first)
        fewer = None if asked.optimizer is None else in_8_bits(asked.optimizer)
        if fewer is not None and not asked.lora:
            said = (*first, FEWER_BITS)
            yield _Way(own, fewer, False, said)
            yield _Way(own, fewer, True, (*said, CHUNKED))
        adapted = replace(own, rank=asked.lora or rank)
        name = f"LoRA r={adapted.rank}"
        if not asked.lora:
            yield _Way(adapted, asked.optimizer, False, (*first, name))
            yield _Way(adapted, asked.optimizer, True, (*first, name, CHUNKED))
            yield from self._tiles(adapted, (*first, name))
        if asked.ranks == 1:
            packed = replace(adapted, quantized=True)
            yield _Way(packed, asked.optimizer, False, (*first, f"Q{name}"))
            yield _Way(packed, asked.optimizer, True, (*first, f"Q{name}", CHUNKED))
        if asked.device.network is not None:
            for ranks in (2, 4, 8, 16, 32, 64):
                if ranks > asked.ranks:
                    said = (*first, f"sharded over {ranks}")
                    yield _Way(replace(own, ranks=ranks), asked.optimizer, False, said)

    def _tiles(self, variant: StepVariant, said: tuple[str, ...]) -> Iterator[_Way]:
        from memopt.kernels.tiled.kernel import LEAST_ROWS_OF_ACCELERATORS as LEAST

        if tokens_of(self._inputs) >= 2 * LEAST:
            variant = replace(variant, tiled=True)
            yield _Way(variant, self._asked.optimizer, False, (*said, TILED))

    def _graph(self, way: _Way) -> tuple[Graph, int, VariantStep] | None:
        """Return the graph of a way's step without its optimizer's state, the bytes of that state,
        and the step. Ways that differ in the optimizer share the graph."""
        step = self._variants.step(way.variant)
        graph = step.chunked if way.chunked else step.graph
        if graph is None:
            return None
        return graph, step.with_optimizer(way.optimizer).state.bytes_total, step

    def _view(self, graph: Graph) -> ChainView:
        if id(graph) not in self._views:
            self._views[id(graph)] = graph, chain_view(graph)
        return self._views[id(graph)][1]

    def _holds(self, way: _Way) -> int | None:
        """Return the bytes that a way holds whatever the plan, where that is known before its step
        is captured: of sharded parameters, from those of fewer ranks."""
        variant = way.variant
        if variant.ranks <= self._asked.ranks:
            return None
        step = self._variants.step(replace(variant, ranks=self._asked.ranks))
        figures = step.with_optimizer(way.optimizer)
        held = figures.parameter_bytes + figures.trained_bytes + figures.state.bytes_total
        return held * self._asked.ranks // variant.ranks

    def _rungs(self, way: _Way, offload: bool) -> Iterator[Rung]:
        """Yield the rungs of one way to run the step: unchanged, or, if that does not fit, with its
        activations recomputed or moved (the latter if nothing is recomputed within the budget, or
        for `offload`)."""
        budget = self._asked.budget_bytes
        if (self._holds(way) or 0) > budget:
            return
        found = self._graph(way)
        if found is None:
            return
        graph, held_bytes, step = found
        peak = replay(graph, store_all(graph)).peak_bytes + held_bytes
        self._peaks[replace(way, said=())] = peak
        solve_for = partial(self._solve, graph, held_bytes)
        if peak <= budget:
            plan = solve_for("store-all", budget)
            peak = max(peak, reserved_bytes(plan))
            if peak <= max(budget, self._asked.device.capacity_bytes or peak):
                yield self._rung(way, step, plan, "store-all")
                return
        yield _unfit(way, "", peak)
        if way.chunked and peak > _SAVES * self._peaks.get(replace(way, said=(), chunked=False), 0):
            return
        found_plan: PlanRecord | None = None
        room = budget - held_bytes
        for strategy in ("rotor", "dynprog") if graph.resident_bytes < room else ():
            if strategy == "dynprog" and not self._may_move(peak - budget, found_plan, offload):
                continue
            try:
                found_plan = plan = self._solved(partial(solve_for, strategy))
            except InfeasibleBudgetError as error:
                least = error.smallest_budget_bytes
                yield _unfit(way, _WAYS[strategy], None if least is None else least + held_bytes)
            except (ValueError, MemoptError):
                continue  # not a chain, or no transfers in such a step
            else:
                yield self._rung(way, step, plan, strategy)
        if found_plan is None and not way.chunked:
            yield from self._moved(way, step)

    def _may_move(self, excess_bytes: int, recomputing: PlanRecord | None, offload: bool) -> bool:
        """Whether moved activations are worth a plan, beside one that recomputes: what exceeds the
        budget goes to the host before the peak and comes back after it."""
        device = self._asked.device
        if recomputing is None or not device.is_linked:
            return device.is_linked
        moved_s = device.swap_out_time_s(excess_bytes) + device.swap_in_time_s(excess_bytes)
        return offload and moved_s <= _MOST_SLOWER * recomputing.step_time_s

    def _moved(self, way: _Way, step: VariantStep) -> Iterator[Rung]:
        """Yield the rung with parameters and state on the host, where no other plan of it fits."""
        device, what = self._asked.device, FROZEN if way.variant.rank else MOVED
        if not device.is_linked or way.variant.quantized:
            return
        try:
            graph = self._variants.movable(way.variant, way.optimizer)
            found = moved_plan(graph, self._asked.budget_bytes, device)
        except (ValueError, MemoptError):
            return  # not a chain
        if isinstance(found, PlanRecord):
            time_s = None if way.variant.rank else found.step_time_s
            yield self._rung(way, step, found, "rotor", what, time_s)
        else:
            yield _unfit(way, what, found)

    def _solved(self, solve_for: Callable[[int], PlanRecord]) -> PlanRecord:
        asked, card_bytes = self._asked, self._asked.device.capacity_bytes
        # Like steps leave like gaps between the budget and what is reserved.
        plan = soon_within_card(solve_for, asked.budget_bytes, card_bytes, self._beside_bytes)
        if plan.budget is not None and self._beside_bytes == 0:
            self._beside_bytes = max(0, reserved_bytes(plan) - plan.budget)
        return plan

    def _solve(self, graph: Graph, held_bytes: int, strategy: str, budget_bytes: int) -> PlanRecord:
        """Plan a graph beside so many bytes that stay during the whole step."""
        device, chosen = self._asked.device, resolve(strategy)
        view = None if strategy == "store-all" else self._view(graph)
        budget_bytes = max(1, budget_bytes - held_bytes)
        return holding(solve(graph, budget_bytes, chosen, device=device, view=view), held_bytes)

    def _rung(
        self,
        way: _Way,
        step: VariantStep,
        plan: PlanRecord,
        strategy: str,
        how: str | None = None,
        whole_s: float | None = None,
    ) -> Rung:
        figures, device = step.with_optimizer(way.optimizer), self._asked.device
        time_s = plan.step_time_s + figures.update_s(device) if whole_s is None else whole_s
        samples = tokens_of(self._inputs) or examples_of(self._inputs)
        return Rung(
            changes=_said(way, how or _WAYS[strategy]),
            fits=True,
            strategy=strategy,
            peak_bytes=plan.peak_bytes,
            needed_bytes=plan.peak_bytes,
            step_time_s=time_s,
            samples_per_s=samples * way.variant.ranks / time_s,
            ranks=way.variant.ranks,
            trained=figures.trained,
            host_bytes=plan.host_peak_bytes,
            busy=busy_shares(plan.graph, plan.program, device) if plan.host_peak_bytes else {},
            plan=plan,
        )


def _needless(way: _Way, rungs: list[Rung], ranks: int) -> bool:
    """Whether a rung that fits makes this way needless: the step as asked; the same way without its
    loss in chunks; for tiles, a rung that trains the same; or a rung on fewer devices (if `ranks`
    is several, one that trains the same)."""
    whole = {rung.changes for rung in rungs if rung.fits and rung.strategy == "store-all"}
    more = [rung.fits for rung in rungs if rung.ranks > ranks or (ranks > 1 and rung.is_as_asked)]
    same = any(
        r.fits and trained_otherwise(r.changes) == trained_otherwise(way.said) for r in rungs
    )
    if (way.variant.ranks > ranks and any(more)) or (way.variant.tiled and same):
        return True
    own = tuple(one for one in way.said if one != CHUNKED)
    return (() in whole and way.said != ("bfloat16",)) or (way.chunked and own in whole)


def _said(way: _Way, more: str) -> tuple[str, ...]:
    return (*way.said, *([more] if more else []))


def _unfit(way: _Way, more: str, needed: int | None) -> Rung:
    return Rung(_said(way, more), False, needed_bytes=needed, ranks=way.variant.ranks)
