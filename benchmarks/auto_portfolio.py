"""`auto` beside each single strategy with the same limit: step times, gaps, planning (estimated).

Graphs of the zoo's models at their published sizes, batch 32, with exact implementations, and
budgets as in `joint_tables`. Limits in seconds are stretched where other work takes the machine's
time, as there. `auto` may stop within its gap of 1% of the bound: it counts as slower where it is
beyond the fastest single strategy by more than that.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from random import Random
from statistics import median
from typing import Any

from benchmarks.graphs import step_graph
from benchmarks.joint_tables import budget_of, pace
from benchmarks.runner import Benchmark
from benchmarks.table import NONE, signed, table
from memopt.api.planning import solve
from memopt.errors import MemoptError
from memopt.models.generate import random_graph
from memopt.models.presets import find_device
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies import Auto, resolve

SINGLES = ("sequential", "rotor", "rotor-menus", "offload-graph", "monet", "joint")
AUTO, AT_ONCE = "auto", "at once"
STRATEGIES = (*SINGLES, AUTO, AT_ONCE)
MODELS = ("gpt2+loss", "unet", "resnet50", "vit_b_16", "llama+loss", "mobilenet_v2")
DEVICES, SHARES = ("H100", "GH200", "cpu-core"), (0.60, 0.40, 0.25, 0.15)
GAP = 0.01


@dataclass(frozen=True)
class Row:
    """One strategy in one cell; None: no plan. Overheads are over the step as it is."""

    device: str
    model: str
    share: float
    operators: int
    strategy: str
    overhead: float | None
    gap: float | None
    cpu_s: float
    limit_s: float
    chosen: str


def _planned(given: Any, device_name: str, model: str, share: float) -> list[Row]:
    """Plan one cell by every strategy."""
    device = find_device(device_name)
    graph = step_graph(model, device)
    base, budget, rows = replay(graph, store_all(graph)), budget_of(graph, share), []
    for name in STRATEGIES:
        strategy = Auto(at_once=True) if name == AT_ONCE else resolve(name)
        begin, wall = time.process_time(), time.perf_counter()
        overhead = gap = None
        chosen = ""
        with contextlib.suppress(MemoptError):
            limit_s = pace().stretch * given.limit
            plan = solve(graph, budget, strategy, device=device, time_limit_s=limit_s)
            overhead = round(plan.step_time_s / base.time_s - 1, 6)
            gap, chosen = round(plan.gap, 6), str(plan.stats.get("chosen", ""))
        cpu_s = time.process_time() - begin
        pace().note(cpu_s, time.perf_counter() - wall)
        many = len(graph.operators)
        row = (device_name, model, share, many, name, overhead, gap, round(cpu_s, 2))
        rows.append(Row(*row, given.limit, chosen))
    return rows


def _compiled(name: str) -> None:
    graph = random_graph(Random(1), 12)
    with contextlib.suppress(MemoptError):
        solve(graph, "min", resolve(name), device=find_device("H100"), time_limit_s=5.0)


def _cells(rows: list[Row]) -> list[dict[str, Row]]:
    keys = dict.fromkeys((row.device, row.model, row.share) for row in rows)
    return [
        {row.strategy: row for row in rows if (row.device, row.model, row.share) == key}
        for key in keys
    ]


def _beyond(cell: dict[str, Row]) -> float | None:
    """Give by how much auto's step is slower than the fastest single strategy's."""
    best = min((x for n in SINGLES if (x := cell[n].overhead) is not None), default=None)
    own = cell[AUTO].overhead
    if best is None:
        return None if own is None else -1.0
    return float("inf") if own is None else (1 + own) / (1 + best) - 1


def _summary(rows: list[Row], _given: Any) -> str:
    cells = _cells(rows)
    beyond = [x for cell in cells if (x := _beyond(cell)) is not None]
    gaps = [x for cell in cells if (x := cell[AUTO].gap) is not None]
    first = [cell[AT_ONCE].cpu_s for cell in cells]
    return (
        f"{len(cells)} cells. auto is slower than the fastest single strategy by more than its gap "
        f"of {GAP:.0%} in {sum(x > GAP for x in beyond)} of {len(beyond)} (at worst by "
        f"{max(beyond, default=0):+.1%}), and faster in {sum(x < -1e-9 for x in beyond)}; its gap "
        f"is {median(gaps) if gaps else 0:.1%} in the median. A plan made at once takes up to "
        f"{max(first, default=0):.1f} CPU s."
    )


def _table(rows: list[Row], given: Any) -> str:
    lines = []
    for cell in _cells(rows):
        own = cell[AUTO]
        singles = " | ".join(signed(cell[n].overhead, none=NONE) for n in (*SINGLES, AT_ONCE))
        lines.append(
            f"{own.device} | {own.model} | {own.operators} | .{round(100 * own.share):02d} | "
            f"{singles} | **{signed(own.overhead, none=NONE)}** | {own.chosen} | "
            f"{signed(own.gap)} | {own.cpu_s:.0f}"
        )
    names = " | ".join((*SINGLES, AT_ONCE))
    head = f"device | model | operators | share | {names} | auto | chosen | gap | auto, CPU s"
    return _summary(rows, given) + "\n\n" + table(head, lines)


BENCHMARK = Benchmark(
    row=Row,
    cases=lambda given: {
        f"{device} {model} {share:g}": (device, model, share)
        for device in given.devices
        for model in given.models
        for share in given.shares
    },
    measure=_planned,
    blocks=_table,
    options={"limit": 5.0, "models": MODELS, "devices": DEVICES, "shares": SHARES},
    selects=("models", "devices", "shares"),
    # Machine code is made once, outside of any limit.
    prepare=lambda _: [_compiled(name) for name in STRATEGIES[:-1]],
)
