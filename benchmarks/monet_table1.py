"""MONeT's Table 1 redone: memory at 10% compute overhead, estimated for the paper's P100.

    python -m benchmarks.monet_table1 [--folder FOLDER] [--out docs/results/monet_table1.md]
        [--limit SECONDS] [--quick] [--ways STRATEGY ...] [--models MODEL ...]

--quick plans for the paper's memory only, in place of looking for the least at 10%.

Batch sizes are the paper's (MONeT's repository names them). Every solve is kept in FOLDER: a
stopped run goes on where it was. What really runs on the CPU is `monet_cpu`'s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
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
    """One model's results; what was not asked for is missing from `at_budget`."""

    def __init__(
        self, case: Case, folder: Path, limit_s: float, ways: Sequence[str], quick: bool
    ) -> None:
        self.case = case
        graph = estimated_graph(case, folder)
        self.runs = Runs(case.family, graph, folder, limit_s, find_device(DEVICE))
        self.eager_bytes = eager_peak_bytes(graph)
        self.shares = (case.paper_share,) if quick else (case.paper_share, *SHARES)
        self.at_budget: dict[str, list[Record]] = {}
        self.at_overhead: dict[str, Record | None] = {}
        for name in ways:
            strategy = STRATEGIES[name]
            budgets = [int(share * self.eager_bytes) for share in self.shares]
            known = [self.runs.solve(strategy, budget) for budget in budgets]
            self.at_budget[name] = known
            if not quick:
                self.at_overhead[name] = self.runs.memory_at(strategy, OVERHEAD, known)

    def memory_row(self) -> str:
        """Of the first table."""
        case = self.case
        ours = f"{self.eager_bytes / GIB:.1f}"
        cells = [case.family, str(case.batch), f"{case.pytorch_gib} / {ours}"]
        cells += [f"{case.checkmate_gib / case.pytorch_gib:.2f}", f"{case.paper_share:.2f}"]
        cells += [self._memory(name) for name in STRATEGIES]
        return f"| {' | '.join(cells)} |"

    def _memory(self, name: str) -> str:
        """A strategy's memory at 10%: the least found, or its plan's at the paper's budget."""
        if name not in self.at_budget:
            return "-"
        first = self.at_budget[name][0]
        found = self.at_overhead.get(name, first if self.within(first) else None)
        if found is None or found.peak_bytes is None:
            return "none" if name in self.at_overhead else "more"
        share = found.peak_bytes / self.eager_bytes
        least = "" if name in self.at_overhead else "≤ "
        return f"{least}{found.peak_bytes / GIB:.2f} ({share:.2f})"

    def within(self, record: Record) -> bool:
        """Whether a plan takes at most 10% more time."""
        return record.time_s is not None and record.time_s <= (1 + OVERHEAD) * self.runs.base_s

    def budget_rows(self) -> list[str]:
        """Of the second table, one for each budget."""
        rows = []
        for number, share in enumerate(self.shares):
            records = {name: found[number] for name, found in self.at_budget.items()}
            cells = [self.case.family, f"{share:.2f}"]
            cells += [
                self.runs.overhead(records[name]) if name in records else "-" for name in STRATEGIES
            ]
            ours, theirs = records.get("MONeT"), records.get("Checkmate-O")
            both = ours and theirs and ours.time_s and theirs.time_s
            cells.append(f"{theirs.time_s / ours.time_s:.3f}" if both else "-")  # type: ignore[operator,union-attr]  # both
            gap = None if ours is None else ours.gap
            cells.append("-" if gap is None else f"{gap:.1%}")
            cells += ["-" if r is None else f"{r.planning_s:.0f}" for r in (ours, theirs)]
            rows.append(f"| {' | '.join(cells)} |")
        return rows


def page(columns: list[Column], command: str, limit_s: float) -> str:
    """The whole page but for what runs on the CPU."""
    names = list(STRATEGIES)
    below = [
        column.case.family
        for column in columns
        if "MONeT" in column.at_budget and column.within(column.at_budget["MONeT"][0])
    ]
    lines = [
        "# MONeT's Table 1, estimated",
        "",
        f"`{command}`. Estimated for the paper's {DEVICE}; no GPU is involved. "
        f"Time limit {limit_s:g} s per plan, on a shared machine.",
        "",
        "Memory at 10% compute overhead, GiB and share of PyTorch's (the paper's GB are 2^30 "
        "bytes). PyTorch's own memory, the paper's and estimated, is that of the step without "
        "memopt; today's would copy the input of every in-place ReLU6, the paper's did not. The "
        "paper's shares are of its Table 1. 'exact' leaves out implementations that change "
        "rounding; the paper's MONeT has them (batch norm from its output).",
        "",
        f"| model | batch | PyTorch: paper / here | Checkmate, paper | MONeT, paper | "
        f"{' | '.join(names)} |",
        "|" + "---|" * (5 + len(names)),
        *(column.memory_row() for column in columns),
        "",
        *(
            ["'≤': a plan within the paper's share takes at most 10% more; 'more': none found.", ""]
            if columns and not columns[0].at_overhead
            else []
        ),
        "The first budget of each model is the paper's share. Within it MONeT here takes at most "
        f"10% more time for {', '.join(below) or 'none'}.",
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
        "## Implementations chosen",
        "",
        "By MONeT at each model's first budget, with the number of runs.",
        "",
        *(
            f"- {column.case.family}: {column.at_budget['MONeT'][0].chosen or 'none'}"
            for column in columns
            if "MONeT" in column.at_budget
        ),
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
    parser.add_argument("--quick", action="store_true", help="only at the paper's memory")
    parser.add_argument("--ways", nargs="+", choices=tuple(STRATEGIES), default=tuple(STRATEGIES))
    parser.add_argument("--models", nargs="+", default=[case.family for case in CASES])
    options = parser.parse_args()
    command = "python -m benchmarks.monet_table1" + (" --quick" if options.quick else "")
    if len(options.ways) < len(STRATEGIES):
        command += " --ways " + " ".join(f'"{way}"' for way in options.ways)
    columns: list[Column] = []
    text = ""
    for name in options.models:
        columns.append(
            Column(case_of(name), options.folder, options.limit, options.ways, options.quick)
        )
        text = page(columns, command, options.limit)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
