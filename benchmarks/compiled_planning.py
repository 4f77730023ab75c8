"""Seconds from the call to a plan with compiled kernels, of GPT-2 with 12 and with 48 layers.

Each figure is of a process of its own: first with empty caches (Inductor's and memopt's), then with
those that the first one left. CPU seconds are those of the call and of all compilers that it began.
"""

from __future__ import annotations

import resource
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

import memopt
from benchmarks.runner import Benchmark, Line, apart
from benchmarks.shapes import VOCABULARY, gpt2, made


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


BENCHMARK = Benchmark(
    cases=lambda given: {str(layers): (layers,) for layers in given.layers},
    measure=_measured,
    head="layers | caches | regions (distinct) | wall, s | CPU, s",
    selects=("layers",),
    options={"layers": (12, 48), "strategy": "rotor", "budget": 0.7},
)
