"""Everything in one plan beside each strategy alone: overheads, bounds and gaps (estimated).

    python -m benchmarks.joint_tables [--models NAME ...] [--devices NAME ...] [--shares X ...]
        [--strategies NAME ...] [--limit 60] [--resume FILE] [--page FILE] [--most N]

Graphs of the zoo's models at their published sizes, batch 32, with exact implementations, are
captured once and kept beside the rows. A cell is one strategy at one budget: resident bytes + share
x (peak - resident), the peak being store-all's, every plan validated and replayed. Finished
cells are kept, so that a run is taken up where it was stopped (--most ends it after so many), and
in parts, strategy by strategy. Planning seconds are CPU time: where other work takes the machine's
time, limits in seconds are stretched by as much as it took of the cell before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.kept import Kept
from benchmarks.monet_menus import BATCH, estimated_graph
from memopt.api.planning import solve
from memopt.errors import MemoptError
from memopt.models.bounds import memory_lower_bound
from memopt.models.device import Device
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.strategies import resolve
from tests.zoo import FAMILIES

FIRST = ("resnet50", "gpt2+loss", "unet", "vit_b_16", "llama+loss")
MODELS = (*FIRST, *(f.name for f in FAMILIES if f.name not in FIRST))
DEVICES = ("H100", "A100", "GH200")
SHARES = (0.60, 0.40, 0.25, 0.15)
SINGLES = ("rotor", "rotor-menus", "offload-graph", "dynprog")
JOINT = "joint"
STRATEGIES = (*SINGLES, JOINT)
LIMIT_S = 60.0


LEAST_S, MOST_STRETCH = 0.5, 20.0
"""Cells of less CPU time say nothing about the machine's other work; the most it may stretch."""


@dataclass(frozen=True)
class Row:
    """One strategy at one budget; None: no plan. Overheads are over the step as it is."""

    device: str
    model: str
    share: float
    strategy: str
    overhead: float | None
    bound: float | None
    gap: float | None
    cpu_s: float
    impossible: bool
    """Whether no plan of any kind can need so little memory."""

    @property
    def cell(self) -> tuple[str, str, float]:
        """What strategies are compared in."""
        return self.device, self.model, self.share


def budget_of(graph: Graph, share: float) -> int:
    """Resident bytes and a share of what store-all needs beyond them."""
    peak_bytes = replay(graph, store_all(graph)).peak_bytes
    return graph.resident_bytes + int(share * (peak_bytes - graph.resident_bytes))


def row_of(
    graph: Graph, device: Device, model: str, share: float, name: str, limit_s: float
) -> Row:
    """Plan one cell by one strategy, in `limit_s` seconds by the wall clock."""
    base, budget = replay(graph, store_all(graph)), budget_of(graph, share)
    begin = time.process_time()
    overhead = bound = gap = None
    try:
        plan = solve(graph, budget, resolve(name), device=device, time_limit_s=limit_s)
    except MemoptError:
        # No plan within the budget, or the strategy cannot plan this graph.
        pass
    else:
        overhead, bound = plan.step_time_s / base.time_s - 1, plan.lower_bound_s / base.time_s - 1
        gap = plan.step_time_s / plan.lower_bound_s - 1
    return Row(
        device.name, model, share, name, overhead, bound, gap, time.process_time() - begin,
        memory_lower_bound(graph) > budget,
    )  # fmt: skip


@dataclass
class Pace:
    """How much slower the wall clock's seconds are than this process's."""

    stretch: float = 1.0

    def __post_init__(self) -> None:
        """Count for a moment."""
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        while time.process_time() < cpu_s + LEAST_S:
            pass
        self.note(time.process_time() - cpu_s, time.perf_counter() - wall_s)

    def note(self, cpu_s: float, wall_s: float) -> None:
        """Take the last cell's; short ones say little."""
        if cpu_s >= LEAST_S:
            self.stretch = min(MOST_STRETCH, max(1.0, wall_s / cpu_s))


def wanted(options: argparse.Namespace, kept: Kept[Row]) -> Iterator[tuple[str, str, float, str]]:
    """(device, model, share, strategy) of the cells that are not there yet."""
    for device in options.devices:
        for model in options.models:
            for share in options.shares:
                for name in options.strategies:
                    if key_of(device, model, share, name) not in kept.rows:
                        yield device, model, share, name


def key_of(device: str, model: str, share: float, strategy: str) -> str:
    """The name of a cell's row."""
    return f"{find_device(device).name} {model} {share:g} {strategy}"


def percent(value: float | None, impossible: bool) -> str:
    """An overhead or a gap for a table; × where no plan can be."""
    if value is None:
        return "×" if impossible else "–"
    return f"{value:+.1%}"


def table(rows: list[Row]) -> list[str]:
    """The lines of one device."""
    heads = ["model", "share", *SINGLES, JOINT, "bound", "gap", "planning, CPU s"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    cells = dict.fromkeys(row.cell for row in rows)
    for cell in cells:
        of = {row.strategy: row for row in rows if row.cell == cell}
        if JOINT not in of:
            continue
        joint = of[JOINT]
        parts = [cell[1], f".{round(100 * cell[2]):02d}"]
        parts += [
            percent(of[name].overhead, of[name].impossible) if name in of else ""
            for name in SINGLES
        ]
        parts.append(f"**{percent(joint.overhead, joint.impossible)}**")
        parts += [percent(joint.bound, False), percent(joint.gap, False), f"{joint.cpu_s:.0f}"]
        lines.append("| " + " | ".join(parts) + " |")
    return lines


def summary(rows: list[Row]) -> list[str]:
    """Joint against the best single strategy of each cell."""
    joint = {row.cell: row for row in rows if row.strategy == JOINT}
    best: dict[tuple[str, str, float], float | None] = {}
    for row in rows:
        if row.strategy != JOINT and row.cell in joint:
            known = best.get(row.cell)
            found = row.overhead
            best[row.cell] = min((x for x in (known, found) if x is not None), default=None)
    both = [
        (joint[cell].overhead, single, cell) for cell, single in best.items() if single is not None
    ]
    slower = [cell for own, single, cell in both if own is None or own > single + 1e-9]
    ratios = [
        max(0.0, own) / single
        for own, single, cell in both
        if own is not None and single > 0 and cell[2] <= 0.40
    ]
    gaps = [row.gap for row in joint.values() if row.gap is not None]
    none = [cell for cell, single in best.items() if single is None]
    new = [cell for cell in none if joint[cell].overhead is not None]
    proved = [cell for cell in none if joint[cell].impossible]
    cpu = [row.cpu_s for row in joint.values()]
    return [
        f"- Cells: {len(joint)}. Slower than the best single strategy, or without a plan where it "
        f"has one: {len(slower)}{''.join(f' ({c[0]} {c[1]} {c[2]:g})' for c in slower)}.",
        f"- Share of the best single strategy's overhead, median over {len(ratios)} cells of share "
        f"≤ .40: {statistics.median(ratios) if ratios else float('nan'):.2f}.",
        f"- Cells where no single strategy has a plan: {len(none)}; joint has one in {len(new)}, "
        f"and in {len(proved)} no plan of any kind exists (×: proved).",
        f"- Gap to the bound: median {statistics.median(gaps) if gaps else float('nan'):.1%}, "
        f"largest {max(gaps, default=float('nan')):.1%}.",
        f"- Planning: median {statistics.median(cpu):.0f} s of CPU time, most {max(cpu):.0f} s.",
    ]


def page(rows: list[Row], limit_s: float) -> str:
    """The results page."""
    lines = [
        "# Everything in one plan",
        "",
        f"`python -m benchmarks.joint_tables --limit {limit_s:g}`, torch {torch.__version__}, "
        f"{os.cpu_count()} cores. Estimated steps, batch {BATCH}, exact implementations, budget = "
        "resident + share × (peak − resident); overheads over the step as it is. –: no plan found. "
        "×: no plan of any kind needs so little.",
        "",
        *(summary(rows) if any(row.strategy == JOINT for row in rows) else []),
    ]
    for device in dict.fromkeys(row.device for row in rows):
        found = [row for row in rows if row.device == device]
        lines += ["", f"## {device}", "", *table(found)]
    return "\n".join([*lines, ""])


def main() -> int:
    """Run from the command line; 130 if interrupted."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint_tables")
    parser.add_argument("--models", nargs="+", metavar="NAME", default=MODELS)
    parser.add_argument("--devices", nargs="+", metavar="NAME", default=DEVICES)
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument(
        "--strategies", nargs="+", choices=STRATEGIES, metavar="NAME", default=STRATEGIES
    )
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds a plan")
    parser.add_argument("--most", type=int, help="cells to plan in this run")
    parser.add_argument("--resume", type=Path, default=Path("out/joint/rows.json"))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    kept = Kept(options.resume, Row, {"limit": options.limit, "batch": BATCH})
    pace = Pace()
    try:
        for number, (name, model, share, strategy) in enumerate(wanted(options, kept)):
            if options.most is not None and number >= options.most:
                break
            device = find_device(name)
            graph = estimated_graph(model, options.resume.parent / device.name, device=device)
            begin = time.perf_counter()
            row = row_of(graph, device, model, share, strategy, pace.stretch * options.limit)
            pace.note(row.cpu_s, time.perf_counter() - begin)
            kept.add(key_of(name, model, share, strategy), [row])
            sys.stdout.write(
                f"{name} {model} {share:g} {strategy}: {percent(row.overhead, row.impossible)} "
                f"{row.cpu_s:.0f} s\n"
            )
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    finally:
        if options.page is not None and kept.rows:
            rows = [row for many in kept.rows.values() for row in many]
            options.page.write_text(page(rows, options.limit), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
