"""MONeT's Table 1 redone: memory at 10% compute overhead, estimated for the paper's P100.

    python -m benchmarks.monet_table1 [--folder FOLDER] [--out docs/results/monet_table1.md]
        [--limit SECONDS] [MODEL ...]

Batch sizes are the paper's (MONeT's repository names them). Every solve is kept in FOLDER: a
stopped run goes on where it was. What really runs on the CPU is `monet_cpu`'s.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.monet_algorithms import algorithms_table
from benchmarks.monet_runs import (
    CASES,
    DEVICE,
    GIB,
    Case,
    Record,
    Runs,
    case_of,
    eager_peak_bytes,
    estimated_graph,
)
from memopt.models.presets import find_device
from memopt.strategies.base import Strategy
from memopt.strategies.monet.menus import RotorMenus
from memopt.strategies.monet.strategy import Checkmate, Monet
from memopt.strategies.rotor.persistent import Rotor

OVERHEAD = 0.1
SHARES = (0.35, 0.4, 0.5, 0.6, 0.7)
STRATEGIES: dict[str, Strategy] = {
    "Rotor": Rotor(),
    "rotor-menus": RotorMenus(),
    "Checkmate-O": Checkmate(fastest=True),
    "MONeT, exact": Monet(exact_only=True),
    "MONeT": Monet(exact_only=False),
}


class Column:
    """One model's results."""

    def __init__(self, case: Case, folder: Path, limit_s: float) -> None:
        self.case = case
        graph = estimated_graph(case, folder)
        self.runs = Runs(case.family, graph, folder, limit_s, find_device(DEVICE))
        self.eager_bytes = eager_peak_bytes(graph)
        self.at_budget: dict[str, list[Record]] = {}
        self.at_overhead: dict[str, Record | None] = {}
        for name, strategy in STRATEGIES.items():
            budgets = [int(share * self.eager_bytes) for share in SHARES]
            known = [self.runs.solve(strategy, budget) for budget in budgets]
            self.at_budget[name] = known
            self.at_overhead[name] = self.runs.memory_at(strategy, OVERHEAD, known)

    def memory_row(self) -> str:
        """Of the first table."""
        case = self.case
        ours = f"{self.eager_bytes / GIB:.1f}"
        cells = [case.family, str(case.batch), f"{case.pytorch_gib} / {ours}"]
        cells += [f"{case.checkmate_gib / case.pytorch_gib:.2f}", f"{case.paper_share:.2f}"]
        for name in STRATEGIES:
            found = self.at_overhead[name]
            if found is None or found.peak_bytes is None:
                cells.append("none")
            else:
                share = found.peak_bytes / self.eager_bytes
                cells.append(f"{found.peak_bytes / GIB:.2f} ({share:.2f})")
        return f"| {' | '.join(cells)} |"

    def budget_rows(self) -> list[str]:
        """Of the second table, one for each budget."""
        rows = []
        for number, share in enumerate(SHARES):
            cells = [self.case.family, f"{share:.2f}"]
            records = {name: self.at_budget[name][number] for name in STRATEGIES}
            cells += [self.runs.overhead(record) for record in records.values()]
            ours, theirs = records["MONeT"].time_s, records["Checkmate-O"].time_s
            cells.append("-" if ours is None or theirs is None else f"{theirs / ours:.3f}")
            gap = records["MONeT"].gap
            cells.append("-" if gap is None else f"{gap:.1%}")
            cells.append(f"{records['MONeT'].planning_s:.0f}")
            cells.append(f"{records['Checkmate-O'].planning_s:.0f}")
            rows.append(f"| {' | '.join(cells)} |")
        return rows


def page(columns: list[Column], command: str, limit_s: float) -> str:
    """The whole page but for what runs on the CPU."""
    names = list(STRATEGIES)
    below = [
        column.case.family
        for column in columns
        if (found := column.at_overhead["MONeT"]) is not None
        and found.peak_bytes is not None
        and found.peak_bytes / column.eager_bytes < column.case.paper_share
    ]
    lines = [
        "# MONeT's Table 1, estimated",
        "",
        f"`{command}`. Estimated for the paper's {DEVICE}; no GPU is involved. "
        f"Time limit {limit_s:g} s per plan, on a shared machine.",
        "",
        "Memory at 10% compute overhead, GiB and share of PyTorch's (the paper's GB are 2^30 "
        "bytes). PyTorch's own memory, the paper's and estimated, is that of the step without "
        "memopt, in-place ReLU6 included. The paper's shares: 'Checkmate' and 'MONeT' of its Table "
        "1. 'exact' leaves out implementations that change rounding; the paper's MONeT has them "
        "(batch norm from its output).",
        "",
        f"| model | batch | PyTorch: paper / here | Checkmate, paper | MONeT, paper | "
        f"{' | '.join(names)} |",
        "|" + "---|" * (5 + len(names)),
        *(column.memory_row() for column in columns),
        "",
        f"MONeT's share is below the paper's for {', '.join(below) or 'none'}.",
        "",
        "## At the same budgets",
        "",
        "Time overhead; 'ratio' is Checkmate-O's time over MONeT's; 'gap' is MONeT's plan over the "
        "proved bound; seconds are of planning. In an estimate an algorithm of a convolution is "
        "never taken to be faster than the library's default, so that Checkmate-O is Checkmate-D.",
        "",
        f"| model | budget | {' | '.join(names)} | ratio | gap | s | s, Checkmate-O |",
        "|" + "---|" * (6 + len(names)),
        *(row for column in columns for row in column.budget_rows()),
        "",
        *algorithms_table(),
    ]
    return "\n".join([*lines, ""])


def main() -> None:
    """Print the page, and write it after every model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("out/monet-table1"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--limit", type=float, default=60.0)
    parser.add_argument("models", nargs="*", default=[case.family for case in CASES])
    options = parser.parse_args()
    columns: list[Column] = []
    text = ""
    for name in options.models:
        columns.append(Column(case_of(name), options.folder, options.limit))
        text = page(columns, "python -m benchmarks.monet_table1", options.limit)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
