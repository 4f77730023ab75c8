"""Estimated against measured on this machine's CPU, for the fourteen model families.

For each family, in train mode with one thread:

- times: Spearman's correlation between the estimated and the measured time of every operator, and
  the ratio of their sums;
- step: the estimated sum against an unplanned eager step (forward, loss, backward);
- peak: the estimate's replayed peak against the highest level that torch's allocator reports during
  a step that memopt runs with everything stored, resident bytes included.

Times are CPU time of the one thread that works, best of several runs: on a shared machine, unlike
wall-clock time, it does not count what other processes do. The device is calibrated by
`memopt.measure_device` once, before any model is looked at, and kept beside the rows.
"""

from __future__ import annotations

import gc
import json
import platform
import time
import timeit
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from scipy.stats import spearmanr
from torch import nn

from benchmarks.runner import Benchmark, OneOf
from benchmarks.steps import CPU, peak_of
from benchmarks.table import joined, mib, table
from memopt.api.planning import plan
from memopt.models.device import Device
from memopt.pricing import device_measure, device_probes
from memopt.pricing.measure import environment
from memopt.profiler import estimate_model
from memopt.step.profiled import Profiled
from memopt.step.signature import StandIns, signature
from tests.zoo import FAMILIES, call, get

ROUNDS = 3
ROUND_S = 0.03
BATCHES = {
    "tiny": {},
    # One sequence of 512 tokens takes seconds; two rows of the MLP would only stream its weights.
    "paper": {"gpt2": 1, "bert": 1, "llama": 1, "mlp": 64},
}
OTHER_BATCH = {"tiny": 4, "paper": 2}


class ThreadClock:
    """Stands in for `time` where a measurement reads `perf_counter`."""

    perf_counter = staticmethod(time.thread_time)


CALIBRATION = Path("out/estimate_accuracy-device.json")


@dataclass(frozen=True)
class Row:
    """One family: its line, the correlation, estimated time over the step's, and of the peaks."""

    text: str
    spearman: float
    time_ratio: float
    peak_ratio: float


def calibrated() -> Device:
    """Measure this machine's Device, by the thread's clock, or read what was measured."""
    if not CALIBRATION.exists():
        with mock.patch.object(device_probes, "time", ThreadClock):
            device = device_measure.measure_device("cpu")
        CALIBRATION.parent.mkdir(exist_ok=True)
        CALIBRATION.write_text(json.dumps(asdict(device)), encoding="utf-8")
    return Device(**json.loads(CALIBRATION.read_text(encoding="utf-8")))


def best_s(run: Callable[[], Any], budget_s: float) -> float:
    """Measure CPU seconds of the fastest of several runs; short ones are repeated."""
    best, spent, repeats = float("inf"), 0.0, 1
    while spent < budget_s:
        begin = time.thread_time()
        for _ in range(repeats):
            run()
        taken = time.thread_time() - begin
        spent += taken
        if taken >= 5e-5:
            best = min(best, taken / repeats)
        if taken < 2e-4:
            repeats = min(8 * repeats, 1000)
    return best


def operator_times(profiled: Profiled) -> list[float]:
    """Measure CPU seconds of every operator, each distinct call once, in interleaved rounds."""
    calls = {one.text: one for one in map(signature, profiled.lowering.nodes)}
    times = dict.fromkeys(calls, float("inf"))
    stand_ins = StandIns(CPU)
    with torch.no_grad(), torch.random.fork_rng():
        for _ in range(ROUNDS):
            for text, one in calls.items():
                args, kwargs = stand_ins.arguments(one)
                one.target(*args, **kwargs)
                run = lambda one=one, args=args, kwargs=kwargs: one.target(*args, **kwargs)  # noqa: E731
                times[text] = min(times[text], best_s(run, ROUND_S))
    return [times[signature(node).text] for node in profiled.lowering.nodes]


def measured_peak(model: nn.Module, inputs: Any, profiled: Profiled) -> int:
    """Measure the peak of a step under a plan that stores everything, resident bytes included."""
    stored = plan(profiled, strategy="store-all", progress=False).apply(model)

    def step() -> None:
        leaves = torch.utils._pytree.tree_leaves(call(stored, inputs))
        wanted = [t for t in leaves if torch.is_tensor(t) and t.requires_grad]
        torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])

    return profiled.graph.resident_bytes + peak_of(model, step, CPU)


def _measured(given: Any, name: str) -> list[Row]:
    size, family = given.size, get(name)
    batch = BATCHES[size].get(name, OTHER_BATCH[size])
    inputs = family.inputs(size, batch=batch)
    with torch.device("meta"):
        shape_only = family.make(size)
    profiled = estimate_model(shape_only, inputs, calibrated())
    estimated = [operator.time_s for operator in profiled.graph.operators]
    measured = operator_times(profiled)
    model = family.build(size)

    def step() -> None:
        model.zero_grad()
        family.loss(call(model, inputs)).backward()

    step()
    step_s = min(timeit.repeat(step, repeat=3, number=1, timer=time.thread_time))
    peak = plan(profiled, strategy="store-all", progress=False).peak_bytes
    real_peak = measured_peak(model, inputs, profiled)
    gc.collect()
    found_s, real_s = sum(estimated), sum(measured)
    correlation = float(spearmanr(estimated, measured).statistic)
    line = (
        f"{name} | {batch} | {len(estimated)} | {correlation:.3f} | {1e3 * found_s:.1f} | "
        f"{1e3 * real_s:.1f} | {found_s / real_s:.2f} | {1e3 * step_s:.1f} | "
        f"{found_s / step_s:.2f} | {mib(peak)} | {mib(real_peak)} | {peak / real_peak - 1:+.2%}"
    )
    return [Row(line, correlation, found_s / step_s, peak / real_peak)]


def _blocks(rows: list[Row], _: Any) -> str:
    worst = max(abs(r.peak_ratio - 1) for r in rows)
    ratios = [r.time_ratio for r in rows]
    device = calibrated()
    rates = ", ".join(f"{name} {rate / 1e9:.3g} G/s" for name, rate in device.flops_per_s.items())
    head = (
        "family | batch | operators | Spearman | estimated ms | measured ms | ratio | eager step ms"
        " | ratio | estimated peak MiB | measured peak MiB | difference"
    )
    return joined(
        f"`{environment(CPU)}`, {platform.system()}.",
        table(head, [row.text for row in rows]),
        f"Smallest Spearman {min(r.spearman for r in rows):.3f}; estimated time over the eager "
        f"step's {min(ratios):.2f} to {max(ratios):.2f}; largest difference of peaks "
        f"{100 * worst:.2f}%.",
        f"Calibration: {rates}, memory {device.memory_bytes_per_s / 1e9:.3g} GB/s, launch "
        f"{1e6 * device.launch_latency_s:.2f} µs.",
    )


BENCHMARK = Benchmark(
    page="docs/results/estimate_cpu.md",
    row=Row,
    cases={family.name: (family.name,) for family in FAMILIES},
    measure=_measured,
    blocks=_blocks,
    options={"size": OneOf(("paper", "tiny"))},
    marks=lambda given: {"size": given.size, "environment": environment(CPU)},
    prepare=lambda _: calibrated(),
)
