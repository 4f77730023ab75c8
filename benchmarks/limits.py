"""Whether planning ends in its time: every strategy on random steps and chains of growing size.

A budget between what the strategy needs and what store-all does; CPU seconds of one process, whose
clock the deadlines are read from here, so that a machine's other work does not count. The law is
limit x 1.1 + 0.3 s.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.auto_portfolio import cpu_clock
from benchmarks.joint_tables import pace
from benchmarks.runner import Benchmark
from benchmarks.steps import timed
from memopt.api.planning import solve
from memopt.errors import MemoptError
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph
from memopt.strategies import STRATEGIES, resolve
from memopt.testing.solutions import store_all_peak

LINK = Device(to_host_bytes_per_s=2.0, from_host_bytes_per_s=2.0)
GRAPH_SIZES, CHAIN_SIZES = (18, 180, 1800, 6500), (50, 1000, 5000, 10_000)
"""Forward operators asked for, of which a step has some three times as many; and stages."""
ROOM = 0.6
LEFT_OUT = ("checkmate", "checkmate-rounding")
"""As `monet`, whose place they had."""


@dataclass(frozen=True)
class Row:
    """One strategy on one instance."""

    kind: str
    size: int
    strategy: str
    outcome: str
    cpu_s: float
    limit_s: float
    most_mib: int

    @property
    def keeps(self) -> bool:
        return self.cpu_s <= 1.1 * self.limit_s + 0.3


def instance(kind: str, size: int) -> Graph | Chain:
    """Give the instance of a size, the same on every machine."""
    rng = Random(5)
    return random_graph(rng, size) if kind == "graph" else random_chain(rng, size)


def _measured(given: Any, kind: str, size: int, name: str) -> list[Row]:
    model, strategy = instance(kind, size), resolve(name)
    budget = int(ROOM * store_all_peak(model))
    # Machine code is made once, outside of any limit.
    for kind_of, many in ((random_graph, 6), (random_graph, 60), (random_chain, 60)):
        small = kind_of(Random(1), many)
        _outcome(small, int(ROOM * store_all_peak(small)), strategy, 1.0)
    stretch = pace().stretch  # What measuring it takes is not the strategy's.
    with cpu_clock(stretch):
        outcome, _, cpu_s = timed(lambda: _outcome(model, budget, strategy, given.limit))
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    count = len(model.operators) if isinstance(model, Graph) else len(model)
    return [Row(kind, count, name, outcome, round(cpu_s, 2), given.limit, most)]


def _outcome(model: Graph | Chain, budget: int, strategy: Any, limit_s: float) -> str:
    try:
        plan = solve(model, budget, strategy, device=LINK, time_limit_s=limit_s)
    except (MemoptError, ValueError) as error:
        return "cannot plan it" if isinstance(error, ValueError) else "no plan"
    return f"{plan.overhead:+.0%}"


def _summary(rows: list[Row], given: Any) -> str:
    late = [f"{row.strategy} ({row.kind} of {row.size})" for row in rows if not row.keeps]
    most = max(row.most_mib for row in rows)
    kept = f"{len(rows) - len(late)} of {len(rows)} end within {given.limit:g} x 1.1 + 0.3 s"
    return f"{kept}, {most} MiB at most." + (f" Late: {', '.join(late)}." if late else "")


NAMES = tuple(s.name for s in STRATEGIES if s.name not in LEFT_OUT)


def _cases(given: Any) -> dict[str, tuple[Any, ...]]:
    sizes = {"graph": given.operators, "chain": given.stages}
    return {
        f"{kind} {size} {name}": (kind, size, name)
        for kind, many in sizes.items()
        for size in many
        for name in given.strategies
        if kind == "graph" or resolve(name).needs != "graph"
    }


BENCHMARK = Benchmark(
    row=Row,
    cases=_cases,
    measure=_measured,
    head="instance | operators or stages | strategy | step | CPU s | MiB",
    line=lambda row: (
        f"{row.kind} | {row.size} | {row.strategy} | {row.outcome} | "
        f"{row.cpu_s:.2f}{'' if row.keeps else ' (late)'} | {row.most_mib}"
    ),
    summary=_summary,
    options={"limit": 5.0, "operators": GRAPH_SIZES, "stages": CHAIN_SIZES, "strategies": NAMES},
    selects=("operators", "stages", "strategies"),
    apart=True,
)
