"""Llama shapes whose parameters and AdamW state do not fit, estimated: docs/results/moved_llama.md.

bfloat16 parameters and gradients, two float32 moments, tokens in sequences of 2,048. The step is
captured on fake tensors and priced for the device; an update is priced by the bytes that it reads
and writes, on the device or, at the host's rate, on the host. `joint` plans it with
`movable="all"`, with updates on the host and without, once as a step that ends with everything on
the host and once as one that is repeated (`steady_state=True`). The bound is `link_bound_s`, which
holds for every program of the step; without updates on the host it is in closed form. Steps on
several GPUs, whose parameters and state are sharded, are the ladder's (`memopt fits --ranks`), with
float32 parameters, too.

`long_context`: Llama 3 8B at long sequences on one H100, with tiled kernels, one case a capture.
The step of one sequence, of which only the loss is returned, is captured on fake tensors of few
blocks and priced for the device. With adapters, `dynprog` moves activations to the host, or
recomputes them, `rotor` recomputes; tensors have addresses, so that the allocator adds nothing.
Where all parameters are trained, they and AdamW's state move, and activations are recomputed
(`memopt/api/moved_rungs.py`); the allocator's reserve is simulated. Every plan is validated against
the card's memory before it is a row.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.runner import Benchmark, Line
from benchmarks.shapes import llama
from benchmarks.steps import timed
from memopt.api.cluster import sharded_over
from memopt.api.ladder import ladder
from memopt.api.moved_rungs import moved_plan
from memopt.api.reserved import reserved_bytes
from memopt.api.solving import solve
from memopt.errors import MemoptError
from memopt.models.bounds import time_lower_bound
from memopt.models.budget import Budget, format_bytes
from memopt.models.device import Device
from memopt.models.graph import Graph, Implementation, Phase, TensorKind
from memopt.models.options import Pricing, StepOptions
from memopt.models.presets import GH200, H100
from memopt.plan_record import PlanRecord
from memopt.profiler.estimate import estimate_model
from memopt.profiler.variants import StepVariant, Variants
from memopt.profiler.variants import whole_step as with_updates
from memopt.programs.moved import carried_over
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.report.ladder import busy_shares
from memopt.stages import profiled_for
from memopt.step.host_updates import ON_HOST, with_choices
from memopt.step.loss import Loss
from memopt.step.optimizer_state import OptimizerState
from memopt.strategies import resolve
from memopt.strategies.joint.strategy import Joint
from memopt.strategies.moving.bound import link_bound_s
from memopt.strategies.moving.on_host import without_host_updates
from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

STATE_BYTES = 8
"""Of AdamW's two float32 moments, for each element."""
BATCHES = {"8b": 8, "70b": 4, "405b": 2}
"""Shape of Llama 3 → sequences of 2,048 tokens, of each GPU."""
LENGTH = 2048
ALONE, SHARDED = ("8b", "70b"), {"70b": 8, "405b": 64}


def whole_step(graph: Graph, device: Device) -> Graph:
    """Give an estimated step updates of its parameters, which the host can run, too."""
    parameters = [t for t in graph.tensors if t.kind is TensorKind.PARAMETER]
    state_bytes = STATE_BYTES * sum(t.size_bytes for t in parameters) // torch.bfloat16.itemsize
    graph = with_updates(graph, OptimizerState("adamw-fp32", state_bytes), device)
    return with_choices(graph, _on_host(graph, device))


def _on_host(graph: Graph, device: Device) -> dict[str, Implementation]:
    """Give the same updates by the host."""
    rate, found = device.host_update_bytes_per_s, {}
    for operator in graph.operators:
        if operator.phase is Phase.UPDATE:
            sizes = {t: graph.tensors[t].size_bytes for t in operator.reads}
            held = sum(size for t, size in sizes.items() if t in graph.resident)
            time_s = (sum(sizes.values()) + held) / rate
            found[operator.name] = Implementation(
                ON_HOST, time_s, 0, (), (), exact=False, on_host=True
            )
    return found


def _model(given: Any, name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        model = llama(f"llama-3-{name}", layers=given.layers).to(torch.bfloat16)
        tokens = torch.zeros(BATCHES[name], LENGTH, dtype=torch.long)
    return model, {"input_ids": tokens, "labels": tokens}


def _sharded(given: Any, name: str, device: Device, ranks: int) -> list[Line]:
    model, inputs = _model(given, name)
    how = {"only": "asked", "ranks": ranks, "device": device, "progress": False}
    how |= {"optimizer": "adamw-fp32", "step": StepOptions(loss_fn=lambda output: output.loss)}
    found, wall_s, cpu_s = timed(lambda: ladder(model, inputs, **how))
    rung = found.best_as_asked()
    shares = ", ".join(f"{what} {share:.0%}" for what, share in rung.busy.items())
    graph = rung.plan.graph
    return [
        Line(
            f"{name} on {ranks} | {device.name} | {ranks * BATCHES[name] * LENGTH:,} | "
            f"{format_bytes(graph.movable_bytes)} | **{rung.step_time_s:.2f}** | "
            f"{rung.samples_per_s:,.0f} | - | - | - | {time_lower_bound(graph):.2f} | "
            f"**{max(rung.busy, key=lambda what: rung.busy[what])}** ({shares}) | "
            f"{format_bytes(rung.host_bytes)} | - | {rung.name} | {wall_s:.0f} / {cpu_s:.0f}"
        )
    ]


def _planned(given: Any, name: str, device: Device, ranks: int = 1) -> list[Line]:
    if ranks > 1:
        return _sharded(given, name, device, ranks)
    model, inputs = _model(given, name)
    profiled = estimate_model(model, inputs, device, loss=Loss(lambda output: output.loss))
    graph = whole_step(profiled.graph, device)
    steps = (replace(graph, repeated=repeated) for repeated in (False, True))
    return [row(name, step, device, given.limit) for step in steps]


def row(name: str, graph: Graph, device: Device, limit_s: float) -> Line:
    """Plan a step, and say what binds there."""
    budget = device.capacity_bytes
    how = {"device": device, "time_limit_s": limit_s}
    joint = Joint(exact_only=False)
    found, wall_s, cpu_s = timed(lambda: joint.solve(graph, budget, **how))
    tokens = BATCHES[name] * LENGTH
    if found.program is None:
        least = format_bytes(found.smallest_budget_bytes or 0)
        none = f"no plan; the smallest budget known is {least}"
        return Line(" | ".join([name, device.name, none, *[""] * 12]))
    violation = validate(graph, found.program, Budget(budget))
    assert violation is None, violation
    timeline = replay(graph, found.program, device)
    binds = busy_shares(graph, found.program, device)
    bound_s = link_bound_s(graph, budget, device)
    closed_s = link_bound_s(without_host_updates(graph), budget, device)
    shares = ", ".join(f"{what} {share:.0%}" for what, share in binds.items())
    left = carried_over(graph, found.program)
    stays = format_bytes(sum(graph.tensors[t].size_bytes for t in left)) if left else "-"
    return Line(
        f"{name}{', repeated' * graph.repeated} | {device.name} | {tokens:,} | "
        f"{format_bytes(graph.movable_bytes)} | **{timeline.time_s:.2f}** | "
        f"{tokens / timeline.time_s:,.0f} | {bound_s:.2f} | {closed_s:.2f} | "
        f"{timeline.time_s / bound_s:.2f} | {time_lower_bound(graph):.2f} | "
        f"**{max(binds, key=lambda what: binds[what])}** ({shares}) | "
        f"{format_bytes(timeline.host_peak_bytes)} | {stays} | {found.stats.get('source')} | "
        f"{wall_s:.0f} / {cpu_s:.0f}"
    )


WAYS = {"dynprog": "activations moved or recomputed", "rotor": "activations recomputed"}
OPTIMIZERS = ("adamw", "adamw-8bit")
RANK, CAPACITY = 16, H100.capacity_bytes


def _variants(tokens: int) -> Variants:
    with torch.device("meta"):
        model = llama("llama-3-8b", max_position_embeddings=tokens).to(torch.bfloat16)
        ids = torch.zeros(1, tokens, dtype=torch.long)
    inputs, step = {"input_ids": ids, "labels": ids}, StepOptions(returns="loss")

    def price(built: Any, given: Any, kernels: str) -> Any:
        how = Pricing(H100, "estimate", kernels)
        return profiled_for(built, given, step, how, H100, lambda _share, _what: None)

    return Variants(model, inputs, H100, price, sharded_over)


def _adapters(tokens: int) -> list[Line]:
    step = _variants(tokens).step(StepVariant(rank=RANK, tiled=True))
    figures = step.with_optimizer("adamw")
    held = step.graph.extra_resident_bytes + figures.state.bytes_total
    graph, lines = replace(step.graph, extra_resident_bytes=held), []
    for name, how in WAYS.items():
        said = f"LoRA r={RANK}, AdamW; {how}"
        try:
            plan = solve(graph, CAPACITY, resolve(name), device=H100, place=True)
        except (MemoptError, ValueError) as error:
            lines.append(_none(said, tokens, str(error).partition(" (")[0]))
            continue
        seconds = plan.step_time_s + figures.update_s(H100)
        lines.append(_long(said, tokens, plan, seconds, plan.peak_bytes))
    return lines


def _everything(tokens: int) -> list[Line]:
    variants, lines = _variants(tokens), []
    for name in OPTIMIZERS:
        graph = variants.movable(StepVariant(tiled=True), name)
        plan = moved_plan(graph, CAPACITY, H100)
        said = f"all parameters, {name}; state and parameters moved, activations recomputed"
        if isinstance(plan, PlanRecord):
            lines.append(_long(said, tokens, plan, plan.step_time_s, reserved_bytes(plan)))
        else:
            lines.append(_none(said, tokens, "no plan found"))
    return lines


def _none(said: str, tokens: int, why: str) -> Line:
    return Line(" | ".join([said, f"{tokens:,}", why, *[""] * 5]))


def _long(said: str, tokens: int, plan: PlanRecord, seconds: float, reserved: int) -> Line:
    wrong = validate(plan.graph, plan.program, Budget(CAPACITY))
    return Line(
        f"{said} | {tokens:,} | {format_bytes(plan.peak_bytes)} | {format_bytes(reserved)} | "
        f"{format_bytes(plan.host_peak_bytes)} | **{seconds:.0f}** | {tokens / seconds:,.0f} | "
        f"{plan.overhead:+.1%}",
        "" if wrong is None else str(wrong),
    )


BENCHMARK = Benchmark(
    cases={f"{name} {device.name}": (name, device) for name in ALONE for device in (H100, GH200)}
    | {f"{name} on {ranks} {H100.name}": (name, H100, ranks) for name, ranks in SHARDED.items()},
    measure=_planned,
    head="shape | device | tokens | parameters and state | step s | tokens/s | bound s | "
    "link bound s, updates on the device | step / bound | compute s | busiest | host memory | "
    "stays between steps | made from | planning s (wall / CPU)",
    summary=lambda *_: f"H100: {H100.source}. GH200: {GH200.source}.",
    options={"limit": 50.0, "layers": int},
)
LONG_CONTEXT = Benchmark(
    cases={"LoRA 500,000": (_adapters, 500_000), "all parameters 131,072": (_everything, 131_072)},
    measure=lambda _given, way, tokens: way(tokens),
    head="what is trained | tokens | peak | reserved | host memory | step s | tokens/s | "
    "beside every operator once",
    summary=lambda *_: f"{H100.name}, {format_bytes(CAPACITY)}: {H100.source}.",
)
