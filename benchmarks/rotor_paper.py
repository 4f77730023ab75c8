"""Rotor §5.3-5.5 again, estimated for the V100-PCIe of the paper.

Batch 8, the largest of Rotor's figures 6 and 7. For every model and image size: the persistent
program and revolve at 10 budgets equally spaced from 0 to the store-all peak, and sequential with
10 segment counts from 2 to 2√L. Beside the page, a figure of throughput against peak is written.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.graphs import ROTOR_BATCH, chain_of, synthetic_chain
from benchmarks.runner import Benchmark
from benchmarks.table import GIB, gib, joined, table
from memopt.strategies.rotor import Revolve, Rotor, RotorOptimal, Sequential
from memopt.strategies.rotor.plan_sets import CurvePoint

CAPACITY_BYTES = int(15.75 * GIB)
BUDGETS = 10
PAPER_GAIN = 0.128
MODELS = (
    *(f"resnet{depth}" for depth in (18, 50, 101, 152)),
    *(f"densenet{depth}" for depth in (121, 161, 169, 201)),
    "inception_v3",
)
CASES = {
    **{f"{name}:{px}": (name, px) for px in (224, 500, 1000) for name in MODELS},
    "resnet1001:224": ("resnet1001", 224),
}
PICTURED = 4
Point = tuple[int, float]
"""Peak bytes and step time in seconds."""


@dataclass(frozen=True)
class Row:
    """One model and image size; points are those of the trade-off, peaks ascending."""

    case: str
    stages: int
    store_all: Point
    rotor: list[Point]
    revolve: list[Point]
    sequential: list[Point]
    rotor_cpu_s: float
    optimal_cpu_s: float | None

    def best(self) -> Point | None:
        """Give the sequential of highest throughput that fits the card."""
        fitting = [point for point in self.sequential if point[0] <= CAPACITY_BYTES]
        return min(fitting, key=lambda point: point[1], default=None)

    def gain_at(self, point: Point | None) -> float | None:
        """Give Rotor's gain in throughput within the peak of a sequential schedule."""
        found = None if point is None else throughput(self.rotor, point[0])
        return None if found is None or point is None else found * point[1] / ROTOR_BATCH - 1


def throughput(points: Sequence[Point], budget: int) -> float | None:
    """Give the images per second of the fastest schedule within the budget."""
    times = [time_s for peak_bytes, time_s in points if peak_bytes <= budget]
    return ROTOR_BATCH / min(times) if times else None


def _points(curve: Sequence[CurvePoint]) -> list[Point]:
    return [(point.peak_bytes, point.time_s) for point in curve]


def evaluate(_: Any, name: str, pixels: int) -> list[Row]:
    """Plan one chain by all strategies."""
    chain = chain_of(name, pixels)
    started = time.process_time()
    rotor = Rotor().plan_set(chain)
    rotor_cpu_s = time.process_time() - started
    optimal_cpu_s, optimal = None, RotorOptimal()
    if len(chain) <= optimal.most_stages:
        started = time.process_time()
        optimal.plan_set(chain)
        optimal_cpu_s = time.process_time() - started
    curves = (rotor.points, Revolve().plan_set(chain).points, Sequential("best").curve(chain))
    (store_all,) = _points(Sequential(1).curve(chain)[:1])
    case, cpu = f"{name}:{pixels}", (rotor_cpu_s, optimal_cpu_s)
    return [Row(case, len(chain), store_all, *map(_points, curves), *cpu)]


def _blocks(rows: list[Row], _: Any) -> dict[str, str]:
    gains = [gain for row in rows if (gain := row.gain_at(row.best())) is not None]
    everywhere = [
        gain for row in rows for point in row.sequential if (gain := row.gain_at(point)) is not None
    ]
    missing = set(CASES) - {row.case for row in rows}
    text = (
        f"Not in this run: {', '.join(sorted(missing)) or 'none'}. Mean gain "
        f"{statistics.mean(gains):.1%} over {len(gains)} cases (least {min(gains):.1%}, most "
        f"{max(gains):.1%}); the paper measured {PAPER_GAIN:.1%} on its own set. Over every "
        f"undominated sequential schedule, whatever its peak: {statistics.mean(everywhere):.1%} "
        f"({len(everywhere)} schedules)."
    )
    head = (
        "model:pixels | stages | store all: GiB, images/s | best sequential: GiB, images/s | "
        "Rotor there | gain | revolve there | CPU s: persistent | CPU s: optimal"
    )
    budgets = [
        [
            f"{_number(throughput(row.rotor, size))} / {_number(throughput(row.revolve, size))}"
            for size in (row.store_all[0] * i // BUDGETS for i in range(1, BUDGETS + 1))
        ]
        for row in rows
    ]
    tenths = " | ".join(f"{i}/10" for i in range(1, BUDGETS + 1))
    cases = [row.case for row in rows]
    return {
        "results": joined(text, table(head, map(_line, rows))),
        "budgets": table(
            f"model:pixels | {tenths}",
            [(case, *cells) for case, cells in zip(cases, budgets, strict=True)],
        ),
    }


def _line(row: Row) -> str:
    best = row.best()
    gain, at = row.gain_at(best), CAPACITY_BYTES if best is None else best[0]
    optimal = "-" if row.optimal_cpu_s is None else f"{row.optimal_cpu_s:.2f}"
    return (
        f"{row.case} | {row.stages} | {_point(row.store_all)} | {_point(best)} | "
        f"{_number(throughput(row.rotor, at))} | {'-' if gain is None else f'{gain:.1%}'} | "
        f"{_number(throughput(row.revolve, at))} | {row.rotor_cpu_s:.2f} | {optimal}"
    )


def _point(point: Point | None) -> str:
    return "-" if point is None else f"{gib(point[0], 2)}, {_number(ROTOR_BATCH / point[1])}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def picture(rows: list[Row], page: Path) -> None:
    """Draw throughput against peak of the longest chains, one panel each, of different models."""
    chosen: dict[str, Row] = {}
    for row in sorted(rows, key=lambda r: -r.stages):
        chosen.setdefault(row.case.partition(":")[0], row)
    figure = Figure(figsize=(9, 6), layout="constrained")
    for index, row in enumerate(list(chosen.values())[:PICTURED]):
        axes = figure.add_subplot(2, 2, index + 1)

        def xy(points: Sequence[Point]) -> tuple[list[float], list[float]]:
            return [p / GIB for p, _ in points], [ROTOR_BATCH / t for _, t in points]

        for points, style, label in ((row.rotor, "b-", "Rotor"), (row.revolve, "g-", "revolve")):
            axes.step(*xy(points), style, where="post", label=label)
        axes.plot(*xy(row.sequential), "x", color="purple", label="sequential")
        axes.plot(*xy([row.store_all]), "rs", label="store all")
        axes.set_title(f"{row.case}, {row.stages} stages")
        axes.set_xlabel("peak, GiB")
        axes.set_ylabel("images/s")
        axes.legend(fontsize="small")
    figure.savefig(page.with_suffix(".png"), dpi=80)


def _compile_all(_: Any) -> None:
    for strategy in (
        Rotor(),
        Rotor(exact_stages=0),
        Revolve(),
        RotorOptimal(),
        RotorOptimal(exact_stages=0),
    ):
        strategy.plan_set(synthetic_chain(5))


BENCHMARK = Benchmark(
    row=Row, cases=CASES, measure=evaluate, blocks=_blocks, prepare=_compile_all, pictures=picture
)
