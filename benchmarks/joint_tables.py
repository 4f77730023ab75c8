"""Everything in one plan beside each strategy alone: overheads, bounds and gaps (estimated).

    python -m benchmarks.joint_tables [--models NAME ...] [--devices NAME ...] [--shares X ...]
        [--strategies NAME ...] [--limit 20] [--resume FILE] [--graphs FOLDER] [--page FILE]
        [--most N]

Graphs of the zoo's models at their published sizes, batch 32, with exact implementations, are
captured once and kept in a folder. A cell is one strategy at one budget: resident bytes + share
x (peak - resident), the peak being store-all's, every plan validated and replayed. Finished
cells are kept in the repository, so that a run is taken up where it was stopped (--most ends it
after so many), and in parts, strategy by strategy; `--most 0` only writes the page. Where other
work takes the machine's time, limits in seconds are stretched by as much as it took of the cell
before.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import sys
import time
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

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
MODELS = (*FIRST, *(f.name for f in FAMILIES if f.name not in FIRST), "bert+loss")
DEVICES = ("H100", "GH200", "A100")
SHARES = (0.60, 0.40, 0.25, 0.15)
SINGLES = ("rotor", "rotor-menus", "offload-graph", "dynprog")
JOINT = "joint"
STRATEGIES = (*SINGLES, JOINT)
LIMIT_S = 20.0
ROWS, GRAPHS = Path("docs/results/joint_rows.json"), Path("out/joint")
LEAST_S, MOST_STRETCH = 0.5, 20.0
"""Cells of less CPU time say nothing about the machine's other work; the most it may stretch."""
DIGITS = 6
MOST_PLANNING_S = 60.0
NOTHING = float("nan")

Cell: TypeAlias = tuple[str, str, float]
"""Device, model and share."""


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
    wall_s: float
    limit_s: float
    impossible: bool
    """Whether no plan of any kind can need so little memory; nobody is asked for one then."""

    @property
    def cell(self) -> Cell:
        """What strategies are compared in."""
        return self.device, self.model, self.share


def budget_of(graph: Graph, share: float) -> int:
    """Resident bytes and a share of what store-all needs beyond them."""
    peak_bytes = replay(graph, store_all(graph)).peak_bytes
    return graph.resident_bytes + int(share * (peak_bytes - graph.resident_bytes))


def row_of(
    graph: Graph,
    device: Device,
    model: str,
    share: float,
    name: str,
    limit_s: float,
    stretch: float,
) -> Row:
    """Plan one cell by one strategy, in `stretch` times `limit_s` seconds by the wall clock."""
    base, budget = replay(graph, store_all(graph)), budget_of(graph, share)
    impossible = memory_lower_bound(graph) > budget
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    figures: tuple[float | None, ...] = (None, None, None)
    if not impossible:
        # No plan within the budget, or the strategy cannot plan this graph.
        with contextlib.suppress(MemoptError):
            plan = solve(
                graph, budget, resolve(name), device=device, time_limit_s=stretch * limit_s
            )
            least_s = plan.lower_bound_s
            figures = (
                plan.step_time_s / base.time_s - 1,
                least_s / base.time_s - 1,
                plan.step_time_s / least_s - 1,
            )
    overhead, bound, gap = (None if x is None else round(x, DIGITS) for x in figures)
    return Row(
        device.name, model, share, name, overhead, bound, gap,
        round(time.process_time() - cpu_s, 2), round(time.perf_counter() - wall_s, 2), limit_s,
        impossible,
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


def kept_rows(path: Path) -> Kept[Row]:
    """The rows that are there."""
    return Kept(path, Row, {"batch": BATCH})


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
    heads = ["model", "share", *SINGLES, JOINT, "bound", "gap", "limit, s", "planning, CPU s"]
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
        parts += [percent(joint.bound, False), percent(joint.gap, False)]
        parts += [f"{joint.limit_s:g}", f"{joint.cpu_s:.0f}"]
        lines.append("| " + " | ".join(parts) + " |")
    return lines


def holds(whether: bool) -> str:
    """Whether what is promised of the table is so."""
    return "holds" if whether else "**does not hold**"


def best_singles(rows: list[Row], cells: Container[Cell]) -> dict[Cell, float | None]:
    """The least overhead of a single strategy in each of some cells; None: no plan."""
    best: dict[Cell, float | None] = {}
    for row in rows:
        if row.strategy != JOINT and row.cell in cells:
            found = (best.get(row.cell), row.overhead)
            best[row.cell] = min((x for x in found if x is not None), default=None)
    return best


def summary(rows: list[Row]) -> list[str]:
    """Joint against the best single strategy of each cell, and whether it does what it is to."""
    joint = {row.cell: row for row in rows if row.strategy == JOINT}
    best = best_singles(rows, joint)
    both = [
        (joint[cell].overhead, least, cell) for cell, least in best.items() if least is not None
    ]
    slower = [cell for own, least, cell in both if own is not None and own > least + 1e-9]
    without = [cell for own, _, cell in both if own is None]
    ratios = [
        max(0.0, own) / least
        for own, least, cell in both
        if own is not None and least > 0 and cell[2] <= 0.40
    ]
    none = [cell for cell, least in best.items() if least is None and not joint[cell].impossible]
    new = [cell for cell in none if joint[cell].overhead is not None]
    return [
        f"- Cells: {len(joint)} of {len(MODELS) * len(DEVICES) * len(SHARES)}; in "
        f"{sum(row.impossible for row in joint.values())} no plan of any kind exists (×: proved).",
        f"- Never slower than the best single strategy: {holds(not slower)}{named(slower)}.",
        f"- At most half of the best single strategy's overhead in the median over the cells of "
        f"share ≤ .40: {holds(median(ratios) <= 0.5)} ({median(ratios):.2f} over {len(ratios)} "
        "cells in which that has one).",
        f"- A plan wherever a single strategy has one ({len(both)} cells): "
        f"{holds(not without)}{named(without)}.",
        f"- A plan in at least half of the cells where none has one and none is proved impossible: "
        f"{holds(2 * len(new) >= len(none))} ({len(new)} of {len(none)}).",
        *planning_lines(list(joint.values())),
    ]


def planning_lines(joint: list[Row]) -> list[str]:
    """Gaps and planning times of the strategy."""
    planned = [row for row in joint if row.overhead is not None]
    gaps = [row.gap for row in planned if row.gap is not None]
    cpu, wall = [row.cpu_s for row in joint], [row.wall_s for row in joint]
    return [
        f"- A gap to the bound in every cell that has a plan: {holds(len(gaps) == len(planned))}; "
        f"median at most 3%: {holds(median(gaps) <= 0.03)} (median {median(gaps):.1%}, largest "
        f"{max(gaps, default=NOTHING):.1%}).",
        f"- Planning in at most {MOST_PLANNING_S:g} s of CPU time: "
        f"{holds(max(cpu) <= MOST_PLANNING_S)} (median {median(cpu):.0f} s, most {max(cpu):.0f} s; "
        f"by the clock, beside other work: median {median(wall):.0f} s, most {max(wall):.0f} s).",
    ]


def median(values: list[float]) -> float:
    """The median; not a number where there are no values."""
    return statistics.median(values) if values else NOTHING


def named(cells: list[Cell]) -> str:
    """Cells in brackets."""
    return "".join(f" ({device} {model} {share:g})" for device, model, share in cells)


def page(rows: list[Row]) -> str:
    """The results page."""
    places = {find_device(name).name: place for place, name in enumerate(DEVICES)}
    rows = sorted(rows, key=lambda row: (places[row.device], MODELS.index(row.model), -row.share))
    limits = sorted({row.limit_s for row in rows})
    lines = [
        "# Everything in one plan",
        "",
        "`python -m benchmarks.joint_tables --page docs/results/joint.md`, a limit of "
        f"{' or '.join(f'{limit:g}' for limit in limits)} s a plan, torch {torch.__version__}, "
        f"{os.cpu_count()} cores ([rows](joint_rows.json)). Estimated steps, batch {BATCH}, exact "
        "implementations, budget = resident + share × (peak − resident); overheads over the step "
        "as it is. –: no plan found. ×: no plan of any kind needs so little.",
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
    parser.add_argument("--resume", type=Path, default=ROWS)
    parser.add_argument("--graphs", type=Path, default=GRAPHS)
    parser.add_argument("--page", type=Path)
    options = parser.parse_args()
    kept = kept_rows(options.resume)
    pace = Pace()
    try:
        for number, (name, model, share, strategy) in enumerate(wanted(options, kept)):
            if options.most is not None and number >= options.most:
                break
            device = find_device(name)
            graph = estimated_graph(model, options.graphs / device.name, device=device)
            row = row_of(graph, device, model, share, strategy, options.limit, pace.stretch)
            pace.note(row.cpu_s, row.wall_s)
            kept.add(key_of(name, model, share, strategy), [row])
            sys.stdout.write(
                f"{name} {model} {share:g} {strategy}: {percent(row.overhead, row.impossible)} "
                f"{row.cpu_s:.0f} s ({row.wall_s:.0f} s by the clock)\n"
            )
            sys.stdout.flush()
    except KeyboardInterrupt:
        return 130
    finally:
        if options.page is not None and kept.rows:
            rows = [row for many in kept.rows.values() for row in many]
            options.page.write_text(page(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
