"""Everything in one plan beside each strategy alone: overheads, bounds and gaps (estimated).

Graphs of the zoo's models at their published sizes, batch 32, with exact implementations. A cell is
one strategy at one budget: resident bytes + share x (peak - resident), the peak being store-all's,
every plan validated and replayed. Finished cells are kept in the repository, so that the table can
grow in parts: `--only "H100-SXM-80GB joint"` plans the cells of one device and strategy. Where
other work takes the machine's time, limits in seconds are stretched by as much as it took of the
cell before.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Container
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import median
from typing import Any, TypeAlias

from matplotlib.axes import Axes

from benchmarks.graphs import BATCH, step_graph
from benchmarks.pictures import panels
from benchmarks.runner import Benchmark, crossed
from benchmarks.table import NONE, by, joined, signed, table
from memopt.api.planning import solve
from memopt.errors import MemoptError
from memopt.models.bounds import memory_lower_bound
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.programs.liveness import store_all
from memopt.programs.replay import Timeline, replay
from memopt.report.style import GREY
from memopt.strategies import Auto, resolve
from tests.zoo import FAMILIES

FIRST = ("resnet50", "gpt2+loss", "unet", "vit_b_16", "llama+loss")
MODELS = (*FIRST, *(f.name for f in FAMILIES if f.name not in FIRST), "bert+loss")
DEVICES = tuple(find_device(name).name for name in ("H100", "GH200", "A100"))
SHARES = (0.60, 0.40, 0.25, 0.15)
SINGLES = ("rotor", "rotor-menus", "offload-graph", "dynprog")
JOINT = "joint"
STRATEGIES = (*SINGLES, JOINT)
AT_ONCE = "at once"
"""The first plan of `auto`."""
ROWS = "docs/results/joint_rows.json"
LEAST_S, MOST_STRETCH = 0.5, 20.0
"""Cells of less CPU time say nothing about the machine's other work; the most it may stretch."""
DIGITS = 6
COLORS = {"rotor": "C0", "rotor-menus": "C2", "offload-graph": "C1", "dynprog": "C4", JOINT: "C3"}
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
    chosen: str = ""
    operators: int = 0

    @property
    def cell(self) -> Cell:
        return self.device, self.model, self.share


@cache
def pace() -> Pace:
    """Give this process's."""
    return Pace()


@lru_cache(maxsize=1)
def _step(model: str, device: str) -> tuple[Graph, Timeline]:
    graph = step_graph(model, find_device(device))
    return graph, replay(graph, store_all(graph))


def planned(
    device: str, model: str, share: float, name: str, limit_s: float, stretch: float = 1.0
) -> Row:
    """Plan a model's step by the strategy of that name, within its resident bytes and a share of
    what store-all needs beyond them.

    Args:
        limit_s: of planning; 0: none but the strategy's own.
        stretch: how many times the limit is given.
    """
    graph, base = _step(model, device)
    budget = graph.resident_bytes + int(share * (base.peak_bytes - graph.resident_bytes))
    impossible, chosen = memory_lower_bound(graph) > budget, ""
    strategy = Auto(at_once=True) if name == AT_ONCE else resolve(name)
    cpu_s, wall_s = time.process_time(), time.perf_counter()
    figures: tuple[float | None, ...] = (None, None, None)
    if not impossible:
        # No plan within the budget, or the strategy cannot plan this graph.
        with contextlib.suppress(MemoptError):
            how = {"device": find_device(device), "time_limit_s": stretch * limit_s or None}
            plan = solve(graph, budget, strategy, **how)
            time_s, least_s = plan.step_time_s, plan.lower_bound_s
            figures = (time_s / base.time_s - 1, least_s / base.time_s - 1, time_s / least_s - 1)
            chosen = str(plan.stats.get("chosen", ""))
    rounded = (None if x is None else round(x, DIGITS) for x in figures)
    spent = time.process_time() - cpu_s, time.perf_counter() - wall_s
    pace().note(*spent)
    took, many = (round(seconds, 2) for seconds in spent), len(graph.operators)
    what = (device, model, share, name)
    return Row(*what, *rounded, *took, limit_s, impossible, chosen, many)


def _planned(given: Any, device: str, model: str, share: float, name: str) -> list[Row]:
    return [planned(device, model, share, name, given.limit, pace().stretch)]


@dataclass
class Pace:
    """How much slower the wall clock's seconds are than this process's."""

    stretch: float = 1.0

    def __post_init__(self) -> None:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        while time.process_time() < cpu_s + LEAST_S:
            pass
        self.note(time.process_time() - cpu_s, time.perf_counter() - wall_s)

    def note(self, cpu_s: float, wall_s: float) -> None:
        """Take the last cell's; short ones say little."""
        if cpu_s >= LEAST_S:
            self.stretch = min(MOST_STRETCH, max(1.0, wall_s / cpu_s))


def _table(rows: list[Row]) -> str:
    lines = []
    for cell, some in by(rows, "cell").items():
        of = {row.strategy: row for row in some}
        if JOINT not in of:
            continue
        joint = of[JOINT]
        none = "×" if joint.impossible else NONE
        single = [signed(of[n].overhead, none=none) if n in of else "" for n in SINGLES]
        lines.append(
            f"{cell[1]} | .{round(100 * cell[2]):02d} | {' | '.join(single)} | "
            f"**{signed(joint.overhead, none=none)}** | {signed(joint.bound)} | "
            f"{signed(joint.gap)} | {joint.limit_s:g} | {joint.cpu_s:.0f}"
        )
    names = " | ".join((*SINGLES, JOINT))
    return table(f"model | share | {names} | bound | gap | limit, s | planning, CPU s", lines)


def holds(whether: bool) -> str:
    """Say whether what is promised of the table is so."""
    return "holds" if whether else "**does not hold**"


def best_singles(rows: list[Row], cells: Container[Cell]) -> dict[Cell, float | None]:
    """Find the least overhead of a single strategy in each of some cells; None: no plan."""
    best: dict[Cell, float | None] = {}
    for row in rows:
        if row.strategy != JOINT and row.cell in cells:
            found = (best.get(row.cell), row.overhead)
            best[row.cell] = min((x for x in found if x is not None), default=None)
    return best


def summary(rows: list[Row]) -> list[str]:
    """Compare joint with the best single strategy of each cell, and with what it is to do."""
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
    middle = median(ratios or [NOTHING])
    none = [cell for cell, least in best.items() if least is None and not joint[cell].impossible]
    new = [cell for cell in none if joint[cell].overhead is not None]
    return [
        f"- Cells: {len(joint)} of {len(MODELS) * len(DEVICES) * len(SHARES)}; in "
        f"{sum(row.impossible for row in joint.values())} no plan of any kind exists (×: proved).",
        f"- Never slower than the best single strategy: {holds(not slower)}{named(slower)}.",
        f"- At most half of the best single strategy's overhead in the median over the cells of "
        f"share ≤ .40: {holds(middle <= 0.5)} ({middle:.2f} over {len(ratios)} cells in which that "
        "has one).",
        f"- A plan wherever a single strategy has one ({len(both)} cells): "
        f"{holds(not without)}{named(without)}.",
        f"- A plan in at least half of the cells where none has one and none is proved impossible: "
        f"{holds(2 * len(new) >= len(none))} ({len(new)} of {len(none)}).",
        *planning_lines(list(joint.values())),
    ]


def planning_lines(joint: list[Row]) -> list[str]:
    """Say the gaps and planning times of the strategy."""
    planned = [row for row in joint if row.overhead is not None]
    gaps = [row.gap for row in planned if row.gap is not None]
    middle = median(gaps or [NOTHING])
    cpu, wall = [row.cpu_s for row in joint], [row.wall_s for row in joint]
    return [
        f"- A gap to the bound in every cell that has a plan: {holds(len(gaps) == len(planned))}; "
        f"median at most 3%: {holds(middle <= 0.03)} (median {middle:.1%}, largest "
        f"{max(gaps, default=NOTHING):.1%}).",
        f"- Planning in at most {MOST_PLANNING_S:g} s of CPU time: "
        f"{holds(max(cpu) <= MOST_PLANNING_S)} (median {median(cpu):.0f} s, most {max(cpu):.0f} s; "
        f"by the clock, beside other work: median {median(wall):.0f} s, most {max(wall):.0f} s).",
    ]


def named(cells: list[Cell]) -> str:
    """Write cells in brackets."""
    return "".join(f" ({device} {model} {share:g})" for device, model, share in cells)


def _blocks(rows: list[Row], _: Any) -> str:
    rows = sorted(rows, key=lambda r: (DEVICES.index(r.device), MODELS.index(r.model), -r.share))
    limits = " or ".join(f"{limit:g}" for limit in sorted({row.limit_s for row in rows}))
    parts = [f"{os.cpu_count()} cores, a limit of {limits} s a plan ([rows](joint_rows.json))."]
    parts += ["\n".join(summary(rows))] if any(row.strategy == JOINT for row in rows) else []
    for device, some in by(rows, "device").items():
        parts += [f"## {device}", _table(some)]
    return joined(*parts)


def _curves(rows: list[Row], _: Any) -> None:
    """Draw overhead against the share of the memory on an H100, a panel for each model; below the
    shaded line no plan can be."""
    path, how = "docs/strategies/joint-curves.png", {"across": 3, "size": (3.0, 2.9), "dpi": 110}
    with panels(path, len(FIRST), **how) as grid:
        for axes, model in zip(grid, FIRST, strict=True):
            _panel(axes, [r for r in rows if (r.model, r.device) == (model, DEVICES[0])])
            axes.set_title(model, loc="left", fontsize="medium")
            axes.set_ylabel("step time over store-all's, %" if axes in grid[::3] else "")


def _panel(axes: Axes, rows: list[Row]) -> None:
    def points(name: str, what: str) -> tuple[list[float], list[float]]:
        own = sorted((r.share, getattr(r, what)) for r in rows if r.strategy == name)
        found = [(share, 100 * over) for share, over in own if over is not None]
        return [share for share, _ in found], [over for _, over in found]

    for name in STRATEGIES:
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "color": COLORS[name]}
        width = 2.0 if name == JOINT else 1.0
        axes.plot(*points(name, "overhead"), label=name, linewidth=width, **style)
    shares, bounds = points(JOINT, "bound")
    axes.plot(shares, bounds, color=GREY, linestyle=":", label="bound")
    axes.fill_between(shares, bounds, -10, color=GREY, alpha=0.25)
    axes.set_xticks(SHARES, [f".{round(100 * share):02d}" for share in SHARES])
    axes.set(ylim=(-10, 60), xlabel="share of the memory")


BENCHMARK = Benchmark(
    page="docs/results/joint.md",
    row=Row,
    cases=crossed(DEVICES, MODELS, SHARES, STRATEGIES),
    measure=_planned,
    blocks=_blocks,
    options={"limit": 20.0},
    marks=lambda _: {"batch": BATCH},
    rows_file=ROWS,
    pictures=_curves,
)
