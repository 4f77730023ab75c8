"""Training under torch's engines on two or four processes: each beside itself with memopt.wrap.

Every cell trains a small model for five steps of AdamW, with clipping and two micro-batches a step,
twice: under the engine alone, and with planned calls at Rotor's smallest budget. Its verdict is
whether losses, norms and parameters agree bit for bit on every rank. Gloo processes of one thread.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.runner import Benchmark, crossed
from benchmarks.table import by, joined, table
from tests.distributed.decoders import SUBJECTS
from tests.distributed.engines import ALL, Cell, cells
from tests.distributed.processes import results, run


def _measured(_given: Any, ranks: int, name: str) -> list[Cell]:
    with tempfile.TemporaryDirectory() as folder:
        found = results(run(cells, ranks, Path(folder), name, list(ALL), timeout_s=1800))
    # The rank that differs, or the one with the highest peak.
    return [
        max(same, key=lambda one: (one.failed, one.over_bytes or 0))
        for same in zip(*found, strict=True)
    ]


def _blocks(rows: list[Cell], _given: Any) -> str:
    return joined(*(_on(*one) for one in sorted(by(rows, "ranks").items())))


def _on(ranks: int, rows: list[Cell]) -> str:
    names = list(dict.fromkeys(row.model for row in rows))
    by_place = {(row.engine, row.model): row for row in rows}

    def verdict(row: Cell | None) -> str:
        if row is None:
            return "–"
        over = row.over_bytes or 0
        peak = f", peak {abs(over):,} B {'above' if over > 0 else 'below'} budget" if over else ""
        return row.failed or f"same bits, {row.planned} of {row.calls} calls planned{peak}"

    lines = [
        " | ".join([engine, *(verdict(by_place.get((engine, name))) for name in names)])
        for engine in ALL
        if any((engine, name) in by_place for name in names)
    ]
    head = " | ".join(["engine", *(SUBJECTS[name].text for name in names)])
    return joined(f"{ranks} ranks.", table(head, lines))


BENCHMARK = Benchmark(
    row=Cell,
    cases=crossed((2, 4), SUBJECTS),
    measure=_measured,
    blocks=_blocks,
)
