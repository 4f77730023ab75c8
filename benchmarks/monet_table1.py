"""MONeT's Table 1 redone: memory at 10% compute overhead, estimated for the paper's P100.

    python -m benchmarks.monet_table1 [--folder FOLDER] [--out docs/results/monet_table1.md]
        [--limit SECONDS] [--quick | --shares] [--ways STRATEGY ...] [--models MODEL ...]

--quick plans for the paper's memory only, in place of looking for the least at 10%; --shares at
four more shares of PyTorch's, between which the least at 10% then lies.

Batch sizes are the paper's (MONeT's repository names them). Every solve is kept in FOLDER: a
stopped run goes on where it was. What really runs on the CPU is `monet_cpu`'s.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.monet_algorithms import algorithms_table
from benchmarks.monet_runs import (
    CASES,
    DEVICE,
    GIB,
    Case,
    Record,
    Runs,
    Started,
    case_of,
    eager_peak_bytes,
    estimated_graph,
)
from memopt.models.presets import find_device
from memopt.strategies.base import Strategy
from memopt.strategies.monet.checkmate_strategies import Checkmate
from memopt.strategies.monet.rotor_menus import RotorMenus
from memopt.strategies.monet.strategy import Choices, Monet
from memopt.strategies.rotor import Rotor

OVERHEAD = 0.1
SHARES = (0.4, 0.5, 0.6, 0.7)
STRATEGIES: dict[str, Strategy] = {
    "Rotor": Rotor(),
    "rotor-menus": RotorMenus(),
    "Checkmate-O": Checkmate(fastest=True),
    "recomputation only": Monet(choices=Choices.NONE),
    "MONeT, exact": Monet(),
    "MONeT": Started(exact_only=False),
}

STARTS = ("Checkmate-O", "recomputation only", "MONeT, exact")
"""Whose plans the last starts from, beside its own at the budget before."""


class Column:
    """One model's results; what was not asked for is missing from `at_budget`."""

    def __init__(
        self,
        case: Case,
        folder: Path,
        limit_s: float,
        ways: Sequence[str],
        *,
        search: bool,
        shares: Sequence[float],
    ) -> None:
        self.case = case
        graph = estimated_graph(case, folder)
        self.runs = Runs(case.family, graph, folder, limit_s, find_device(DEVICE))
        self.eager_bytes = eager_peak_bytes(graph)
        self.shares = (case.paper_share, *shares)
        self.at_budget: dict[str, list[Record]] = {}
        self.at_overhead: dict[str, Record | None] = {}
        self.budgets = [int(share * self.eager_bytes) for share in self.shares]
        for name in (name for name in STRATEGIES if name in ways):
            strategy_at = partial(self._strategy, name)
            known = [self.runs.solve(strategy_at(budget), budget) for budget in self.budgets]
            self.at_budget[name] = known
            if search:
                self.at_overhead[name] = self.runs.memory_at(strategy_at, OVERHEAD, known)

    def _strategy(self, name: str, budget: int) -> Strategy:
        strategy = STRATEGIES[name]
        if not isinstance(strategy, Started):
            return strategy
        smaller = (STRATEGIES[n] for n in STARTS if n in self.at_budget)
        before = max((b for b in self.budgets if b < budget), default=None)
        less = None if before is None else (self._strategy(name, before), before)
        return self.runs.started(budget, *smaller, less=less)

    def memory_row(self) -> str:
        """Of the first table."""
        case = self.case
        ours = f"{self.eager_bytes / GIB:.1f}"
        cells = [case.family, str(case.batch), f"{case.pytorch_gib} / {ours}"]
        cells += [f"{case.checkmate_gib / case.pytorch_gib:.2f}", f"{case.paper_share:.2f}"]
        cells += [self._memory(name) for name in self.at_budget]
        return f"| {' | '.join(cells)} |"

    def _memory(self, name: str) -> str:
        """A strategy's memory at 10%: the least found, or of its plans at the budgets."""
        known = list(self.at_budget[name])
        if name == "MONeT":
            # An exact plan is one of all implementations, too.
            known += self.at_budget.get("MONeT, exact", [])
        plans = [record for record in known if self.within(record)]
        least_plan = min(plans, key=lambda record: record.peak_bytes or 0, default=None)
        found = self.at_overhead.get(name, least_plan)
        if found is None or found.peak_bytes is None:
            return "none" if name in self.at_overhead else "more"
        share = found.peak_bytes / self.eager_bytes
        least = "" if name in self.at_overhead else "≤ "
        return f"{least}{found.peak_bytes / GIB:.2f} ({share:.2f})"

    def within(self, record: Record) -> bool:
        """Whether a plan takes at most 10% more time."""
        return record.time_s is not None and record.time_s <= (1 + OVERHEAD) * self.runs.base_s

    def budget_rows(self) -> list[str]:
        """Of the second table, one for each budget, the smallest first."""
        rows = []
        for share, number in sorted(zip(self.shares, range(len(self.shares)), strict=True)):
            records = {name: found[number] for name, found in self.at_budget.items()}
            cells = [self.case.family, f"{share:.2f}"]
            cells += [self.runs.overhead(record) for record in records.values()]
            ours, theirs, alone = map(records.get, ("MONeT", "Checkmate-O", "recomputation only"))
            times = [None if r is None else r.time_s for r in (theirs, alone)]
            times.append(None if alone is None else alone.bound_s)
            cells += [_ratio(time_s, ours) for time_s in times]
            gap = None if ours is None else ours.gap
            cells.append("-" if gap is None else f"{gap:.1%}")
            cells += ["-" if r is None else f"{r.planning_s:.0f}" for r in (ours, theirs)]
            rows.append(f"| {' | '.join(cells)} |")
        return rows


def _ratio(time_s: float | None, ours: Record | None) -> str:
    """Of a time over our plan's."""
    if ours is None or not ours.time_s or time_s is None:
        return "-"
    return f"{time_s / ours.time_s:.3f}"


def verdict(columns: list[Column]) -> list[str]:
    """Whether MONeT is never slower than Checkmate-O."""
    lines = []
    for name in ("MONeT, exact", "MONeT"):
        pairs = [
            records
            for column in columns
            if {name, "Checkmate-O"} <= set(column.at_budget)
            for records in zip(column.at_budget[name], column.at_budget["Checkmate-O"], strict=True)
        ]
        both = [(a.time_s, b.time_s) for a, b in pairs if a.time_s and b.time_s]
        if not both:
            continue
        slower = sum(a > b * (1 + 1e-9) for a, b in both)
        lost = sum(b.time_s is not None and a.time_s is None for a, b in pairs)
        gained = sum(a.time_s is not None and b.time_s is None for a, b in pairs)
        ratios = sorted(b / a for a, b in both)
        lines.append(
            f"- {name}: slower than Checkmate-O at {slower or 'none'} of {len(pairs)} budgets. "
            f"Both have a plan at {len(both)}, and there Checkmate-O takes {ratios[0]:.3f} to "
            f"{ratios[-1]:.3f} times as long; only {name} has one at {gained or 'none'}, only "
            f"Checkmate-O at {lost or 'none'}."
        )
    return [*lines, ""] if lines else []


def page(columns: list[Column], command: str, limit_s: float) -> str:
    """The whole page but for what runs on the CPU."""
    names = list(columns[0].at_budget) if columns else []
    below = [
        column.case.family
        for column in columns
        if "MONeT" in column.at_budget and column.within(column.at_budget["MONeT"][0])
    ]
    bounded = bool(columns) and not columns[0].at_overhead
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
            [
                "'≤': the least memory of the plans at the budgets below that take at most 10% "
                "more; 'more': none does.",
                "",
            ]
            if bounded
            else []
        ),
        "Within the paper's share MONeT here takes at most 10% more time for "
        f"{', '.join(below) or 'none'}.",
        "",
        "## At the same budgets",
        "",
        "Time overhead. 'recomputation only' is MONeT's search without implementations: mostly "
        "closer to the best of Checkmate's class than Checkmate's 0-1 program, which is of the "
        "graph merged to 24 operators. The ratios are times over MONeT's: Checkmate-O's, "
        "recomputation only's, and the bound proved for whatever only recomputes (above 1: no "
        "plan of Checkmate's class is as fast). 'gap' is MONeT's plan over its proved bound. "
        "'MONeT, exact' starts from Rotor's plan, MONeT from those of the columns before it and "
        "its own of the row before, too; seconds are of its own planning. In an estimate an "
        "algorithm of a convolution is never taken to be faster than the library's default, so "
        "that Checkmate-O is Checkmate-D.",
        "",
        *verdict(columns),
        f"| model | budget | {' | '.join(names)} | Checkmate-O / MONeT | recomputation / MONeT | "
        "its bound / MONeT | gap | s | s, Checkmate-O |",
        "|" + "---|" * (8 + len(names)),
        *(row for column in columns for row in column.budget_rows()),
        "",
        "## Implementations chosen",
        "",
        "By MONeT at the paper's share, with the number of runs.",
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
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--quick", action="store_true", help="only at the paper's memory")
    how.add_argument("--shares", action="store_true", help="no search for the least at 10%%")
    parser.add_argument("--ways", nargs="+", choices=tuple(STRATEGIES), default=tuple(STRATEGIES))
    parser.add_argument("--models", nargs="+", default=[case.family for case in CASES])
    options = parser.parse_args()
    command = "python -m benchmarks.monet_table1"
    command += " --quick" if options.quick else " --shares" if options.shares else ""
    command += f" --limit {options.limit:g}" if options.limit != parser.get_default("limit") else ""
    if len(options.ways) < len(STRATEGIES):
        command += " --ways " + " ".join(f'"{way}"' for way in options.ways)
    columns: list[Column] = []
    text = ""
    for name in options.models:
        columns.append(
            Column(
                case_of(name),
                options.folder,
                options.limit,
                options.ways,
                search=not (options.quick or options.shares),
                shares=() if options.quick else SHARES,
            )
        )
        text = page(columns, command, options.limit)
        if options.out is not None:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(text)
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
