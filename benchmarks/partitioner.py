"""memopt's choice inside Inductor's own pipeline, beside torch's, at the same measured peaks.

For each `activation_memory_budget` of torch the peak of its step is measured; `memopt.partitioner`
is then given that peak as its budget. Both steps run in turns on one thread.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

import memopt
from benchmarks.peers import compiled
from benchmarks.runner import Benchmark, Line, crossed
from benchmarks.shapes import Contest, build
from benchmarks.steps import CPU, peak_of
from benchmarks.table import interleaved, mib, ratio
from memopt.errors import MemoptError

_device = cache(memopt.measure_device)


def _measured(given: Any, name: str, share: float) -> list[Line]:
    contest = build(name)
    theirs, module = compiled(contest, share), contest.module
    tensors = [*module.parameters(), *module.buffers()]
    resident = sum(t.untyped_storage().nbytes() for t in tensors) + _input_bytes(contest)
    peak = resident + peak_of(module, theirs, CPU)
    start = f"{contest.name} | {share:g} | {mib(peak)} MiB"
    partitioner = memopt.partitioner(peak, given.strategy, _device("cpu"))
    try:
        with torch._inductor.config.patch(fallback_random=True):
            run = partitioner.compile(module, contest.inputs)
    except MemoptError as error:
        return [Line(f"{start} | - | - | {error} | -")]
    report = partitioner.report
    assert report is not None
    steps = {"torch": theirs, "memopt": lambda: contest.step(run)}
    over = ratio(interleaved(module, steps, given.rounds, CPU), "memopt", "torch")
    peaks = (report.predicted_peak_bytes, report.measured_peak_bytes)
    figures = " | ".join(f"{mib(size)} MiB" for size in peaks)
    return [Line(f"{start} | {figures} | {over:.3f} | {report.rounds}")]


def _input_bytes(contest: Contest) -> int:
    given = contest.inputs.values() if isinstance(contest.inputs, dict) else contest.inputs
    return sum(t.untyped_storage().nbytes() for t in given if isinstance(t, torch.Tensor))


BENCHMARK = Benchmark(
    cases=lambda given: crossed(given.models, given.budgets),
    measure=_measured,
    head="model | activation_memory_budget | its peak | memopt's predicted peak | "
    "memopt's measured peak | memopt's time / torch's | rounds",
    selects=("models", "budgets"),
    options={
        "models": ("gpt2", "resnet50"),
        "budgets": (0.9, 0.7, 0.5, 0.3),
        "rounds": 7,
        "strategy": "rotor",
    },
)
