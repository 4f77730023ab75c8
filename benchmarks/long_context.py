"""Llama 3 8B at long sequences on one H100, estimated with tiled kernels: one case a capture.

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
from memopt.api.cluster import sharded_over
from memopt.api.moved_rungs import moved_plan
from memopt.api.reserved import reserved_bytes
from memopt.api.solving import solve
from memopt.errors import MemoptError
from memopt.models.budget import Budget, format_bytes
from memopt.models.options import Pricing, StepOptions
from memopt.models.presets import H100
from memopt.plan_record import PlanRecord
from memopt.profiler.variants import StepVariant, Variants
from memopt.programs.validate import validate
from memopt.stages import profiled_for
from memopt.strategies import resolve
from tests.zoo import torchvision_shim  # noqa: F401 (before transformers)

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
        lines.append(_line(said, tokens, plan, seconds, plan.peak_bytes))
    return lines


def _everything(tokens: int) -> list[Line]:
    variants, lines = _variants(tokens), []
    for name in OPTIMIZERS:
        graph = variants.movable(StepVariant(tiled=True), name)
        plan = moved_plan(graph, CAPACITY, H100)
        said = f"all parameters, {name}; state and parameters moved, activations recomputed"
        if isinstance(plan, PlanRecord):
            lines.append(_line(said, tokens, plan, plan.step_time_s, reserved_bytes(plan)))
        else:
            lines.append(_none(said, tokens, "no plan found"))
    return lines


def _none(said: str, tokens: int, why: str) -> Line:
    return Line(" | ".join([said, f"{tokens:,}", why, *[""] * 5]))


def _line(said: str, tokens: int, plan: PlanRecord, seconds: float, reserved: int) -> Line:
    wrong = validate(plan.graph, plan.program, Budget(CAPACITY))
    return Line(
        f"{said} | {tokens:,} | {format_bytes(plan.peak_bytes)} | {format_bytes(reserved)} | "
        f"{format_bytes(plan.host_peak_bytes)} | **{seconds:.0f}** | {tokens / seconds:,.0f} | "
        f"{plan.overhead:+.1%}",
        "" if wrong is None else str(wrong),
    )


BENCHMARK = Benchmark(
    cases={"LoRA 500,000": (_adapters, 500_000), "all parameters 131,072": (_everything, 131_072)},
    measure=lambda _given, way, tokens: way(tokens),
    head="what is trained | tokens | peak | reserved | host memory | step s | tokens/s | "
    "beside every operator once",
    summary=lambda *_: f"{H100.name}, {format_bytes(CAPACITY)}: {H100.source}.",
)
