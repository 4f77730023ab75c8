"""MONeT's Table 1 redone: memory at 10% compute overhead, estimated for the paper's P100.

Plans within the paper's memory and at SHARES of PyTorch's, between which the least memory at 10%
then lies. Batch sizes are the paper's (MONeT's repository names them).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.monet_runs import (
    CASES,
    OVERHEAD,
    P100,
    Case,
    Record,
    Runs,
    Started,
    eager_peak_bytes,
    over,
)
from benchmarks.runner import Benchmark, crossed
from benchmarks.table import by, gib, joined, percent, signed, table
from memopt.strategies.base import Strategy
from memopt.strategies.monet.checkmate_strategies import Checkmate
from memopt.strategies.monet.rotor_menus import RotorMenus
from memopt.strategies.monet.strategy import Choices, Monet
from memopt.strategies.rotor import Rotor

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
EXACT, ALL, CHECKMATE, ALONE = "MONeT, exact", "MONeT", "Checkmate-O", "recomputation only"


@dataclass(frozen=True)
class Row:
    """One model within a share of PyTorch's memory: the records of all ways."""

    family: str
    share: float
    eager_bytes: int
    base_s: float
    plans: dict[str, dict[str, Any]]

    def plan(self, name: str) -> Record | None:
        return Record(**self.plans[name]) if name in self.plans else None

    def within(self, name: str) -> Record | None:
        found = self.plan(name)
        most_s = (1 + OVERHEAD) * self.base_s
        return None if found is None or found.time_s is None or found.time_s > most_s else found


def _planned(given: Any, case: Case) -> list[Row]:
    graph = case.graph()
    runs = Runs(case.name, graph, given.limit, P100)
    eager_bytes = eager_peak_bytes(graph)
    shares = sorted((case.paper_share, *SHARES))
    rows: list[Row] = []
    less: tuple[Strategy, int] | None = None
    for share in shares:
        budget = int(share * eager_bytes)
        row = Row(case.name, share, eager_bytes, runs.base_s, {})
        for name, strategy in STRATEGIES.items():
            if name not in given.ways:
                continue
            if isinstance(strategy, Started):
                starts = (STRATEGIES[one] for one in STARTS if one in row.plans)
                strategy = runs.started(budget, *starts, less=less)
                less = strategy, budget
            row.plans[name] = asdict(runs.solve(strategy, budget))
        rows.append(row)
    return rows


def _memory(name: str, rows: list[Row]) -> str:
    """Write the least memory of a way's plans that take at most 10% more."""
    # An exact plan is one of all implementations, too.
    names = (name, EXACT) if name == ALL else (name,)
    plans = [found for row in rows for one in names if (found := row.within(one)) is not None]
    if not plans:
        return "more"
    least = min(record.peak_bytes or 0 for record in plans)
    return f"≤ {gib(least, 2)} ({least / rows[0].eager_bytes:.2f})"


def _ratio(time_s: float | None, ours: Record | None) -> str:
    if ours is None or not ours.time_s or time_s is None:
        return "-"
    return f"{time_s / ours.time_s:.3f}"


def _budget_line(row: Row) -> list[str]:
    ours, theirs, alone = map(row.plan, (ALL, CHECKMATE, ALONE))
    cells = [row.family, f"{row.share:.2f}"]
    for name in row.plans:
        cells.append(signed(over(row.plans[name]["time_s"], row.base_s), none="none"))
    times = [None if one is None else one.time_s for one in (theirs, alone)]
    cells += [_ratio(time_s, ours) for time_s in (*times, None if alone is None else alone.bound_s)]
    cells.append("-" if ours is None or ours.gap is None else percent(ours.gap))
    return cells + ["-" if one is None else f"{one.planning_s:.0f}" for one in (ours, theirs)]


def _verdicts(rows: list[Row]) -> str:
    lines = []
    for name in (EXACT, ALL):
        pairs = [
            (row.plans[name]["time_s"], row.plans[CHECKMATE]["time_s"])
            for row in rows
            if {name, CHECKMATE} <= row.plans.keys()
        ]
        both = [(ours, theirs) for ours, theirs in pairs if ours and theirs]
        if not both:
            continue
        ratios = [theirs / ours for ours, theirs in both]
        slower = sum(ratio < 1 - 1e-9 for ratio in ratios)
        lost, gained = (
            sum((pair[which] is not None) and pair[1 - which] is None for pair in pairs)
            for which in (1, 0)
        )
        lines.append(
            f"- {name}: slower than Checkmate-O at {slower or 'none'} of {len(pairs)} budgets. "
            f"Both have a plan at {len(both)}, and there Checkmate-O takes {min(ratios):.3f} to "
            f"{max(ratios):.3f} times as long; only {name} has one at {gained or 'none'}, only "
            f"Checkmate-O at {lost or 'none'}."
        )
    return "\n".join(lines)


def _blocks(rows: list[Row], _: Any) -> dict[str, str]:
    found = by(rows, "family")
    of = {case: found[case.name] for case in CASES if case.name in found}
    names = list(rows[0].plans)
    memory = [
        [
            case.name,
            str(case.batch),
            f"{case.pytorch_gib} / {gib(found[0].eager_bytes)}",
            f"{case.checkmate_gib / case.pytorch_gib:.2f}",
            f"{case.paper_share:.2f}",
            *(_memory(name, found) for name in names),
        ]
        for case, found in of.items()
    ]
    at_paper = [row for case, found in of.items() for row in found if row.share == case.paper_share]
    below = [row.family for row in at_paper if row.within(ALL) is not None]
    head = "model | batch | PyTorch: paper / here | Checkmate, paper | MONeT, paper | "
    ratios = f"{CHECKMATE} / MONeT | recomputation / MONeT | its bound / MONeT | gap | s"
    return {
        "results": joined(
            table(head + " | ".join(names), memory),
            "Within the paper's share MONeT here takes at most 10% more time for "
            f"{', '.join(below) or 'none'}.",
        ),
        "budgets": joined(
            _verdicts(rows),
            table(
                f"model | budget | {' | '.join(names)} | {ratios} | s, {CHECKMATE}",
                map(_budget_line, rows),
            ),
        ),
        "chosen": "\n".join(
            f"- {row.family}: {row.plans[ALL]['chosen'] or 'none'}"
            for row in at_paper
            if ALL in row.plans
        ),
    }


BENCHMARK = Benchmark(
    row=Row,
    cases=crossed(CASES),
    measure=_planned,
    blocks=_blocks,
    options={"limit": 60.0, "ways": tuple(STRATEGIES)},
)
