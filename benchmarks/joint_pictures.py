"""Pictures of docs/strategies/joint.md: time against memory from the table's rows, and a timeline.

    python -m benchmarks.joint_pictures [--only curves|timeline] [--rows FILE] [--graphs FOLDER]
        [--device H100] [--models NAME ...] [--plan NAME SHARE] [--folder docs/strategies]

The curves are drawn of whatever cells `benchmarks.joint_tables` has kept. The timeline is of one
joint plan, made anew with a short local search.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

import memopt
from benchmarks.joint_tables import (
    FIRST,
    GRAPHS,
    JOINT,
    ROWS,
    SHARES,
    SINGLES,
    Row,
    budget_of,
    kept_rows,
)
from benchmarks.monet_menus import estimated_graph
from memopt.models.device import Device
from memopt.models.presets import find_device
from memopt.report.style import GREY, new_figure
from memopt.strategies import Joint

DOTS_PER_INCH = 110
COLUMNS = 3
CHANGES, PLANNING_S = 2000, 600.0
"""Of the timeline's plan: the changes end it, not the seconds."""
COLORS = {"rotor": "C0", "rotor-menus": "C2", "offload-graph": "C1", "dynprog": "C4", JOINT: "C3"}


def curves(rows: list[Row], models: list[str]) -> Figure:
    """Overhead against the share of the memory, a panel for each model; below the shaded line no
    plan can be."""
    lines = -(-len(models) // COLUMNS)
    figure = Figure(figsize=(9.0, 2.9 * lines), layout="constrained")
    grid = figure.subplots(lines, COLUMNS, squeeze=False)
    for axes in grid.flat[len(models) :]:
        axes.set_axis_off()
    for axes, model in zip(grid.flat, models, strict=False):
        panel(axes, [row for row in rows if row.model == model])
        axes.set_title(model, loc="left", fontsize="medium")
    for axes in grid[:, 0]:
        axes.set_ylabel("step time over store-all's, %")
    handles, labels = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


def panel(axes: Axes, rows: list[Row]) -> None:
    """One model."""
    for name in (*SINGLES, JOINT):
        found = sorted(
            (row.share, 100 * row.overhead)
            for row in rows
            if row.strategy == name and row.overhead is not None
        )
        axes.plot(
            [share for share, _ in found],
            [over for _, over in found],
            color=COLORS[name],
            marker="o",
            markersize=4,
            linewidth=2.0 if name == JOINT else 1.0,
            label=name,
        )
    bounds = sorted(
        (row.share, 100 * row.bound)
        for row in rows
        if row.strategy == JOINT and row.bound is not None
    )
    shares = [share for share, _ in bounds]
    axes.plot(shares, [over for _, over in bounds], color=GREY, linestyle=":", label="bound")
    axes.fill_between(shares, [over for _, over in bounds], -10, color=GREY, alpha=0.25)
    axes.set_xticks(SHARES, [f".{round(100 * share):02d}" for share in SHARES])
    axes.set_ylim(-10, 60)
    axes.set_xlabel("share of the memory")


def timeline(model: str, share: float, device: Device, folder: Path) -> Figure:
    """Compute and copies of a joint plan."""
    graph = estimated_graph(model, folder, device=device)
    plan = memopt.plan(
        graph,
        budget=budget_of(graph, share),
        strategy=Joint(changes=CHANGES),
        device=device,
        time_limit_s=PLANNING_S,
        progress=False,
    )
    figure, axes = new_figure(2.2)
    plan.plot("timeline", axes)
    axes.set_title(f"{model}, share {share:g}, {plan.overhead:+.1%}", loc="left")
    return figure


def main() -> int:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joint_pictures")
    parser.add_argument("--only", choices=("curves", "timeline"))
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--graphs", type=Path, default=GRAPHS)
    parser.add_argument("--device", default="H100")
    parser.add_argument("--models", nargs="+", default=list(FIRST))
    parser.add_argument("--plan", nargs=2, metavar=("NAME", "SHARE"), default=("vit_b_16", "0.25"))
    parser.add_argument("--folder", type=Path, default=Path("docs/strategies"))
    options = parser.parse_args()
    device = find_device(options.device)
    pictures: dict[str, Figure] = {}
    if options.only != "timeline":
        kept = kept_rows(options.rows)
        rows = [row for many in kept.rows.values() for row in many if row.device == device.name]
        pictures["joint-curves"] = curves(rows, options.models)
    if options.only != "curves":
        name, share = options.plan
        folder = options.graphs / device.name
        pictures["joint-timeline"] = timeline(name, float(share), device, folder)
    for name, figure in pictures.items():
        path = options.folder / f"{name}.png"
        figure.savefig(path, dpi=DOTS_PER_INCH)
        print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
