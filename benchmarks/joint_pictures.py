"""Pictures of docs/strategies/joint.md: time against memory from the table's rows, and a timeline.

The curves are drawn of whatever cells `joint_tables` has kept. The timeline is of one joint plan,
made anew with a short local search.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import memopt
from benchmarks import joint_tables
from benchmarks.graphs import BATCH, step_graph
from benchmarks.joint_tables import FIRST, JOINT, SHARES, SINGLES, budget_of
from benchmarks.runner import Benchmark
from benchmarks.table import Kept
from memopt.models.presets import find_device
from memopt.report.style import GREY, new_figure
from memopt.strategies import Joint

DOTS_PER_INCH = 110
COLUMNS = 3
CHANGES, PLANNING_S = 2000, 600.0
"""Of the timeline's plan: the changes end it, not the seconds."""
COLORS = {"rotor": "C0", "rotor-menus": "C2", "offload-graph": "C1", "dynprog": "C4", JOINT: "C3"}


@dataclass(frozen=True)
class Row:
    """A picture that was drawn."""

    path: str
    size_bytes: int


def _curves(given: Any) -> Figure:
    """Draw overhead against the share of the memory, a panel for each model; below the shaded line
    no plan can be."""
    kept = Kept(Path(joint_tables.ROWS), joint_tables.Row, {"batch": BATCH})
    device = find_device(given.device).name
    rows = [row for many in kept.rows.values() for row in many if row.device == device]
    lines = -(-len(FIRST) // COLUMNS)
    figure = Figure(figsize=(9.0, 2.9 * lines), layout="constrained")
    grid = figure.subplots(lines, COLUMNS, squeeze=False)
    for axes in grid.flat[len(FIRST) :]:
        axes.set_axis_off()
    for axes, model in zip(grid.flat, FIRST, strict=False):
        _panel(axes, [row for row in rows if row.model == model])
        axes.set_title(model, loc="left", fontsize="medium")
    for axes in grid[:, 0]:
        axes.set_ylabel("step time over store-all's, %")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def _panel(axes: Axes, rows: list[joint_tables.Row]) -> None:
    def points(name: str, what: str) -> tuple[list[float], list[float]]:
        found = sorted(
            (row.share, 100 * getattr(row, what))
            for row in rows
            if row.strategy == name and getattr(row, what) is not None
        )
        return [share for share, _ in found], [over for _, over in found]

    for name in (*SINGLES, JOINT):
        width = 2.0 if name == JOINT else 1.0
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": width}
        axes.plot(*points(name, "overhead"), color=COLORS[name], label=name, **style)
    shares, bounds = points(JOINT, "bound")
    axes.plot(shares, bounds, color=GREY, linestyle=":", label="bound")
    axes.fill_between(shares, bounds, -10, color=GREY, alpha=0.25)
    axes.set_xticks(SHARES, [f".{round(100 * share):02d}" for share in SHARES])
    axes.set_ylim(-10, 60)
    axes.set_xlabel("share of the memory")


def _timeline(given: Any) -> Figure:
    """Draw compute and copies of a joint plan."""
    device = find_device(given.device)
    graph = step_graph(given.model, device)
    budget, strategy = budget_of(graph, given.share), Joint(changes=CHANGES)
    how = {"device": device, "time_limit_s": PLANNING_S, "progress": False}
    plan = memopt.plan(graph, budget=budget, strategy=strategy, **how)
    figure, axes = new_figure(2.2)
    plan.plot("timeline", axes)
    axes.set_title(f"{given.model}, share {given.share:g}, {plan.overhead:+.1%}", loc="left")
    return figure


def _drawn(given: Any, name: str) -> list[Row]:
    path = given.folder / f"joint-{name}.png"
    DRAW[name](given).savefig(path, dpi=DOTS_PER_INCH)
    return [Row(str(path), path.stat().st_size)]


DRAW = {"curves": _curves, "timeline": _timeline}
BENCHMARK = Benchmark(
    row=Row,
    cases={name: (name,) for name in DRAW},
    measure=_drawn,
    head="picture | KiB",
    line=lambda row: (row.path, f"{row.size_bytes / 1024:.0f}"),
    selects=("folder",),
    options={
        "device": "H100",
        "model": "vit_b_16",
        "share": 0.25,
        "folder": Path("docs/strategies"),
    },
)
