"""Orders and addresses of other strategies' plans (OLLA §1: combinable).

    python -m benchmarks.olla_programs [--folder FOLDER] [--resume FILE] [--fresh]
        [--report] [--batches 1 32] [--strategies rotor ...]
        [--out docs/results/olla_programs.md] [NAME ...]

Steps up to the gradients (benchmarks.olla_graphs, without updates), planned by strategies
that recompute or move tensors, at budgets floor + x (baseline - floor). Every plan is placed as it
is, then reordered and placed again, both also within its peak, and each result is validated.
Captures and finished rows are kept, so that a run cut short goes on where it was.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kept import Kept
from benchmarks.olla_graphs import DEVICE, NAMES, graph_of
from benchmarks.olla_rows import warm_up
from benchmarks.olla_tables import percent
from memopt.models.budget import Budget
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.programs.instructions import Compute, Program, SwapIn
from memopt.programs.liveness import store_all
from memopt.programs.placed import arena_use
from memopt.programs.replay import replay
from memopt.reductions.linearize import linearize
from memopt.reductions.updates import without_updates
from memopt.strategies.base import Solution, Strategy
from memopt.strategies.offload.autoswap import AutoSwap
from memopt.strategies.offload.dynprog import DynProg, Greedy
from memopt.strategies.offload.graph import OffloadGraph
from memopt.strategies.offload.yardsticks import Vdnn
from memopt.strategies.olla.order_and_place import order_and_place
from memopt.strategies.rotor import Revolve, Rotor, RotorFree, Sequential

STRATEGIES: dict[str, Strategy] = {
    one.name: one
    for one in (
        Rotor(exact_stages=0),
        Revolve(exact_stages=0),
        Sequential(),
        DynProg(),
        Greedy(),
        Vdnn(),
        AutoSwap(),
        OffloadGraph(moves=0, chain=False),
        RotorFree(exact_stages=0),
    )
}
"""Not solved exactly: what matters here is their programs."""
SHARES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class ProgramRow:
    """One plan, placed, then reordered and placed.

    Attributes:
        share: x of its budget.
        again: computations beyond one of every operator.
        moved: tensors that come back from the host.
        gap: of the plan's own addresses to their bound; `cpu_s` seconds.
        order_gap: of the reordered plan's peak; `order_saved` the share of the peak it saves.
        ordered_gap: of the reordered plan's addresses.
        both_cpu_s: of ordering and placing.
        slower: what the steps' times grow by, to make room: of the plan's own, and the reordered.
        within: share of the bytes written to addresses that still are where all, with what lies
            outside, must not need more than the peak: of the plan's own peak, and the reordered;
            empty if not measured.
    """

    name: str
    batch: int
    strategy: str
    share: float
    again: int
    moved: int
    gap: float
    cpu_s: float
    order_gap: float
    order_saved: float
    ordered_gap: float
    both_cpu_s: float
    slower: list[float]
    within: list[float]


def rows_of(
    name: str, batch: int, strategy: Strategy, folder: Path | None, *, within: bool
) -> list[ProgramRow]:
    """One strategy's plans of one step, those that differ."""
    graph = without_updates(graph_of(name, batch, folder))
    view = linearize(graph) if strategy.needs == "chain" else None
    baseline_bytes = replay(graph, store_all(graph)).peak_bytes

    def attempt(budget_bytes: int) -> Solution:
        target = graph if view is None else view.chain
        return strategy.solve(target, budget_bytes, device=find_device(DEVICE))

    floor_bytes = attempt(1).smallest_budget_bytes
    if floor_bytes is None or strategy.why_not(graph if view is None else view.chain):
        return []
    found: dict[Program, float] = {}
    for share in SHARES:
        budget_bytes = int(floor_bytes + share * max(0, baseline_bytes - floor_bytes))
        solution = attempt(budget_bytes)
        program = solution.program
        if view is not None and solution.steps is not None:
            program = view.lower(solution.steps)
        if program is not None:
            found.setdefault(program, share)
    return [
        _row(name, batch, strategy.name, share, graph, program, within=within)
        for program, share in found.items()
    ]


def _row(
    name: str,
    batch: int,
    strategy: str,
    share: float,
    graph: Graph,
    program: Program,
    *,
    within: bool,
) -> ProgramRow:
    device = find_device(DEVICE)
    before_bytes = replay(graph, program).peak_bytes
    computed = sum(isinstance(x, Compute) for x in program)
    began = time.process_time()
    placed, own = order_and_place(graph, program, Budget(), device, order=False, place=True)
    middle = time.process_time()
    ordered, ordering = order_and_place(graph, program, Budget(), device, order=True, place=False)
    made, both = order_and_place(graph, ordered, Budget(), device, order=False, place=True)
    ended = time.process_time()
    return ProgramRow(
        name=name,
        batch=batch,
        strategy=strategy,
        share=share,
        again=computed - len(graph.operators),
        moved=sum(isinstance(x, SwapIn) for x in program),
        gap=_number(own["arena_gap"]),
        cpu_s=middle - began,
        order_gap=_number(ordering["order_gap"]),
        order_saved=1 - replay(graph, ordered).peak_bytes / before_bytes,
        ordered_gap=_number(both["arena_gap"]),
        both_cpu_s=ended - middle,
        slower=[_number(own["slower"]), _number(both["slower"])],
        within=[_within(graph, program, placed), _within(graph, ordered, made)] if within else [],
    )


def _within(graph: Graph, program: Program, placed: Program) -> float:
    """The share of the bytes that `placed` writes to addresses that the program does within its
    own peak."""
    peak_bytes = replay(graph, program).peak_bytes
    some, _ = order_and_place(
        graph, program, Budget(peak_bytes), find_device(DEVICE), order=False, place=True
    )
    covered = [arena_use(graph, program) for program in (some, placed)]
    written = [0 if use is None else use.covered_bytes for use in covered]
    return written[0] / written[1] if written[1] else 1.0


def _number(value: object) -> float:
    assert isinstance(value, (int, float))
    return value


def page(rows: list[ProgramRow]) -> str:
    """The whole page."""
    gaps = [gap for row in rows for gap in (row.gap, row.ordered_gap)]
    slower = [share for row in rows for share in row.slower] or [0.0]
    worst = sorted(rows, key=lambda r: -max(r.gap, r.ordered_gap))[:10]
    parts = [
        "# OLLA: other strategies' plans reordered and placed",
        "`python -m benchmarks.olla_programs --out docs/results/olla_programs.md`: "
        f"{len(rows)} plans of {len({row.name for row in rows})} of the sixteen model graphs up to "
        f"their gradients, batch {' and '.join(str(b) for b in sorted({r.batch for r in rows}))}, "
        "priced for an "
        f"{DEVICE}, at budgets floor + x (baseline - floor) for x = "
        f"{', '.join(f'{share:g}' for share in SHARES)}; plans that differ. CPU seconds of one "
        'thread of a shared machine. "Placed within the peak": of the bytes written to addresses, '
        "the mean share that still is where addresses with all that lies outside them must not "
        "need a byte more than the plan's peak does without; the rest is left to the allocator. "
        "See [the strategy](../strategies/olla.md).",
        "\n".join(_table(rows)),
        f"Of {len(gaps)} placements {sum(gap == 0 for gap in gaps)} have no fragmentation and "
        f"{sum(gap <= 0.01 for gap in gaps)} are within 1% of the bound; the largest gap is "
        f"{percent(max(gaps, default=0), 2)}. For {sum(share > 0 for share in slower)} of them the "
        "step waits for copies to the host before memory is full: it is predicted to take "
        f"{percent(max(slower, default=0), 2)} longer at most, in the mean "
        f"{percent(statistics.mean([share for share in slower if share > 0] or [0]), 2)}. Of the "
        "orders "
        f"{sum(row.order_gap == 0 for row in rows)} of {len(rows)} are proved optimal, the largest "
        f"gap is {percent(max((row.order_gap for row in rows), default=0), 2)}.",
        "The largest gaps of addresses:",
        "\n".join(
            [
                "| plan | x | own | reordered |",
                "|---|---:|---:|---:|",
                *(
                    f"| {r.name} b{r.batch}, {r.strategy} | {r.share:g} | {percent(r.gap, 3)} | "
                    f"{percent(r.ordered_gap, 3)} |"
                    for r in worst
                ),
            ]
        ),
    ]
    return "\n\n".join(parts) + "\n"


def _table(rows: Iterable[ProgramRow]) -> list[str]:
    rows = list(rows)
    lines = [
        "| strategy | plans | computed again | moved | no fragmentation | reordered | "
        "largest gap | peak saved by order: mean | most | placed within the peak | reordered | "
        "CPU s a plan: median | most |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for strategy in dict.fromkeys(row.strategy for row in rows):
        some = [row for row in rows if row.strategy == strategy]
        cpu_s = [row.cpu_s for row in some]
        lines.append(
            f"| {strategy} | {len(some)} | {sum(r.again for r in some)} | "
            f"{sum(r.moved for r in some)} | {sum(r.gap == 0 for r in some)} | "
            f"{sum(r.ordered_gap == 0 for r in some)} | "
            f"{percent(max(max(r.gap, r.ordered_gap) for r in some), 3)} | "
            f"{percent(statistics.mean(r.order_saved for r in some))} | "
            f"{percent(max(r.order_saved for r in some))} | "
            f"{_mean_within(some, 0)} | {_mean_within(some, 1)} | "
            f"{statistics.median(cpu_s):.2f} | "
            f"{max(cpu_s):.2f} |"
        )
    return lines


def _mean_within(rows: list[ProgramRow], which: int) -> str:
    measured = [row.within[which] for row in rows if row.within]
    if not measured:
        return ""
    of = "" if len(measured) == len(rows) else f" of {len(measured)}"
    return f"{percent(statistics.mean(measured))}{of}"


def main() -> None:
    """Print the page, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--batches", nargs="*", type=int, default=(1, 32))
    parser.add_argument("--strategies", nargs="*", default=tuple(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--folder", type=Path, default=Path("out/olla-graphs"))
    parser.add_argument("--resume", type=Path, default=Path("out/olla-programs.json"))
    parser.add_argument("--report", action="store_true", help="only write what is kept")
    parser.add_argument("--no-within", action="store_true", help="not within the peak, too")
    parser.add_argument("--fresh", action="store_true", help="drop the rows kept in FILE")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    kept = Kept(options.resume, ProgramRow, {"device": DEVICE}, fresh=options.fresh)
    triples = [
        (name, batch, strategy)
        for name in options.names
        for batch in options.batches
        for strategy in options.strategies
    ]
    cases = {f"{triple[2]}, {triple[0]} b{triple[1]}": triple for triple in triples}
    if not options.report:
        warm_up()
    for case in () if options.report else kept.missing(cases, _note):
        name, batch, strategy = cases[case]
        within = not options.no_within
        rows = rows_of(name, batch, STRATEGIES[strategy], options.folder, within=within)
        kept.add(case, rows)
        _note(f"{case}: {len(kept.rows[case])} plans")
    text = page(kept.ordered(cases))
    sys.stdout.write(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
