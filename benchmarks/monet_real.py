"""Plans at 10% overhead that really run on this machine's CPU: measured peak, time, gradients.

MONeT's five models at a feasible batch: profiled here, planned for the least memory whose predicted
overhead is 10%, run beside eager and beside memopt's step without a budget, step by step in turn.
Implementations are those that are exact, so that the gradients are eager's bit for bit. Kernels'
costs are kept in memopt's cache (MEMOPT_CACHE_DIR). With --batches the costs are estimated, and
steps of up to MOST images run once, for their peak.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.monet_runs import CASES, OVERHEAD, Case, Runs, chosen_of
from benchmarks.runner import Benchmark, Line, crossed
from benchmarks.steps import CPU, Step, clear, difference, gradients, peak_of
from benchmarks.table import MIB, NONE, interleaved, ratio, signed
from memopt.api import planning
from memopt.api.plan import Plan
from memopt.kernels import with_implementations
from memopt.models.device import Device
from memopt.models.presets import find_device
from memopt.pricing.cache import ProfileCache
from memopt.pricing.measure import MeasureOptions
from memopt.pricing.memory import metered
from memopt.profiler.estimate import estimate_model
from memopt.profiler.session import profile_model
from memopt.step.backend import backend_of
from memopt.step.profiled import Profiled
from memopt.strategies.monet.strategy import Monet
from memopt.strategies.store_all import StoreAll
from tests.zoo import get

MOST, WAYS = 16, ("eager", "memopt")
PAIRS = (("memopt", "free"), ("free", "eager"), ("memopt", "eager"))


def _planned(given: Any, case: Case, batch: int) -> list[Line]:
    """Profile, plan for 10%, and measure beside eager; no row: every plan takes more."""
    torch.manual_seed(0)
    model = get(case.name).build("paper").train()
    images = torch.randn(batch or case.cpu_batch, 3, *case.cpu_pixels)
    device = find_device("cpu-core") if batch else None
    profiled = estimate_model(model, images, device) if device else profile_model(model, images)
    options = MeasureOptions(cache=ProfileCache())
    profiled = with_implementations(profiled, exact_only=True, device=device, options=options)
    runs = Runs(case.name, profiled.graph, given.limit, Device(), profiled)
    found = runs.memory_at(Monet(), OVERHEAD)
    if found is None:
        return []
    plan = runs.plan(Monet(), found.budget_bytes)
    assert plan is not None
    if batch > MOST:
        return [_predicted(case.name, model, images, plan)]
    return [measured(case.name, model, images, plan, 0 if batch else given.rounds)]


def _without_budget(profiled: Profiled) -> Plan:
    return planning.solve(profiled.graph, None, StoreAll(), device=Device(), profiled=profiled)


def _predicted(name: str, model: nn.Module, images: Tensor, plan: Plan) -> Line:
    free = _without_budget(plan.profiled)
    kept = 2 * sum(p.nbytes for p in model.parameters())
    over = plan.step_time_s / free.step_time_s - 1
    return Line(
        f"{name} | {_shape(images)} | {free.peak_bytes / MIB:.0f}, predicted | "
        f"{plan.peak_bytes / MIB:.0f}, {NONE} | {plan.peak_bytes / free.peak_bytes:.2f} | "
        f"{over:+.1%}, {NONE} | {NONE} | {NONE} | {NONE} | parameters and their gradients: "
        f"{kept / MIB:.0f} MiB"
    )


def measured(name: str, model: nn.Module, images: Tensor, plan: Plan, rounds: int) -> Line:
    """Run a plan of a profiled model beside eager and beside the plan without a budget."""
    assert plan.profiled is not None
    free = _without_budget(plan.profiled)
    steps = {
        "eager": _step(model, images),
        "free": _step(free.apply(model), images),
        "memopt": _step(plan.apply(model), images),
    }
    firsts = [_first(model, steps[way]) for way in WAYS]
    differs, peaks = difference(*(found for found, _ in firsts)), [peak for _, peak in firsts]
    resident = plan.resident_bytes - backend_of("cpu").step_scalars_bytes
    over: list[float | None] = [None] * len(PAIRS)
    if rounds:
        peaks = [peak_of(model, steps[way], CPU) for way in WAYS]
        times = interleaved(model, steps, rounds, CPU)
        over = [ratio(times, *pair) - 1 for pair in PAIRS]
    eager, peak = (resident + size for size in peaks)
    chosen = chosen_of(plan.profiled.graph, plan.program)
    return Line(
        f"{name} | {_shape(images)} | {eager / MIB:.0f} | {plan.peak_bytes / MIB:.0f}, "
        f"{peak / MIB:.0f} | {peak / eager:.2f} | {plan.step_time_s / free.step_time_s - 1:+.1%}, "
        f"{' | '.join(map(signed, over))} | "
        f"{f'off by {differs:.1e}' if differs else 'bit for bit'} | "
        f"{', '.join(f'{n}× {name}' for name, n in chosen.items()) or 'none'}"
    )


def _step(module: nn.Module, images: Tensor) -> Step:
    def step() -> None:
        torch.manual_seed(3)
        module(images).square().mean().backward()

    return step


def _first(model: nn.Module, step: Step) -> tuple[dict[str, Tensor], int]:
    """Give the gradients of a way's first step, and its peak in bytes above what is live before."""
    clear(model)
    with metered(CPU) as use:
        step()
    found = gradients(model)
    clear(model)
    return found, use.peak_bytes


def _shape(images: Tensor) -> str:
    return "×".join(map(str, images.shape))


BENCHMARK = Benchmark(
    cases=lambda given: crossed(CASES, given.batches),
    measure=_planned,
    head="model | inputs | eager, MiB | plan: predicted, measured | share | overhead: predicted, "
    "measured | without a budget / eager | plan / eager | gradients | implementations chosen",
    options={"limit": 30.0, "rounds": 9, "batches": (0,)},
    selects=("batches",),
)
