"""How good the estimates are: every published step that memopt can express, beside its estimate.

Rows are those of `benchmarks.published`, estimates those of `benchmarks.published.estimate`.
Sources are in two halves: those of FIT were looked at while the model of costs was mended, the
others are held out. Nothing is fitted to a row.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from benchmarks.published import PATH, measurements, row_of
from benchmarks.published.estimate import Row, estimated, why_not
from benchmarks.published.meshes import turns
from benchmarks.runner import Benchmark
from benchmarks.table import by, gib, joined, table
from memopt.models.presets import find_device

FIT = (
    "megatron", "torchtune", "torchtitan-2024", "torchtitan-async-tp", "raschka", "torchtitan-996",
    "llm.c",
)  # fmt: skip

LIMITS = {"memory": 0.10, "step": 0.20}
CAUSES = json.loads(PATH.with_name("causes.json").read_text(encoding="utf-8"))
"""Names of rows beyond LIMITS → why."""

EXPOSURES = [0.5 * i for i in range(17)]
"""What is tried of the one constant of times that is fitted, `Device.product_exposure`."""
FITTED = find_device("A100").product_exposure
"""What memopt's presets say."""


def _exposed(row: Row, times: float) -> Row:
    """Take a step's products with another exposure."""
    known, found = row.step
    more = (times / FITTED - 1) * row.times["exposed"] * turns(row_of(row.name))
    return replace(row, step=(known, found + more))


def _median(rows: Sequence[Row], times: float) -> float:
    errors = _errors([_exposed(row, times) for row in rows], "step")
    return statistics.median(map(abs, errors)) if errors else 0.0


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


def _outside(rows: Iterable[Row]) -> list[list[str]]:
    lines = []
    for row in rows:
        errors = {what: sum(_errors([row], what)) for what in LIMITS}
        if any(abs(errors[what]) > limit for what, limit in LIMITS.items()):
            causes = [why for names, why in CAUSES.items() if row.name in names.split()]
            shown = [f"{one:+.0%}" if one else "" for one in errors.values()]
            lines.append([row.name, *shown, "; ".join(causes) or "not found"])
    return lines


def _blocks(rows: list[Row], _: Any) -> dict[str, str]:
    known = measurements().rows
    groups = {
        "all": rows,
        "looked at": [row for row in rows if row.source in FIT],
        "held out": [row for row in rows if row.source not in FIT],
        **by(rows, "source"),
    }
    lines = [
        [
            label,
            *_quality(_errors(some, "memory")),
            *_quality(_errors(some, "step")),
            *_quality(_errors([_exposed(row, 0.0) for row in some], "step"))[1:],
        ]
        for label, some in groups.items()
    ]
    figures = "median error | within 15% | worst"
    head = f"sources | peaks | {figures} | times | {figures} | as a roofline: {figures}"
    fits = {
        times: [_median(groups[half], times) for half in ("looked at", "held out")]
        for times in EXPOSURES
    }
    best = min(EXPOSURES, key=lambda times: fits[times][0])
    said = f"Fitted to the sources looked at: an exposure of {best:g}. The presets have {FITTED:g}."
    missing = Counter(filter(None, map(why_not, known))).most_common()
    left_over = len(_cases()) - len(rows)
    missing += [("nothing: alike, and not run yet", left_over)] if left_over else []
    counts = Counter(row["source"] for row in known)
    listed = [
        [f"[{source['title']}]({source['url']})", source["date"], source["licence"], counts[name]]
        for name, source in measurements().sources.items()
        if counts[name]
    ]
    whole = (
        "row | model | batch | GPU | mesh | how | peak GiB, published | estimated | error | "
        "step s, published | estimated | error"
    )
    shown = [[f"{times:g}", *map("{:.1%}".format, pair)] for times, pair in fits.items()]
    return {
        "summary": joined(table(head, lines), said),
        "fit": table("exposure | looked at: median error of times | held out", shown),
        "outside": table("row | peak | time | cause", _outside(rows)),
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
