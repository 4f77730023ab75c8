"""Persistent, optimal and free plans of the fourteen families' chains (Rotor §5.3).

Models of their published size, batch 8, estimated for a V100-PCIe. Budgets are floor + x (baseline
- floor): the floor is the persistent class's smallest budget, the baseline stores everything.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from benchmarks.graphs import chain_of, synthetic_chain
from benchmarks.runner import Benchmark, named
from benchmarks.table import gib
from memopt.strategies.rotor import Rotor, RotorFree, RotorOptimal, Sequential
from memopt.strategies.rotor.strategies import TableStrategy
from tests.zoo import FAMILIES

SHARES = (0, 0.25, 0.5, 0.75)
STRATEGIES: tuple[TableStrategy, ...] = (Rotor(), RotorOptimal(), RotorFree())
SAME = 1e-9


@dataclass(frozen=True)
class Row:
    """One chain: its line, what the larger classes gain at each budget, whether their floors are
    lower."""

    name: str
    text: str
    gains: list[list[float]]
    lower: list[bool]


def compare(_: Any, name: str) -> list[Row]:
    """Plan one chain by the three strategies at every budget."""
    chain = chain_of(name, 0)
    floor = Rotor().smallest_budget(chain)
    baseline = Sequential(1).smallest_budget(chain)
    times: list[list[float]] = []
    cpu_s, smallest, grouped = [], [], []
    for strategy in STRATEGIES:
        started = time.process_time()
        plans = strategy.plan_set(chain)
        cpu_s.append(f"{time.process_time() - started:.2f}")
        smallest.append(plans.points[0].peak_bytes)
        grouped.append("groups" in plans.stats)
        indices = [plans.at(int(floor + share * (baseline - floor))) for share in SHARES]
        found = [float("inf") if i is None else plans.points[i].time_s for i in indices]
        times.append([time_s / chain.compute_time_s for time_s in found])
    cells = " | ".join(_cell(each, grouped) for each in zip(*times, strict=True))
    text = f"{name} | {len(chain)} | {gib(floor, 3)} | {gib(baseline, 3)} | {cells}"
    gains = [[1 - t / first for t, first in zip(found, times[0], strict=True)] for found in times]
    lower = [size < smallest[0] for size in smallest]
    return [Row(name, f"{text} | {', '.join(cpu_s)}", gains, lower)]


def _cell(times: tuple[float, ...], grouped: list[bool]) -> str:
    if max(times) - min(times) <= SAME * max(times):
        return f"{times[0]:.4f}"
    marks = ["*" if mark else "" for mark in grouped]
    return " / ".join(f"{t:.4f}{mark}" for t, mark in zip(times, marks, strict=True))


def _summary(rows: list[Row], _: Any) -> str:
    texts = []
    for index, label in ((1, "Optimal"), (2, "Free")):
        gains = [gain for row in rows for gain in row.gains[index]]
        lower = [row.name for row in rows if row.lower[index]]
        texts.append(
            f"{label} is faster than persistent in {sum(gain > SAME for gain in gains)} of "
            f"{len(gains)} cells, by at most {max(gains):.2%} of the step, and has a lower floor "
            f"on {', '.join(lower) or 'no model'}."
        )
    return " ".join(texts)


BENCHMARK = Benchmark(
    row=Row,
    cases=named([family.name for family in FAMILIES]),
    measure=compare,
    head="model | stages | floor GiB | baseline GiB | "
    + " | ".join(f"x = {share}" for share in SHARES)
    + " | CPU s: persistent, optimal, free",
    summary=_summary,
    prepare=lambda _: [strategy.plan_set(synthetic_chain(5)) for strategy in STRATEGIES],
)
