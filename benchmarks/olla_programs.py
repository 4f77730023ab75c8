"""Orders and addresses of other strategies' plans (OLLA §1: combinable).

Steps up to the gradients, planned by strategies that recompute or move tensors, at budgets floor +
x (baseline - floor). Every plan is placed as it is, then reordered and placed again, both also
within its peak, and each result is validated.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import Any

from benchmarks.graphs import A100, updated_graph
from benchmarks.olla_tables import BATCHES, NAMES, means, warm_up
from benchmarks.runner import Benchmark, crossed
from benchmarks.steps import timed
from benchmarks.table import by, joined, percent, table
from memopt.models.budget import Budget
from memopt.models.graph import Graph
from memopt.passes.order_and_place import order_and_place
from memopt.programs.instructions import Compute, Program, SwapIn
from memopt.programs.liveness import store_all
from memopt.programs.placed import arena_use
from memopt.programs.replay import replay
from memopt.reductions.linearize import linearize
from memopt.reductions.step_linearization import without_updates
from memopt.strategies.base import Strategy
from memopt.strategies.offload.autoswap import AutoSwap
from memopt.strategies.offload.dynprog import DynProg, Greedy
from memopt.strategies.offload.graph import OffloadGraph
from memopt.strategies.offload.yardsticks import Vdnn
from memopt.strategies.rotor import Revolve, Rotor, RotorFree, Sequential

STRATEGIES: tuple[Strategy, ...] = (
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
"""Not solved exactly: what matters here is their programs."""
SHARES = (0.0, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Row:
    """One plan, placed, then reordered and placed.

    Attributes:
        share: x of its budget.
        again: computations beyond one of every operator.
        moved: tensors that come back from the host.
        gap: of the plan's own addresses to their bound; `cpu_s` seconds.
        order_gap: of the reordered plan's peak; `order_saved` the share of the peak it saves.
        ordered_gap: of the reordered plan's addresses.
        slower: what the steps' times grow by, to make room: of the plan's own, and the reordered.
        within: share of the bytes written to addresses that still are where all, with what lies
            outside, must not need more than the peak: of the plan's own peak, and the reordered.
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
    slower: list[float]
    within: list[float]


def _rows(_: Any, name: str, batch: int, strategy: Strategy) -> list[Row]:
    graph = without_updates(updated_graph(name, batch))
    view = linearize(graph) if strategy.needs == "chain" else None
    target = graph if view is None else view.chain
    baseline_bytes = replay(graph, store_all(graph)).peak_bytes
    floor_bytes = strategy.solve(target, 1, device=A100).smallest_budget_bytes
    if floor_bytes is None or strategy.why_not(target):
        return []
    found: dict[Program, float] = {}
    for share in SHARES:
        budget_bytes = int(floor_bytes + share * max(0, baseline_bytes - floor_bytes))
        solution = strategy.solve(target, budget_bytes, device=A100)
        program = solution.program
        if view is not None and solution.steps is not None:
            program = view.lower(solution.steps)
        if program is not None:
            found.setdefault(program, share)
    return [
        _row((name, batch, strategy.name, share), graph, program)
        for program, share in found.items()
    ]


def _row(what: tuple[str, int, str, float], graph: Graph, program: Program) -> Row:
    def improve(one: Program, **how: bool) -> tuple[Program, dict[str, Any]]:
        made, stats = order_and_place(graph, one, Budget(), A100, **how)
        return made, dict(stats)

    before_bytes = replay(graph, program).peak_bytes
    (placed, own), _, cpu_s = timed(lambda: improve(program, order=False, place=True))
    ordered, ordering = improve(program, order=True, place=False)
    made, both = improve(ordered, order=False, place=True)
    return Row(
        *what,
        again=sum(isinstance(x, Compute) for x in program) - len(graph.operators),
        moved=sum(isinstance(x, SwapIn) for x in program),
        gap=own["arena_gap"],
        cpu_s=cpu_s,
        order_gap=ordering["order_gap"],
        order_saved=1 - replay(graph, ordered).peak_bytes / before_bytes,
        ordered_gap=both["arena_gap"],
        slower=[own["slower"], both["slower"]],
        within=[_within(graph, program, placed), _within(graph, ordered, made)],
    )


def _within(graph: Graph, program: Program, placed: Program) -> float:
    """Give the share of the bytes that `placed` writes to addresses that the program does within
    its own peak."""
    peak_bytes = replay(graph, program).peak_bytes
    some, _ = order_and_place(graph, program, Budget(peak_bytes), A100, order=False, place=True)
    covered = [arena_use(graph, program) for program in (some, placed)]
    written = [0 if use is None else use.covered_bytes for use in covered]
    return written[0] / written[1] if written[1] else 1.0


def _blocks(rows: list[Row], _: Any) -> str:
    gaps = [gap for row in rows for gap in (row.gap, row.ordered_gap)]
    slower = [share for row in rows for share in row.slower if share > 0] or [0.0]
    found = by(rows, "strategy")
    worst = sorted(rows, key=lambda r: -max(r.gap, r.ordered_gap))[:10]
    return joined(
        f"{len(rows)} plans of {len({row.name for row in rows})} of the sixteen model graphs, "
        "those that differ.",
        table(
            "strategy | plans | computed again | moved | no fragmentation | reordered | largest "
            "gap | peak saved by order: mean | most | placed within the peak | reordered | CPU s a "
            "plan: median | most",
            [_line(one.name, found[one.name]) for one in STRATEGIES if one.name in found],
        ),
        f"Of {len(gaps)} placements {sum(gap == 0 for gap in gaps)} have no fragmentation and "
        f"{sum(gap <= 0.01 for gap in gaps)} are within 1% of the bound; the largest gap is "
        f"{percent(max(gaps), 2)}. For {sum(x > 0 for row in rows for x in row.slower)} of them "
        "the step waits for copies to the host before memory is full: it is predicted to take "
        f"{percent(max(slower), 2)} longer at most, in the mean "
        f"{percent(statistics.mean(slower), 2)}. "
        f"Of the orders {sum(row.order_gap == 0 for row in rows)} of {len(rows)} are proved "
        f"optimal, the largest gap is {percent(max(row.order_gap for row in rows), 2)}.",
        "The largest gaps of addresses:",
        table(
            "plan | x | own | reordered",
            [
                f"{r.name} b{r.batch}, {r.strategy} | {r.share:g} | {percent(r.gap, 3)} | "
                f"{percent(r.ordered_gap, 3)}"
                for r in worst
            ],
        ),
    )


def _line(strategy: str, some: list[Row]) -> str:
    cpu_s, saved = [row.cpu_s for row in some], [row.order_saved for row in some]
    return (
        f"{strategy} | {len(some)} | {sum(r.again for r in some)} | {sum(r.moved for r in some)} | "
        f"{sum(r.gap == 0 for r in some)} | {sum(r.ordered_gap == 0 for r in some)} | "
        f"{percent(max(max(r.gap, r.ordered_gap) for r in some), 3)} | "
        f"{percent(statistics.mean(saved))} | {percent(max(saved))} | "
        f"{' | '.join(means(row.within for row in some))} | {statistics.median(cpu_s):.2f} | "
        f"{max(cpu_s):.2f}"
    )


BENCHMARK = Benchmark(
    row=Row,
    cases=crossed(NAMES, BATCHES, STRATEGIES),
    measure=_rows,
    blocks=_blocks,
    prepare=warm_up,
)
