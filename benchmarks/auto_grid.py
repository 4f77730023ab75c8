"""`auto` on a grid of six models and five budgets: against the single strategies, and its limit.

The tiny families, estimated, so that the graphs are the same everywhere. Budgets are Rotor's
smallest one + x (store-all's peak - that). "Least" is the least step time of the single strategies
in SINGLE, each with all the time it wants; they end by themselves, so it is the same on every
machine. `auto` is the default one, with every strategy it tries, under the time limit; its time is
wall-clock time from call to plan, and CPU time beside it: on a shared machine a member that stops
in time by its own clock is late by the wall's.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import Any

import memopt
from benchmarks.runner import Benchmark, named
from memopt.api.planning import solve
from memopt.errors import MemoptError
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.strategies import Auto, resolve
from tests.zoo import get

MODELS = ("mlp", "gpt2", "unet", "resnet50", "mobilenet_v2", "llama")
SHARES = (0.0, 0.2, 0.4, 0.7, 1.0)
SINGLE = ("store-all", "sequential", "revolve", "rotor", "rotor-optimal", "rotor-free")


@dataclass(frozen=True)
class Row:
    """One model at one budget: its line, auto's step time over the least, seconds of planning."""

    text: str
    ratio: float
    spent_s: float


def graph_of(name: str) -> Graph:
    """The tiny family, estimated: the same graph on every machine."""
    family = get(name)
    return memopt.profile(
        family.make("tiny"), family.inputs("tiny"), device="cpu-core", mode="estimate"
    )


def budgets_of(graph: Graph) -> dict[float, int]:
    """Share → bytes."""
    floor = memopt.plan(graph, budget="min", strategy="rotor", progress=False).peak_bytes
    peak = memopt.plan(graph, strategy="store-all", progress=False).peak_bytes
    return {share: floor + int(share * (peak - floor)) for share in SHARES}


def least_of(graph: Graph, budget_bytes: int) -> tuple[float, str]:
    """The least step time of the single strategies, and whose it is."""
    found = []
    for name in SINGLE:
        try:
            plan = solve(graph, budget_bytes, resolve(name), device=Device())
        except MemoptError:
            # Infeasible: this strategy's class has no plan within the budget.
            continue
        found.append((plan.step_time_s, name))
    return min(found)


def rows_of(given: Any, name: str) -> list[Row]:
    """Plan one model at all budgets."""
    graph, rows = graph_of(name), []
    for share, budget_bytes in budgets_of(graph).items():
        least_s, least_by = least_of(graph, budget_bytes)
        begin, used = time.monotonic(), time.process_time()
        made = solve(graph, budget_bytes, Auto(), device=Device(), time_limit_s=given.limit)
        spent_s = time.monotonic() - begin
        cpu_s, ratio = time.process_time() - used, made.step_time_s / least_s
        text = (
            f"{name} | {share:g} | {budget_bytes / 1024:.1f} | {1e3 * least_s:.3f} | {least_by} | "
            f"{ratio:.4f} | {made.stats.get('chosen', '')} | {spent_s:.2f} | {cpu_s:.2f}"
        )
        rows.append(Row(text, ratio, spent_s))
    return rows


HEAD = "model | share | budget, KiB | least, ms | by | auto / least | chosen | auto took, s | CPU s"


def _summary(rows: list[Row], given: Any) -> str:
    over = max(row.spent_s for row in rows) - given.limit
    ratios = [row.ratio for row in rows]
    return (
        f"{os.cpu_count()} cores, load average {os.getloadavg()[2]:.1f}. auto is slower than the "
        f"least in {sum(ratio > 1 + 1e-9 for ratio in ratios)} of {len(rows)} cells (largest ratio "
        f"{max(ratios):.6f}, smallest {min(ratios):.4f}). It ends {abs(over):.2f} s "
        f"{'after' if over > 0 else 'before'} its limit at the latest."
    )


BENCHMARK = Benchmark(
    row=Row,
    cases=named(MODELS),
    measure=rows_of,
    head=HEAD,
    summary=_summary,
    options={"limit": 10.0},
    # Machine code is made once, outside of any limit.
    prepare=lambda _: solve(graph_of("mlp"), None, resolve("rotor"), device=Device()),
)
