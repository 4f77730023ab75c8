"""Plans at 10% overhead that really run on this machine's CPU: measured peak, time, gradients.

MONeT's five models at a feasible batch, and small language models: profiled here, planned for the
least memory whose predicted overhead is 10%, run beside eager and beside memopt's step without a
budget, step by step in turn. Images' implementations are those that are exact, so that the
gradients are eager's bit for bit. Kernels' costs are in memopt's cache (MEMOPT_CACHE_DIR), plans in
out/monet-plans: with --until the timings can be taken while the machine is idle, the planning in
between. With --batches the costs are estimated, and steps of up to --most run once, for their peak.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.monet_runs import CASES, Case, Known, Runs, chosen_of
from benchmarks.runner import Benchmark, Line, OneOf
from benchmarks.shapes import VOCABULARY, WithLoss, gpt2_of, llama_of
from benchmarks.steps import CPU, clear, peak_of
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
from memopt.strategies.base import Strategy
from memopt.strategies.monet.rotor_menus import RotorMenus
from memopt.strategies.monet.strategy import Monet
from memopt.strategies.rotor import Rotor
from memopt.strategies.store_all import StoreAll
from tests.zoo import get
from tests.zoo.language import logits_loss

OVERHEAD = 0.1
Way = Callable[[Runs, int], Strategy]
"""The strategy for a budget."""
EXACT, MENUS, ALL_MENUS = Monet(), RotorMenus(), RotorMenus(exact_only=False)
LANGUAGE_WAYS: dict[str, Way] = {
    "Rotor": lambda _runs, _budget: Rotor(),
    "rotor-menus": lambda _runs, _budget: MENUS,
    "MONeT, exact": lambda _runs, _budget: EXACT,
    "MONeT": lambda runs, budget: runs.started(budget, ALL_MENUS, MENUS, EXACT),
}
"""The last starts from the plans of the two before it, and of menus with all implementations."""
IMAGE_WAYS: dict[str, Way] = {"MONeT": lambda _runs, _budget: Monet()}
LANGUAGE = {"gpt2": (8, 256), "llama": (4, 128)}
"""Batch and tokens: logits that fill the memory, or weights."""


def _images(case: Case, batch: int) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = get(case.family).build("paper").train()
    return model, (torch.randn(batch or case.cpu_batch, 3, *case.cpu_pixels),)


def _language(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build four layers of width 256 and a vocabulary that matters, with the loss."""
    batch, tokens = LANGUAGE[name]
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"n_layer": 4, "n_embd": 256, "n_head": 4, "n_positions": tokens}
        model: nn.Module = gpt2_of(**sizes, vocab_size=VOCABULARY)
    else:
        model = llama_of(256, 688, 4, 4, 2, VOCABULARY, tokens)
    words = torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.manual_seed(1))
    return WithLoss(model.train(), logits_loss), {"input_ids": words}


def _run(given: Any, what: str, one: Any) -> list[Line] | None:
    """Give the rows of a model at its batch, or at each of the given ones."""
    rows = [x for batch in given.batches for x in _planned(given, what == "images", one, batch)]
    return rows if given.until == "end" else None


def _planned(given: Any, images: bool, one: Any, batch: int) -> list[Line]:
    """Profile, plan for 10% in each way, and measure beside eager; a row for each way that has a
    plan that only takes 10% more."""
    name = one.family if images else one
    model, inputs = _images(one, batch) if images else _language(one)
    device = find_device("cpu-core") if batch else None
    profiled = estimate_model(model, inputs, device) if device else profile_model(model, inputs)
    options = MeasureOptions(cache=ProfileCache())
    profiled = with_implementations(profiled, exact_only=images, device=device, options=options)
    if given.until == "profile":
        return []
    runs = Runs(name, profiled.graph, given.limit, device=Device())
    rows = []
    for way, strategy_at in (IMAGE_WAYS if images else LANGUAGE_WAYS).items():
        found = runs.memory_at(partial(strategy_at, runs), OVERHEAD)
        if found is not None and given.until == "end":
            budget = found.budget_bytes
            program = runs.program(strategy_at(runs, budget), budget)
            assert program is not None
            label = name if images else f"{name}, {way}"
            plan = _plan(profiled, Known(program))
            if batch > given.most:
                rows.append(_predicted(label, model, inputs, plan))
            else:
                rows.append(measured(label, model, inputs, plan, 0 if batch else given.rounds))
    return rows


def _plan(profiled: Profiled, strategy: Strategy) -> Plan:
    return planning.solve(profiled.graph, None, strategy, device=Device(), profiled=profiled)


def _predicted(name: str, model: nn.Module, inputs: Any, plan: Plan) -> Line:
    free = _plan(plan.profiled, StoreAll())
    kept = 2 * sum(p.nbytes for p in model.parameters())
    over = plan.step_time_s / free.step_time_s - 1
    return Line(
        f"{name} | {_shapes(inputs)} | {free.peak_bytes / MIB:.0f}, predicted | "
        f"{plan.peak_bytes / MIB:.0f}, {NONE} | {plan.peak_bytes / free.peak_bytes:.2f} | "
        f"{over:+.1%}, {NONE} | {NONE} | {NONE} | {NONE} | parameters and their gradients: "
        f"{kept / MIB:.0f} MiB"
    )


def measured(name: str, model: nn.Module, inputs: Any, plan: Plan, rounds: int) -> Line:
    """Run a plan of a profiled model beside eager and beside the plan without a budget."""
    assert plan.profiled is not None
    free = _plan(plan.profiled, StoreAll())
    steps = {
        "eager": _step(model, inputs),
        "free": _step(free.apply(model), inputs),
        "memopt": _step(plan.apply(model), inputs),
    }
    difference, peaks = _difference(model, {way: steps[way] for way in ("eager", "memopt")})
    resident = plan.resident_bytes - backend_of("cpu").step_scalars_bytes
    over: list[float | None] = [None] * len(PAIRS)
    if rounds:
        peaks = [peak_of(model, steps[way], CPU) for way in ("eager", "memopt")]
        times = interleaved(model, steps, rounds, CPU)
        over = [ratio(times, *pair) - 1 for pair in PAIRS]
    eager, peak = (resident + size for size in peaks)
    chosen = chosen_of(plan.profiled.graph, plan.program)
    return Line(
        f"{name} | {_shapes(inputs)} | {eager / MIB:.0f} | {plan.peak_bytes / MIB:.0f}, "
        f"{peak / MIB:.0f} | {peak / eager:.2f} | {plan.step_time_s / free.step_time_s - 1:+.1%}, "
        f"{' | '.join(map(signed, over))} | "
        f"{f'off by {difference:.1e}' if difference else 'bit for bit'} | "
        f"{', '.join(f'{n}× {name}' for name, n in chosen.items()) or 'none'}"
    )


def _step(module: nn.Module, inputs: Any) -> Callable[[], object]:
    def step() -> None:
        torch.manual_seed(3)
        output = module(**inputs) if isinstance(inputs, dict) else module(*inputs)
        loss: Tensor = output if output.ndim == 0 else output.square().mean()
        loss.backward()

    return step


def _difference(
    model: nn.Module, steps: dict[str, Callable[[], object]]
) -> tuple[float, list[int]]:
    """Give the largest difference of two ways' gradients, over the gradient's largest (0: bit for
    bit), and the peaks of these first steps, in bytes above what is live before them."""
    found: list[list[Tensor]] = []
    peaks = []
    for step in steps.values():
        clear(model)
        with metered(CPU) as use:
            step()
        peaks.append(use.peak_bytes)
        found.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
    clear(model)
    worst = 0.0
    for a, b in zip(*found, strict=True):
        if not torch.equal(a, b):
            worst = max(worst, float((a - b).abs().max() / a.abs().max()))
    return worst, peaks


def _shapes(inputs: Any) -> str:
    values = inputs.values() if isinstance(inputs, dict) else inputs
    return ", ".join("×".join(map(str, x.shape)) for x in values)


PAIRS = (("memopt", "free"), ("free", "eager"), ("memopt", "eager"))
HEAD = (
    "model | inputs | eager, MiB | plan: predicted, measured | share | overhead: predicted, "
    "measured | without a budget / eager | plan / eager | gradients | implementations chosen"
)


BENCHMARK = Benchmark(
    cases={
        **{case.family: ("images", case) for case in CASES},
        **{name: ("language", name) for name in LANGUAGE},
    },
    measure=_run,
    head=HEAD,
    selects=("until",),
    options={
        "limit": 30.0,
        "rounds": 9,
        "until": OneOf(("end", "profile", "plans")),
        "batches": (0,),
        "most": 16,
    },
)
