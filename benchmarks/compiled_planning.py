"""Seconds from the call to a plan with compiled kernels, of GPT-2 with 12 and with 48 layers.

Each figure is of a process of its own: first with empty caches (Inductor's and memopt's), then with
those that the first one left. CPU seconds are those of the call and of all compilers that it began.

`partitioner`: memopt's choice inside Inductor's own pipeline, beside torch's. For each
`activation_memory_budget` of torch the peak of its step is measured; `memopt.partitioner` is then
given that peak as its budget. Both steps run in turns on one thread.
"""

from __future__ import annotations

import resource
import tempfile
import time
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks.peers import compiled
from benchmarks.runner import Benchmark, Line, apart, crossed
from benchmarks.shapes import VOCABULARY, Contest, build, gpt2, made
from benchmarks.steps import CPU, peak_of
from benchmarks.table import interleaved, mib, ratio
from memopt.errors import MemoptError


def planned(given: Any, layers: int) -> tuple[float, float, str]:
    """Plan in this process: seconds from the call to the plan, CPU seconds before it (for imports
    and the model), compiled regions of the step and different ones among them."""
    torch.set_num_threads(given.threads)
    contest = made(partial(gpt2, VOCABULARY, layers))
    before_s, begin = time.process_time(), time.perf_counter()
    how = {"budget": given.budget, "strategy": given.strategy, "kernels": "compiled"}
    plan = memopt.plan(contest.module, contest.inputs, progress=False, **how)
    wall_s = time.perf_counter() - begin
    targets = [one.target for one in plan.graph.operators if one.target.startswith("memopt.fused")]
    return wall_s, before_s, f"{len(targets)} ({len(set(targets))})"


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _measured(given: Any, layers: int) -> list[Line]:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        places = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "MEMOPT_CACHE_DIR": "memopt"}
        environment = {name: str(Path(folder, place)) for name, place in places.items()}
        for caches in ("cold", "warm"):
            before = _children_s()
            wall_s, before_s, regions = apart(planned, given, layers, **environment)
            # Of all threads and processes in that time.
            cpu_s = _children_s() - before - before_s
            rows.append(Line(f"{layers} | {caches} | {regions} | {wall_s:.1f} | {cpu_s:.1f}"))
    return rows


_device = cache(memopt.measure_device)


def _beside(given: Any, name: str, share: float) -> list[Line]:
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
    cases=lambda given: {str(layers): (layers,) for layers in given.layers},
    measure=_measured,
    head="layers | caches | regions (distinct) | wall, s | CPU, s",
    selects=("layers",),
    options={"layers": (12, 48), "strategy": "rotor", "budget": 0.7},
)
PARTITIONER = Benchmark(
    cases=lambda given: crossed(given.models, given.budgets),
    measure=_beside,
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
