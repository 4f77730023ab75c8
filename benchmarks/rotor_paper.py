"""Rotor §5.3-5.5 again, estimated for the V100-PCIe of the paper.

Batch 8, the largest of Rotor's figures 6 and 7, or `--batches`. For every model and image size: the
persistent program and revolve at 10 budgets equally spaced from 0 to the store-all peak, and
sequential with 10 segment counts from 2 to 2√L. With `--checkmate` its rounding has the larger
budgets, on the chain merged to 24 operators, for all but Inception (as in the paper). Beside the
page, a figure of throughput against peak is written.

`rotor_solve`: how long Rotor's programs take on synthetic chains, compiled code apart. A solve is
the whole memory-time trade-off: table, schedules, their replay. Wall seconds are the least of the
repeats, CPU seconds those of all threads. `--only quality` instead gives the step time that each
strategy reaches, over the time without recomputation, at budgets floor + x (store-all - floor),
floor being Rotor's smallest.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes

from benchmarks.graphs import ROTOR_BATCH, chain_of
from benchmarks.pictures import panels
from benchmarks.runner import Benchmark
from benchmarks.steps import timed
from benchmarks.table import GIB, NONE, gib, joined, table
from memopt.models.chain import Chain
from memopt.reductions.chain_to_graph import chain_to_graph
from memopt.strategies.monet.checkmate_strategies import CheckmateRounding
from memopt.strategies.rotor import Revolve, Rotor, RotorFree, RotorOptimal, Sequential
from memopt.strategies.rotor.plan_sets import CurvePoint
from memopt.strategies.rotor.strategies import ChainStrategy, TableStrategy
from tests.strategies.rotor.chains import long_chain

CAPACITY_BYTES = int(15.75 * GIB)
BUDGETS = 10
PAPER_GAIN = 0.128
MODELS = (
    *(f"resnet{depth}" for depth in (18, 34, 50, 101, 152, 200)),
    *(f"densenet{depth}" for depth in (121, 161, 169, 201)),
    "inception_v3",
)
SIZES = (224, 500, 1000)
CHECKMATE_FROM = 6
"""The first of the BUDGETS that it is asked for: it seldom keeps to smaller ones."""
PICTURED, MOST_PANELS = 4, 20
Point = tuple[int, float]
"""Peak bytes and step time in seconds."""


@dataclass(frozen=True)
class Row:
    """One model and image size; points are those of the trade-off, peaks ascending."""

    case: str
    batch: int
    stages: int
    store_all: Point
    rotor: list[Point]
    revolve: list[Point]
    sequential: list[Point]
    rotor_cpu_s: float
    optimal_cpu_s: float | None
    checkmate: list[Point]

    def best(self) -> Point | None:
        """Give the sequential of highest throughput that fits the card."""
        fitting = [point for point in self.sequential if point[0] <= CAPACITY_BYTES]
        return min(fitting, key=lambda point: point[1], default=None)

    def gain_at(self, point: Point | None) -> float | None:
        """Give Rotor's gain in throughput within the peak of a sequential schedule."""
        found = None if point is None else self.throughput(self.rotor, point[0])
        return None if found is None or point is None else found * point[1] / self.batch - 1

    def throughput(self, points: Sequence[Point], budget: int) -> float | None:
        """Give the images per second of the fastest schedule within the budget."""
        times = [time_s for peak_bytes, time_s in points if peak_bytes <= budget]
        return self.batch / min(times) if times else None


def _points(curve: Sequence[CurvePoint]) -> list[Point]:
    return [(point.peak_bytes, point.time_s) for point in curve]


def cases(given: Any) -> dict[str, tuple[str, int, int]]:
    """Name models, image sizes and batches; batch 8 is not named."""
    deep = [("resnet1001", px) for px in (SIZES if len(given.batches) > 1 else SIZES[:1])]
    return {
        f"{name}:{px}" + ("" if batch == ROTOR_BATCH else f":b{batch}"): (name, px, batch)
        for name, px in [*((name, px) for px in SIZES for name in MODELS), *deep]
        for batch in given.batches
    }


def evaluate(given: Any, name: str, pixels: int, batch: int) -> list[Row]:
    """Plan one chain by all strategies."""
    chain = chain_of(name, pixels, batch)
    rotor, _, rotor_cpu_s = timed(lambda: Rotor().plan_set(chain))
    optimal_cpu_s, optimal = None, RotorOptimal()
    if len(chain) <= optimal.most_stages:
        optimal_cpu_s = timed(lambda: optimal.plan_set(chain))[2]
    curves = (rotor.points, Revolve().plan_set(chain).points, Sequential("best").curve(chain))
    (store_all,) = _points(Sequential(1).curve(chain)[:1])
    case, cpu = f"{name}:{pixels}", (rotor_cpu_s, optimal_cpu_s)
    asked = given.checkmate and "inception" not in name
    rounded = list(_checkmate(chain, store_all[0])) if asked else []
    return [Row(case, batch, len(chain), store_all, *map(_points, curves), *cpu, rounded)]


def _checkmate(chain: Chain, peak_bytes: int) -> Iterator[Point]:
    graph = chain_to_graph(chain).operators
    for tenths in range(CHECKMATE_FROM, BUDGETS + 1):
        budget = peak_bytes * tenths // BUDGETS
        found = CheckmateRounding(start=False).solve(graph, budget)
        if found.peak_bytes is not None and found.time_s is not None:
            yield found.peak_bytes, found.time_s


def _blocks(rows: list[Row], given: Any) -> dict[str, str]:
    gains = [gain for row in rows if (gain := row.gain_at(row.best())) is not None]
    everywhere = [
        gain for row in rows for point in row.sequential if (gain := row.gain_at(point)) is not None
    ]
    made = {(row.case, row.batch) for row in rows}
    missing = [c for c, (name, px, b) in cases(given).items() if (f"{name}:{px}", b) not in made]
    left = ", ".join(missing) if len(missing) <= MOST_PANELS else f"{len(missing)} other cases"
    text = (
        f"Not in this run: {left or 'none'}. Mean gain "
        f"{statistics.mean(gains):.1%} over {len(gains)} cases (least {min(gains):.1%}, most "
        f"{max(gains):.1%}); the paper measured {PAPER_GAIN:.1%} on its own set. Over every "
        f"undominated sequential schedule, whatever its peak: {statistics.mean(everywhere):.1%} "
        f"({len(everywhere)} schedules)."
    )
    head = (
        "model:pixels | batch | stages | store all: GiB, images/s | best sequential: GiB, "
        "images/s | Rotor there | gain | revolve there | Checkmate there | CPU s: persistent | "
        "CPU s: optimal"
    )
    budgets = [
        [
            " / ".join(
                _number(row.throughput(points, size))
                for points in (row.rotor, row.revolve, *([row.checkmate] if row.checkmate else []))
            )
            for size in (row.store_all[0] * i // BUDGETS for i in range(1, BUDGETS + 1))
        ]
        for row in rows
    ]
    tenths = " | ".join(f"{i}/10" for i in range(1, BUDGETS + 1))
    return {
        "results": joined(text, table(head, map(_line, rows))),
        "budgets": table(
            f"model:pixels | batch | {tenths}",
            [(r.case, r.batch, *cells) for r, cells in zip(rows, budgets, strict=True)],
        ),
    }


def _line(row: Row) -> str:
    def point(found: Point | None) -> str:
        return "-" if found is None else f"{gib(found[0], 2)}, {_number(row.batch / found[1])}"

    best = row.best()
    gain, at = row.gain_at(best), CAPACITY_BYTES if best is None else best[0]
    optimal = "-" if row.optimal_cpu_s is None else f"{row.optimal_cpu_s:.2f}"
    rotor, revolve, rounded = (
        _number(row.throughput(points, at)) for points in (row.rotor, row.revolve, row.checkmate)
    )
    return (
        f"{row.case} | {row.batch} | {row.stages} | {point(row.store_all)} | {point(best)} | "
        f"{rotor} | {'-' if gain is None else f'{gain:.1%}'} | {revolve} | {rounded} | "
        f"{row.rotor_cpu_s:.2f} | {optimal}"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def picture(rows: list[Row], given: Any) -> None:
    """Draw throughput against peak: of the longest chains of different models, or of every batch
    where there are several."""
    chosen: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: -r.stages):
        chosen.setdefault(row.case.partition(":")[0], row)
    several = len({row.batch for row in rows}) > 1
    shown = rows[:MOST_PANELS] if several else list(chosen.values())[:PICTURED]
    across, dpi = (4, 60) if several else (2, 80)
    how = {"across": across, "size": (9 / across, 3), "dpi": dpi}
    with panels(given.out.with_suffix(".png"), len(shown), **how) as grid:
        for axes, row in zip(grid, shown, strict=True):
            _panel(axes, row)
            what = f"batch {row.batch}" if several else f"{row.stages} stages"
            axes.set_title(f"{row.case}, {what}", fontsize="small")


def _panel(axes: Axes, row: Row) -> None:
    def xy(points: Sequence[Point]) -> tuple[list[float], list[float]]:
        return [p / GIB for p, _ in points], [row.batch / t for _, t in points]

    axes.step(*xy(row.rotor), "b-", where="post", label="Rotor")
    axes.step(*xy(row.revolve), "g-", where="post", label="revolve")
    axes.plot(*xy(row.sequential), "x", color="purple", label="sequential")
    if row.checkmate:
        axes.plot(*xy(row.checkmate), "s", color="orange", label="Checkmate", markersize=4)
    axes.plot(*xy([row.store_all]), "rs", label="store all")
    axes.set(xlabel="peak, GiB", ylabel="images/s")


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
class Figures:
    """One strategy on one chain: what a solve took, or the step times at each of SHARES."""

    quality: bool
    text: str


def solved(given: Any, strategy: TableStrategy, layers: int, repeats: int) -> list[Figures]:
    """Time a solve."""
    chain = long_chain(layers)
    runs = [timed(lambda: strategy.plan_set(chain)) for _ in range(repeats)]
    (plans, *_), (walls, cpus) = runs[0], list(zip(*runs, strict=True))[1:]
    mode = "exact" if plans.stats["mode"] == "exact" else str(plans.stats["slots"])
    times = [f"{min(walls):.3f}", f"{min(cpus):.3f}"]
    figures = [mode, *times, f"{plans.stats['cells']:,}", str(len(plans.points))]
    return [Figures(False, f"{strategy.name} | {layers} | {' | '.join(figures)}")]


def quality(given: Any, layers: int) -> list[Figures]:
    """Give the relative step times of the strategies."""
    chain = long_chain(layers)
    least, most = Rotor().smallest_budget(chain), Sequential(1).smallest_budget(chain)
    rows = []
    for name, strategy in QUALITY.items():
        found = [strategy.solve(chain, int(least + x * (most - least))).time_s for x in SHARES]
        cells = [NONE if t is None else f"{t / chain.compute_time_s:.3f}" for t in found]
        rows.append(Figures(True, f"{name} | {layers} | {' | '.join(cells)}"))
    return rows


def _both(rows: list[Figures], _: Any) -> str:
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
            kind(slots=20, exact_stages=stages).plan_set(long_chain(5))


BENCHMARK = Benchmark(
    row=Row,
    cases=cases,
    measure=evaluate,
    blocks=_blocks,
    prepare=_compile_all,
    pictures=picture,
    options={"batches": (ROTOR_BATCH,), "checkmate": False},
)
ROTOR_SOLVE = Benchmark(
    row=Figures,
    cases={
        **{f"solve {n} {case[0].name} {case[1]}": (solved, *case) for n, case in enumerate(SOLVES)},
        **{f"quality {layers}": (quality, layers) for layers in (70, 200)},
    },
    measure=lambda given, what, *case: what(given, *case),
    blocks=_both,
    prepare=_compile_all,
)
