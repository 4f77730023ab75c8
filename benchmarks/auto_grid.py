"""`auto` on a grid of six models and five budgets: against the single strategies, and its limit.

    python -m benchmarks.auto_grid [--only NAME ...] [--limit 10] [--out docs/results/auto_grid.md]
        [--resume FILE] [--fresh]

The tiny families, estimated, so that the graphs are the same everywhere. Budgets are Rotor's
smallest one + x (store-all's peak - that). "Least" is the least step time of the single strategies
in SINGLE, each with all the time it wants; they end by themselves, so it is the same on every
machine. `auto` is the default one, with every strategy it tries, under the time limit; its time is
wall-clock time from call to plan, and CPU time beside it: on a shared machine a member that stops
in time by its own clock is late by the wall's. A finished model's rows are kept (--resume).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

import memopt
from benchmarks.kept import Kept
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
    """One model at one budget; seconds, those of steps predicted."""

    model: str
    share: float
    budget_bytes: int
    least_s: float
    least_by: str
    auto_s: float
    chosen: str
    spent_s: float
    cpu_s: float


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


def rows_of(name: str, limit_s: float) -> list[Row]:
    """One model at all budgets."""
    graph, rows = graph_of(name), []
    for share, budget_bytes in budgets_of(graph).items():
        least_s, least_by = least_of(graph, budget_bytes)
        begin, used = time.monotonic(), time.process_time()
        made = solve(graph, budget_bytes, Auto(), device=Device(), time_limit_s=limit_s)
        spent_s = time.monotonic() - begin
        chosen = str(made.stats.get("chosen", ""))
        row = (least_s, least_by, made.step_time_s, chosen, spent_s, time.process_time() - used)
        rows.append(Row(name, share, budget_bytes, *row))
    return rows


def page(rows: list[Row], limit_s: float) -> str:
    """The results page."""
    over = max(row.spent_s for row in rows) - limit_s
    ratios = [row.auto_s / row.least_s for row in rows]
    slower = sum(ratio > 1 + 1e-9 for ratio in ratios)
    models = len({row.model for row in rows})
    lines = [
        "# Auto against the single strategies",
        "",
        f"`python -m benchmarks.auto_grid --limit {limit_s:g}`: {models} tiny models, estimated, "
        f"{len(SHARES)} budgets each; torch {torch.__version__}, {os.cpu_count()} cores, load "
        f"average {os.getloadavg()[2]:.1f} (above the cores: a shared machine). Least: of "
        f"{', '.join(SINGLE)}, without a limit. auto: all its strategies within {limit_s:g} s.",
        "",
        f"auto is slower than the least in {slower} of {len(rows)} cells (largest ratio "
        f"{max(ratios):.6f}, smallest {min(ratios):.4f}). It ends {abs(over):.2f} s "
        f"{'after' if over > 0 else 'before'} its limit at the latest.",
        "",
        "| model | share | budget, KiB | least, ms | by | auto / least | chosen | auto took, s "
        "| of CPU, s |",
        "|---|---:|---:|---:|---|---:|---|---:|---:|",
    ]
    lines += [
        f"| {row.model} | {row.share:g} | {row.budget_bytes / 1024:.1f} | "
        f"{1e3 * row.least_s:.3f} | {row.least_by} | {row.auto_s / row.least_s:.4f} | "
        f"{row.chosen} | {row.spent_s:.2f} | {row.cpu_s:.2f} |"
        for row in rows
    ]
    return "\n".join([*lines, ""])


def main() -> int:
    """Run from the command line; 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.auto_grid")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=MODELS, default=MODELS)
    parser.add_argument("--limit", type=float, default=10.0, help="auto's time limit, seconds")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--resume", type=Path, default=Path("out/auto_grid.json"))
    parser.add_argument("--fresh", action="store_true", help="drop the rows kept so far")
    options = parser.parse_args()
    settings = {"torch": torch.__version__, "limit": options.limit}
    kept = Kept(options.resume, Row, settings, fresh=options.fresh)
    # Machine code is made once, outside of any limit.
    solve(graph_of("mlp"), None, resolve("rotor"), device=Device())
    try:
        for name in kept.missing(options.only, print):
            kept.add(name, rows_of(name, options.limit))
            text = page(kept.ordered(MODELS), options.limit)
            if options.out is not None:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(text, encoding="utf-8")
            print(f"{name}: done", flush=True)
    except KeyboardInterrupt:
        print(f"interrupted; the same command takes up what {kept.path} keeps")
        return 130
    print(page(kept.ordered(MODELS), options.limit))
    return 0


if __name__ == "__main__":
    sys.exit(main())
