"""Offloaded plans on a GPU: measured time beside the prediction and two peers.

Plans of `offload-graph` at floor + share·(baseline − floor), and at each peer's own peak. Peers:
eager, `save_on_cpu(pin_memory=True)` and streamed saved-tensor hooks. On CPU the plans run with
worker threads, and the peers that copy to host memory have no peak of their own to show.
"""

from __future__ import annotations

import contextlib
import gc
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
from benchmarks.steps import Step, clear, peak_of
from benchmarks.table import interleaved, ratio
from memopt.pricing.memory import library_bytes
from memopt.profiler import Loss, MeasureOptions, profile_model
from memopt.step.backend import backend_of
from memopt.step.profiled import Profiled
from tests.zoo import Family, call, get
from tests.zoo.family import TINY_BATCH

BATCHES = {"resnet50": 64, "vit_b_16": 32, "gpt2_medium": 8}
"""Examples in a step at the published size: enough work to hide what Python takes."""
LIMITS = (1.0, 1.05, 1.1, 1.2)
AT_PEAK = "memopt at the peak of "


@dataclass(frozen=True)
class Row:
    """One way to train one model; None: not known. The prediction of the eager step is the sum of
    its kernels: what it takes beyond is the framework's. of_peer: its time over that of the peer
    whose peak it had for a budget."""

    way: str
    predicted_s: float | None
    step_s: float
    of_peer: float | None


def stepper(family: Family, module: nn.Module, inputs: Any, around: Callable[[], Any]) -> Any:
    """Make one forward, loss and backward inside a context."""

    def step() -> None:
        with around():
            family.loss(call(module, inputs)).backward()

    return step


@contextlib.contextmanager
def limited(device: torch.device, limit_bytes: float) -> Iterator[None]:
    """Let the process hold at most so many bytes of the GPU meanwhile; nothing on CPU."""
    if device.type != "cuda":
        yield
        return
    total = torch.cuda.get_device_properties(device).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def limit_that_held(
    model: nn.Module, step: Step, budget: int, device: torch.device
) -> float | None:
    """Find the least of LIMITS, in budgets, under which a step ran; None: none did, or no GPU."""
    if device.type != "cuda":
        return None
    for limit in LIMITS:
        clear(model)  # what the step before, perhaps cut off, has left
        try:
            with limited(device, limit * budget):
                step()
        except torch.cuda.OutOfMemoryError:
            continue
        return limit
    return None


def effort(size: Any) -> MeasureOptions:
    """Choose how hard kernels are measured: in a dry run a few times, for its lines alone."""
    return MeasureOptions(cap_s=0.2, max_rounds=2) if size == "tiny" else MeasureOptions()


def standing_bytes(device: torch.device) -> int:
    """Measure what a GPU has allocated before a model comes, without workspaces; 0 on CPU."""
    if device.type != "cuda":
        return 0
    gc.collect()
    library_bytes(device)
    return int(torch.cuda.memory_allocated(device))


def reserved_bytes(plan: memopt.Plan) -> int:
    """Give what the simulated allocator reserves for a plan within its budget."""
    assert plan.budget is not None
    found = plan.reserved
    return max(plan.budget, found.reserved_peak_bytes if found else 0)


def total_peak_of(
    model: nn.Module, step: Step, device: torch.device, resident_bytes: int, before_bytes: int
) -> int:
    """Measure the whole peak of a step: on CUDA all that the process has allocated, by
    `torch.cuda.max_memory_allocated`, but what was there before the model; on CPU what the step
    allocates beyond what is resident."""
    above_bytes = peak_of(model, step, device)
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device)) - before_bytes
    return resident_bytes + above_bytes


def peers(model: nn.Module, device: torch.device) -> dict[str, Callable[[], Any]]:
    """Give other people's ways, as contexts around a step."""
    ways: dict[str, Callable[[], AbstractContextManager[Any]]] = {"eager": contextlib.nullcontext}
    pin = device.type == "cuda"
    ways["save_on_cpu"] = lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin)
    if device.type == "cuda":
        held = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
        ways["streamed hooks"] = lambda: StreamedHooks(held, device)
    return ways


def plans_for(
    profiled: Profiled, link: memopt.Device, shares: tuple[float, ...], peaks: dict[str, int]
) -> dict[str, memopt.Plan]:
    """Plan at shares between floor and baseline, and at each peer's peak that can be met."""

    def plan(budget: int | str) -> memopt.Plan:
        return memopt.plan(
            profiled, budget=budget, strategy="offload-graph", device=link, progress=False
        )

    floor, baseline = plan("min").peak_bytes, profiled.baseline.peak_bytes
    plans = {
        f"memopt {share:g}": plan(floor + int(share * max(0, baseline - floor))) for share in shares
    }
    for way, peak_bytes in peaks.items():
        if peak_bytes >= floor:
            plans[f"{AT_PEAK}{way}"] = plan(peak_bytes)
    return plans


def measure(
    name: str, size: Any, device: torch.device, shares: tuple[float, ...], rounds: int
) -> list[Row]:
    """Measure all ways of one model."""
    family = get(name)
    before_bytes = standing_bytes(device)
    model = family.build(size).to(device)
    batch = BATCHES[name] if size == "paper" else TINY_BATCH
    inputs = pytree.tree_map(
        lambda x: x.to(device) if isinstance(x, torch.Tensor) else x,
        family.inputs(size, batch=batch),
    )
    link = memopt.measure_device(device)
    profiled = profile_model(model, inputs, loss=Loss(family.loss), options=effort(size))
    resident_bytes = profiled.graph.resident_bytes - backend_of(device).step_scalars_bytes
    steps = {
        way: stepper(family, model, inputs, around) for way, around in peers(model, device).items()
    }
    # On CPU the host copies of other ways are device memory, too: no peak to compare with.
    apart = [way for way in steps if device.type == "cuda" or way == "eager"]
    peaks = {
        way: total_peak_of(model, steps[way], device, resident_bytes, before_bytes) for way in apart
    }
    plans = plans_for(profiled, link, shares, peaks)
    for way, plan in plans.items():
        steps[way] = stepper(family, plan.apply(model), inputs, contextlib.nullcontext)
    times = interleaved(model, steps, rounds, device)
    predicted = {way: plan.step_time_s for way, plan in plans.items()}
    predicted["eager"] = profiled.graph.compute_time_s
    rows = []
    for way in steps:
        peer = way.removeprefix(AT_PEAK) if way.startswith(AT_PEAK) else None
        of_peer = None if peer is None else ratio(times, way, peer)
        rows.append(Row(way, predicted.get(way), statistics.median(times[way]), of_peer))
    return rows
