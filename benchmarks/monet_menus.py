"""Stage menus beside plain Rotor on the zoo's models (estimated for an H100, batch 32).

"NAME+loss" is a model with its loss inside, so that the logits are the plan's to free. The bound is
what no plan with these implementations and without transfers beats.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.graphs import GPT2_80, LOSS, step_graph
from benchmarks.runner import Benchmark
from benchmarks.table import gib, joined, signed, table
from memopt.models.budget import Budget
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.reductions.validate_and_replay import validate_and_replay
from memopt.strategies.monet.rotor_menus import RotorMenus
from tests.zoo import FAMILIES

SHARES = (0.5, 0.35)
LANGUAGE = tuple(name + LOSS for name in ("bert", "gpt2", "llama"))
TABLES = {
    "families": ("Exact implementations", tuple(family.name for family in FAMILIES)),
    "loss": ("With the loss inside the step, exact implementations", LANGUAGE),
    "all": (
        "All implementations, those that change rounding too",
        ("resnet50", "vit_b_16", "bert", *LANGUAGE),
    ),
    "deep": ("Deep models, exact implementations", ("resnet152", "densenet201", GPT2_80)),
}
"""Table → its title and models."""
HEAD = ("Rotor at {}", "menus", "of Rotor's", "bound", "s")


@dataclass(frozen=True)
class Row:
    """One model's line, and the table where it stands."""

    table: str
    text: str


def _planned(given: Any, where: str, name: str) -> list[Row]:
    exact = where != "all"
    graph = step_graph(name, exact=exact)
    base = replay(graph, store_all(graph))
    cells = [name, gib(base.peak_bytes, 2)]
    for share in SHARES:
        budget = int(share * base.peak_bytes)
        begin = time.perf_counter()
        found = RotorMenus(exact_only=exact).solve(graph, budget, time_limit_s=given.limit)
        seconds = time.perf_counter() - begin
        plain_s, least = found.stats.get("rotor_s", math.inf), found.smallest_budget_bytes
        assert isinstance(plain_s, float)
        if found.program is not None:
            assert validate_and_replay(graph, found.program, Budget(budget), None)[0] is None
            assert found.time_s is not None
            assert found.time_s <= plain_s
        times = (None if plain_s == math.inf else plain_s, found.time_s, found.lower_bound_s)
        overheads = [None if time_s is None else time_s / base.time_s - 1 for time_s in times]
        known = "" if least is None else f" (from {least / base.peak_bytes:.2f})"
        cells += [*_cells(known, *overheads), f"{seconds:.0f}"]
    return [Row(where, " | ".join(cells))]


def _cells(known: str, rotor: float | None, menus: float | None, bound: float | None) -> list[str]:
    ratio = ""
    if menus is not None and rotor is not None and rotor > 0:
        ratio = f"{menus / rotor:.2f}" if menus > 0 else "≤ 0"
    none = signed(menus, none=f"none{known}")
    return [signed(rotor, none="none"), none, ratio, signed(bound, none="")]


def _blocks(rows: list[Row], given: Any) -> str:
    parts = []
    heads = ["model", "peak GiB", *(text.format(share) for share in SHARES for text in HEAD)]
    for where, (title, _) in TABLES.items():
        lines = [row.text for row in rows if row.table == where]
        parts += [f"## {title}", table(" | ".join(heads), lines)] if lines else []
    return joined(*parts)


BENCHMARK = Benchmark(
    row=Row,
    cases={
        f"{where} {name}": (where, name) for where, (_, names) in TABLES.items() for name in names
    },
    measure=_planned,
    blocks=_blocks,
    options={"limit": 60.0},
)
