"""How good the estimates are: every published step that memopt can express, beside its estimate.

Rows are those of `benchmarks.published`, estimates those of `benchmarks.published.estimate`.
Sources are in two halves: those of FIT were looked at while the model of costs was mended, the
others are held out. Nothing is fitted to a row.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.published import measurements
from benchmarks.published.estimate import Row, estimated, row_of, why_not
from benchmarks.runner import Benchmark
from benchmarks.table import gib, joined, table

FIT = ("megatron", "torchtune", "torchtitan-2024", "raschka", "torchtitan-996", "llm.c")

Fit = tuple[float, float]
"""Seconds as a multiple of the estimated ones, and the host's seconds for each launch."""


def _launches(row: Row) -> float:
    one = row_of(row.name)
    return row.times["launches"] * (one.get("micro_batches", 1) + one.get("pp", 1) - 1)


def _refitted(row: Row, fit: Fit) -> Row:
    """Take a step's seconds as the longer of the device's and the host's, by fitted constants."""
    known, found = row.step
    return replace(row, step=(known, max(fit[0] * found, fit[1] * _launches(row))))


def _fitted(rows: Sequence[Row]) -> Fit:
    """Fit both constants to the rows' times: the least median error, of a grid."""
    timed = [row for row in rows if row.step[0]] or list(rows)
    grid = [(1 + 0.05 * i, 2e-6 * k) for i in range(21) for k in range(51)]

    def median(fit: Fit) -> float:
        return statistics.median(
            [abs(e) for e in _errors([_refitted(r, fit) for r in timed], "step")]
        )

    return min(grid, key=median) if timed and timed[0].step[0] else (1.0, 0.0)


def _errors(rows: Iterable[Row], what: str) -> list[float]:
    pairs = [getattr(row, what) for row in rows]
    return [found / known - 1 for known, found in pairs if known]


def _quality(errors: Sequence[float]) -> list[str]:
    sizes = sorted(map(abs, errors))
    if not sizes:
        return ["", "", "", ""]
    within = sum(size <= 0.15 for size in sizes)
    return [str(len(sizes)), f"{statistics.median(sizes):.1%}", str(within), f"{sizes[-1]:.0%}"]


def _line(row: Row) -> list[str]:
    one = row_of(row.name)
    mesh = " ".join(f"{k} {one[k]}" for k in ("dp", "tp", "pp", "cp") if one.get(k, 1) > 1)
    how = [one.get("recompute", "") and f"{one['recompute']} recompute", one.get("sharding", "")]
    how += [f"LoRA {one['lora_rank']}"] if "lora_rank" in one else []
    how += [one[k] for k in ("kernels", "attention", "loss") if k in one]
    cells = [row.name, one["model"], f"{one['batch']} x {one['sequence']}", one["gpu"], mesh]
    cells.append(", ".join(filter(None, how)))
    for (known, found), text in ((row.memory, gib), (row.step, "{:.3f}".format)):
        shown = [text(known), text(found), f"{found / known - 1:+.0%}"] if known else [""] * 3
        cells += shown
    return cells


def _blocks(rows: list[Row], _: Any) -> dict[str, str]:
    known = measurements().rows
    half = {row.name: row_of(row.name)["source"] in FIT for row in rows}
    fit = _fitted([row for row in rows if half[row.name]])
    halves = {
        "all": rows,
        "looked at": [row for row in rows if half[row.name]],
        "held out": [row for row in rows if not half[row.name]],
    }
    for name in dict.fromkeys(row_of(row.name)["source"] for row in rows):
        halves[name] = [row for row in rows if row_of(row.name)["source"] == name]
    lines = [
        [
            label,
            *_quality(_errors(some, "memory")),
            *_quality(_errors(some, "step")),
            *_quality(_errors([_refitted(row, fit) for row in some], "step"))[1:],
        ]
        for label, some in halves.items()
    ]
    head = (
        "sources | peaks | median error | within 15% | worst | times | median error | within 15% | "
        "worst | fitted: median error | within 15% | worst"
    )
    said = (
        f"Fitted: {fit[0]:.2f} times the estimate, {1e6 * fit[1]:.0f} us of the host for a launch."
    )
    left = Counter(filter(None, map(why_not, known)))
    missing = [[why, str(count)] for why, count in left.most_common()]
    left_over = len(_cases()) - len(rows)
    missing += [["nothing: alike, and not run yet", str(left_over)]] if left_over else []
    listed = [
        [f"[{source['title']}]({source['url']})", source["date"], source["licence"], str(count)]
        for name, source in measurements().sources.items()
        if (count := sum(row["source"] == name for row in known))
    ]
    whole = (
        "row | model | batch | GPU | mesh | how | peak GiB, published | estimated | error | "
        "step s, published | estimated | error"
    )
    return {
        "summary": joined(table(head, lines), said),
        "rows": table(whole, map(_line, rows)),
        "left": table("memopt or this script has no | rows", missing),
        "sources": table("source | date | licence | rows", listed),
    }


def _cases() -> dict[str, tuple[str]]:
    return {row["name"]: (row["name"],) for row in measurements().rows if not why_not(row)}


BENCHMARK = Benchmark(
    row=Row,
    cases=lambda _: _cases(),
    measure=estimated,
    blocks=_blocks,
    page="docs/results/published.md",
)
