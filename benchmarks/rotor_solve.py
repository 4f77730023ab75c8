"""How long Rotor's programs take on synthetic chains, compiled code apart.

A solve is the whole memory-time trade-off: table, schedules, their replay. Wall seconds are the
least of the repeats, CPU seconds those of all threads. `--only quality` instead gives the step time
that each strategy reaches, over the time without recomputation, at budgets floor + x (store-all -
floor), floor being Rotor's smallest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.graphs import synthetic_chain
from benchmarks.runner import Benchmark
from benchmarks.steps import timed
from benchmarks.table import NONE, joined, table
from memopt.strategies.rotor import Revolve, Rotor, RotorFree, RotorOptimal, Sequential
from memopt.strategies.rotor.strategies import ChainStrategy, TableStrategy

SLOTTED = {"slots": 500, "exact_stages": 0}
SOLVES: tuple[tuple[TableStrategy, int, int], ...] = (
    *((Rotor(**SLOTTED), layers, 3) for layers in (50, 100, 200, 339)),
    (Revolve(**SLOTTED), 339, 3),
    *((RotorOptimal(**SLOTTED), layers, 3) for layers in (50, 100)),
    *((RotorFree(**SLOTTED), layers, 1) for layers in (25, 49)),
    *((Rotor(slots=None), layers, 1) for layers in (20, 40, 60, 80)),
    *((RotorOptimal(slots=None), layers, 1) for layers in (20, 40)),
    *((RotorFree(slots=None), layers, 1) for layers in (20, 40)),
    (Rotor(**SLOTTED), 1000, 1),
    (RotorFree(**SLOTTED, most_stages=101), 100, 1),
)
"""Strategy, stages and repeats; the last two take over 10 s."""
QUALITY: dict[str, ChainStrategy] = {
    "rotor, 500 slots": Rotor(exact_stages=0),
    "rotor, exact": Rotor(slots=None),
    "rotor-optimal": RotorOptimal(),
    "rotor-free": RotorFree(),
    "revolve": Revolve(),
    "sequential, best": Sequential("best"),
}
SHARES = (0, 0.1, 0.25, 0.5, 0.75)


@dataclass(frozen=True)
class Row:
    """One strategy on one chain: what a solve took, or the step times at each of SHARES."""

    quality: bool
    text: str


def solved(given: Any, strategy: TableStrategy, layers: int, repeats: int) -> list[Row]:
    """Time a solve."""
    chain = synthetic_chain(layers)
    runs = [timed(lambda: strategy.plan_set(chain)) for _ in range(repeats)]
    (plans, *_), (walls, cpus) = runs[0], list(zip(*runs, strict=True))[1:]
    mode = "exact" if plans.stats["mode"] == "exact" else str(plans.stats["slots"])
    times = [f"{min(walls):.3f}", f"{min(cpus):.3f}"]
    figures = [mode, *times, f"{plans.stats['cells']:,}", str(len(plans.points))]
    return [Row(False, f"{strategy.name} | {layers} | {' | '.join(figures)}")]


def quality(given: Any, layers: int) -> list[Row]:
    """Give the relative step times of the strategies."""
    chain = synthetic_chain(layers)
    least, most = Rotor().smallest_budget(chain), Sequential(1).smallest_budget(chain)
    rows = []
    for name, strategy in QUALITY.items():
        found = [strategy.solve(chain, int(least + x * (most - least))).time_s for x in SHARES]
        cells = [NONE if t is None else f"{t / chain.compute_time_s:.3f}" for t in found]
        rows.append(Row(True, f"{name} | {layers} | {' | '.join(cells)}"))
    return rows


def _blocks(rows: list[Row], _: Any) -> str:
    solves, others = (
        [row.text for row in rows if row.quality == quality] for quality in (False, True)
    )
    return joined(
        table("strategy | layers | slots | wall s | CPU s | cells | schedules", solves),
        table("strategy | layers | " + " | ".join(f"x = {x}" for x in SHARES), others),
    )


def _compile_all(_: Any) -> None:
    for kind in (Rotor, Revolve, RotorOptimal, RotorFree):
        for stages in (0, 40):
            kind(slots=20, exact_stages=stages).plan_set(synthetic_chain(5))


BENCHMARK = Benchmark(
    row=Row,
    cases={
        **{f"solve {n} {case[0].name} {case[1]}": (solved, *case) for n, case in enumerate(SOLVES)},
        **{f"quality {layers}": (quality, layers) for layers in (70, 200)},
    },
    measure=lambda given, what, *case: what(given, *case),
    blocks=_blocks,
    prepare=_compile_all,
)
