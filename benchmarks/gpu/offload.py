"""Offloaded plans on a GPU: measured peak and time beside the prediction and two peers.

A plan of `offload-graph` at floor + share·(baseline − floor) runs with the process's memory
limited to its budget; where the caching allocator's own fragmentation does not fit, the limit is
raised in steps of 5% and the one that held is shown. Peers: `save_on_cpu(pin_memory=True)` and
streamed saved-tensor hooks. On CPU the plans run with worker threads, and the peers that copy to
host memory have no peak of their own to show.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

import memopt
from benchmarks.gpu.hooks import StreamedHooks
from benchmarks.steps import interleaved, peak_of
from memopt.profiler import Loss, profile_model
from tests.zoo import FAMILIES, Family, call

MODELS = ("resnet50", "vit_b_16", "gpt2")
LIMITS = (1.0, 1.05, 1.1, 1.2)


@dataclass(frozen=True)
class Row:
    """One way to train one model. Bytes are totals; None: not known or not applicable. The
    prediction of the eager step is the sum of its kernels: what it takes beyond is the framework's.
    """

    model: str
    way: str
    budget_bytes: int | None
    predicted_bytes: int | None
    peak_bytes: int | None
    predicted_s: float | None
    step_s: float
    limit: float | None


def stepper(family: Family, module: nn.Module, inputs: Any, around: Callable[[], Any]) -> Any:
    """One forward, loss and backward inside a context."""

    def step() -> None:
        with around():
            family.loss(call(module, inputs)).backward()

    return step


@contextlib.contextmanager
def limited(device: torch.device, limit_bytes: float) -> Iterator[None]:
    """The process may hold at most so many bytes of the GPU meanwhile; nothing on CPU."""
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def limit_that_held(step: Callable[[], Any], budget: int, device: torch.device) -> float | None:
    """The least of LIMITS, in budgets, under which a step ran; None: none did, or no GPU."""
    if device.type != "cuda":
        return None
    for limit in LIMITS:
        try:
            with limited(device, limit * budget):
                step()
        except torch.cuda.OutOfMemoryError:
            continue
        return limit
    return None


def peers(model: nn.Module, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Other people's ways, as contexts around a step."""
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {"eager": contextlib.nullcontext}
    pin = device.type == "cuda"
    ways["save_on_cpu"] = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin)
    if device.type == "cuda":
        held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        ways["streamed hooks"] = lambda: StreamedHooks(held, device)
    return ways


def measure(
    name: str, size: Any, device: torch.device, shares: tuple[float, ...], rounds: int
) -> list[Row]:
    """All rows of one model."""
    family = next(f for f in FAMILIES if f.name == name)
    model = family.build(size).to(device)
    inputs = pytree.tree_map(
        lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, family.inputs(size)
    )
    link = memopt.measure_device(device)
    profiled = profile_model(model, inputs, loss=Loss(family.loss))
    baseline = profiled.baseline.peak_bytes
    floor = memopt.plan(
        profiled, budget="min", strategy="offload-graph", device=link, progress=False
    ).peak_bytes
    plans = {}
    for share in shares:
        budget = floor + int(share * max(0, baseline - floor))
        plans[f"memopt {share:g}"] = memopt.plan(
            profiled, budget=budget, strategy="offload-graph", device=link, progress=False
        )
    steps = {
        way: stepper(family, model, inputs, around) for way, around in peers(model, device).items()
    }
    for way, plan in plans.items():
        steps[way] = stepper(family, plan.apply(model), inputs, contextlib.nullcontext)
    resident = next(iter(plans.values())).resident_bytes
    kernels_s = profiled.graph.compute_time_s
    times = interleaved(model, steps, rounds, device)
    rows = []
    for way, step in steps.items():
        plan = plans.get(way)
        apart = device.type == "cuda" or plan is not None or way == "eager"
        rows.append(
            Row(
                model=name,
                way=way,
                budget_bytes=None if plan is None else plan.budget,
                predicted_bytes=None if plan is None else plan.peak_bytes,
                peak_bytes=resident + peak_of(model, step, device) if apart else None,
                predicted_s=plan.step_time_s if plan else kernels_s if way == "eager" else None,
                step_s=statistics.median(times[way]),
                limit=None
                if plan is None or plan.budget is None
                else limit_that_held(step, plan.budget, device),
            )
        )
    return rows


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""

    def mib(value: int | None) -> str:
        return "" if value is None else f"{value / 2**20:.1f}"

    def ms(value: float | None) -> str:
        return "" if value is None else f"{1e3 * value:.2f}"

    lines = [
        "| model | way | budget MiB | predicted MiB | measured MiB | predicted ms | measured ms "
        "| limit held |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        limit = "" if row.limit is None else f"{row.limit:g}"
        cells = (row.model, row.way, mib(row.budget_bytes), mib(row.predicted_bytes))
        cells += (mib(row.peak_bytes), ms(row.predicted_s), ms(row.step_s), limit)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
