"""Popular architectures of transformers and timm, small, all else by default, in `memopt.wrap`.

Each trains twice from the same weights, plain and wrapped with the budget "min": two steps, and one
of two accumulated micro-batches. Losses, gradients, buffers and parameters have to be equal bit for
bit, and all four calls have to run under a plan. A model that is refused is shown with the
refusal's sentence, and trains again with what remedies it.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import transformers

from benchmarks.runner import Benchmark, named
from benchmarks.table import joined, table
from tests.users.architectures import ARCHITECTURES, timm
from tests.users.trained_architectures import Row, rows_of

WORKING = 27
"""So many of the architectures have to work as they are."""


def _blocks(rows: list[Row], _: Any) -> str:
    default = [row for row in rows if row.name in NAMES]
    refused = [row for row in default if row.outcome == "refused"]
    return joined(
        f"transformers {transformers.__version__}, timm {timm.__version__}. "
        f"**{sum(row.outcome == 'exact' for row in default)} of {len(default)} are exact as they "
        f"are**, {len(refused)} refused.",
        table("architecture | kind | outcome | min | seconds", map(_line, rows)),
        "## Refusals" if refused else "",
        *(f"**{row.name}**: {row.sentence}" for row in refused),
    )


def _line(row: Row) -> str:
    figures = f"{row.share:.0%} | {row.seconds:.0f}" if row.outcome == "exact" else " | "
    return f"{row.name} | {row.kind} | {row.outcome} | {figures}"


def _failures(rows: list[Row], given: Any) -> list[str]:
    """Name what is wrong, refused though remedied, or too few."""
    works = sum(row.outcome == "exact" and row.name in NAMES for row in rows)
    wrong = [
        f"{row.name}: {row.outcome}"
        for row in rows
        if row.outcome not in ("exact", *(["refused"] if row.name in NAMES else []))
    ]
    few = given.only is None and works < WORKING
    return wrong + [f"only {works} work as they are"] * few


def _without_plans(_: Any) -> None:
    """Plans that are there already would not be solved."""
    os.environ["MEMOPT_CACHE_DIR"] = tempfile.mkdtemp()


NAMES = [one.name for one in ARCHITECTURES]
BENCHMARK = Benchmark(
    row=Row,
    cases=named(NAMES),
    measure=lambda _, name: rows_of(name),
    blocks=_blocks,
    prepare=_without_plans,
    failures=_failures,
    apart=True,
)
