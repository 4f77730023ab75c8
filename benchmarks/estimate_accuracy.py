"""Estimated against measured on this machine's CPU, for the fourteen model families.

    OMP_NUM_THREADS=1 python -m benchmarks.estimate_accuracy [--size paper] [--out FILE]
        [--only FAMILY ...] [--resume FILE] [--fresh]

For each family, in train mode with one thread:

- times: Spearman's correlation between the estimated and the measured time of every operator, and
  the ratio of their sums;
- step: the estimated sum against an unplanned eager step (forward, loss, backward);
- peak: the estimate's replayed peak against the highest level that torch's allocator reports during
  a step that memopt runs with everything stored, resident bytes included.

Times are CPU time of the one thread that works, best of several runs: on a shared machine, unlike
wall-clock time, it does not count what other processes do. The device is calibrated by
`memopt.measure_device` once, before any model is looked at.

A finished family's row and the calibration are kept in a JSON file (--resume; in out/ by default)
and not measured again: a run cut short, Ctrl-C included, writes what it has and is taken up.
"""

from __future__ import annotations

import argparse
import gc
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from scipy.stats import spearmanr

from benchmarks.kept import Kept
from memopt.api.planning import plan
from memopt.models.device import Device
from memopt.profiler import device_measure, device_probes, estimate_model
from memopt.profiler.measure import environment
from memopt.profiler.memory import metered
from memopt.profiler.session import Profiled
from memopt.profiler.signature import StandIns, signature
from tests.zoo import FAMILIES, Family, call, get

CPU = torch.device("cpu")
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


@dataclass(frozen=True)
class Row:
    """One family's figures; times in seconds, memory in bytes."""

    family: str
    batch: int
    operators: int
    spearman: float
    estimated_s: float
    measured_s: float
    step_s: float
    estimated_peak: int
    measured_peak: int

    def cells(self) -> list[str]:
        """The row of the table."""
        return [
            self.family,
            str(self.batch),
            str(self.operators),
            f"{self.spearman:.3f}",
            f"{1e3 * self.estimated_s:.1f}",
            f"{1e3 * self.measured_s:.1f}",
            f"{self.estimated_s / self.measured_s:.2f}",
            f"{1e3 * self.step_s:.1f}",
            f"{self.estimated_s / self.step_s:.2f}",
            f"{self.estimated_peak / 2**20:.1f}",
            f"{self.measured_peak / 2**20:.1f}",
            f"{100 * (self.estimated_peak / self.measured_peak - 1):+.2f}%",
        ]


HEAD = [
    "family",
    "batch",
    "operators",
    "Spearman",
    "estimated ms",
    "measured ms",
    "ratio",
    "eager step ms",
    "ratio",
    "estimated peak MiB",
    "measured peak MiB",
    "difference",
]


def calibrated() -> Device:
    """This machine's Device, by the thread's clock."""
    with mock.patch.object(device_probes, "time", ThreadClock):
        return device_measure.measure_device("cpu")


def best_s(run: Callable[[], Any], budget_s: float) -> float:
    """CPU seconds of the fastest of several runs; short ones are repeated."""
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
    """Measured CPU seconds of every operator, each distinct call once, in interleaved rounds."""
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


def steps(model: torch.nn.Module, inputs: Any, family: Family) -> Callable[[], Any]:
    """A training step without the optimizer."""

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        family.loss(call(model, inputs)).backward()

    return step


def measured_peak(model: torch.nn.Module, inputs: Any, family: Family, profiled: Profiled) -> int:
    """Resident bytes and the peak of a step under a plan that stores everything."""
    stored = plan(profiled, strategy="store-all", progress=False).apply(model)

    def step() -> None:
        output = call(stored, inputs)
        leaves = [t for t in torch.utils._pytree.tree_leaves(output) if torch.is_tensor(t)]
        wanted = [t for t in leaves if t.requires_grad]
        torch.autograd.backward(wanted, [torch.ones_like(t) for t in wanted])

    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        gc.collect()
        with metered(CPU) as use:
            step()
    return profiled.graph.resident_bytes + use.peak_bytes


def row(family: Family, size: Any, batch: int, device: Device) -> Row:
    """Measure one family."""
    inputs = family.inputs(size, batch=batch)
    with torch.device("meta"):
        shape_only = family.make(size)
    profiled = estimate_model(shape_only, inputs, device)
    estimated = [operator.time_s for operator in profiled.graph.operators]
    measured = operator_times(profiled)
    model = family.build(size)
    step = steps(model, inputs, family)
    step()
    step_s = min(_once(step) for _ in range(3))
    peak = measured_peak(model, inputs, family, profiled)
    return Row(
        family=family.name,
        batch=batch,
        operators=len(estimated),
        spearman=float(spearmanr(estimated, measured).statistic),
        estimated_s=sum(estimated),
        measured_s=sum(measured),
        step_s=step_s,
        estimated_peak=plan(profiled, strategy="store-all", progress=False).peak_bytes,
        measured_peak=peak,
    )


def _once(step: Callable[[], Any]) -> float:
    begin = time.thread_time()
    step()
    return time.thread_time() - begin


def table(rows: list[Row], size: str, device: Device) -> str:
    """Markdown."""
    worst = max(abs(r.estimated_peak / r.measured_peak - 1) for r in rows)
    ratios = [r.estimated_s / r.step_s for r in rows]
    lines = [
        f"# Estimated and measured, {size} size, CPU, one thread",
        "",
        f"`{environment(CPU)}`, {platform.system()}. Command: "
        f"`OMP_NUM_THREADS=1 python -m benchmarks.estimate_accuracy --size {size}`. Times are CPU "
        "time of the working thread; peaks include resident bytes.",
        "",
        "| " + " | ".join(HEAD) + " |",
        "|" + "---|" * len(HEAD),
        *("| " + " | ".join(r.cells()) + " |" for r in rows),
        "",
        f"Smallest Spearman {min(r.spearman for r in rows):.3f}; estimated time over the eager "
        f"step's {min(ratios):.2f} to {max(ratios):.2f}; largest difference of peaks "
        f"{100 * worst:.2f}%.",
        "",
        "Calibration: "
        + ", ".join(f"{name} {rate / 1e9:.3g} G/s" for name, rate in device.flops_per_s.items())
        + f", memory {device.memory_bytes_per_s / 1e9:.3g} GB/s, launch "
        f"{1e6 * device.launch_latency_s:.2f} µs.",
    ]
    return "\n".join(lines) + "\n"


def kept_rows(options: argparse.Namespace) -> tuple[Kept[Row], Device]:
    """What earlier runs finished, and the calibration that it was estimated with."""
    path = options.resume or Path(f"out/estimate_accuracy-{options.size}.json")
    settings = {"size": options.size, "environment": environment(CPU)}
    kept = Kept(path, Row, settings, fresh=options.fresh)
    if "device" not in kept.shared:
        kept.shared["device"] = asdict(calibrated())
        kept.write()
    return kept, Device(**kept.shared["device"])


def main() -> int:
    """Run from the command line; 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.estimate_accuracy")
    every = [family.name for family in FAMILIES]
    parser.add_argument("--only", nargs="+", metavar="FAMILY", choices=every, default=every)
    parser.add_argument("--size", choices=("tiny", "paper"), default="paper")
    parser.add_argument("--out", type=Path)
    parser.add_argument(
        "--resume", type=Path, help="JSON file of finished rows (in out/ by default)"
    )
    parser.add_argument("--fresh", action="store_true", help="drop the rows kept so far")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept, device = kept_rows(options)
    try:
        for name in kept.missing(options.only, print):
            batch = BATCHES[options.size].get(name, OTHER_BATCH[options.size])
            kept.add(name, [row(get(name), options.size, batch, device)])
            print(" | ".join(kept.rows[name][0].cells()), flush=True)
            gc.collect()
            write(kept, every, device, options)
    except KeyboardInterrupt:
        print(f"interrupted; the same command takes up what {kept.path} keeps")
        return 130
    print(write(kept, every, device, options))
    return 0


def write(kept: Kept[Row], every: list[str], device: Device, options: argparse.Namespace) -> str:
    """The page of all kept rows, written to --out if there is one."""
    text = table(kept.ordered(every), options.size, device)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
    return text


if __name__ == "__main__":
    sys.exit(main())
