"""`auto` beside each single strategy with the same limit: step times, gaps, planning (estimated).

Graphs of the zoo's models at their published sizes, batch 32, with exact implementations, and
budgets as in `joint_tables`. Limits count CPU seconds, so that other work on the machine takes none
of them; 0: none, the default. `auto` may stop within its gap of 1% of the bound: it counts as
slower where it is beyond the fastest single strategy by more than that.

`limits`: whether planning ends in its time, of every strategy on random steps and chains of growing
size, with a budget between what the strategy needs and what store-all does. The law is limit x 1.1
+ 0.3 s of CPU time.
"""

from __future__ import annotations

import contextlib
import datetime
import resource
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

from benchmarks.joint_tables import AT_ONCE, MODELS, Row, pace, planned
from benchmarks.runner import Benchmark, crossed
from benchmarks.steps import timed
from benchmarks.table import by, joined, signed, table
from memopt.api.planning import solve
from memopt.errors import MemoptError
from memopt.models.chain import Chain
from memopt.models.device import Device
from memopt.models.generate import random_chain, random_graph
from memopt.models.graph import Graph
from memopt.models.presets import find_device
from memopt.solvers import binary_program
from memopt.strategies import STRATEGIES, resolve
from memopt.testing.solutions import store_all_peak

SINGLES = ("sequential", "rotor", "rotor-menus", "offload-graph", "monet", "joint")
AUTO = "auto"
DEVICES, SHARES = ("H100", "GH200", "cpu-core"), (0.60, 0.40, 0.25, 0.15)
GAP = 0.01


@contextlib.contextmanager
def cpu_clock(stretch: float = 1.0) -> Iterator[None]:
    """Make deadlines count CPU seconds; those of solvers, which count the wall clock's, are
    stretched by what a second of this process takes. Solvers that were abandoned end first."""
    for thread in threading.enumerate():
        if thread.name == "memopt-solver":
            thread.join()

    def stretched(seconds: float) -> datetime.timedelta:
        return datetime.timedelta(seconds=seconds * stretch)

    solvers = mock.patch.object(binary_program, "datetime", SimpleNamespace(timedelta=stretched))
    with mock.patch.object(time, "monotonic", time.process_time), solvers:
        yield


def _planned(_: Any, device: str, model: str, share: float, limit_s: float) -> list[Row]:
    rows: list[Row] = []
    for name in (*SINGLES, AUTO, AT_ONCE):
        if not any(row.impossible for row in rows):
            with cpu_clock(pace().stretch):
                rows.append(planned(device, model, share, name, limit_s))
    return rows


def _compiled(name: str) -> None:
    graph = random_graph(Random(1), 12)
    with contextlib.suppress(MemoptError):
        solve(graph, "min", resolve(name), device=find_device("H100"), time_limit_s=5.0)


def _cells(rows: list[Row]) -> list[dict[str, Row]]:
    found = by((row for row in rows if not row.impossible), "device", "model", "share", "limit_s")
    return [{row.strategy: row for row in some} for some in found.values()]


def _beyond(cell: dict[str, Row]) -> float | None:
    """Give by how much auto's step is slower than the fastest single strategy's."""
    found = (cell[name].overhead for name in SINGLES)
    best = min((x for x in found if x is not None), default=None)
    own = cell[AUTO].overhead
    if best is None:
        return None if own is None else -1.0
    return float("inf") if own is None else (1 + own) / (1 + best) - 1


def _summary(cells: list[dict[str, Row]]) -> str:
    beyond = [x for cell in cells if (x := _beyond(cell)) is not None]
    gaps = [x for cell in cells if (x := cell[AUTO].gap) is not None]
    first = [cell[AT_ONCE].cpu_s for cell in cells]
    return (
        f"{len(cells)} cells. auto is slower than the fastest single strategy by more than its gap "
        f"of {GAP:.0%} in {sum(x > GAP for x in beyond)} of {len(beyond)} (at worst by "
        f"{max(beyond, default=0):+.1%}), and faster in {sum(x < -1e-9 for x in beyond)}; its gap "
        f"is {median(gaps) if gaps else 0:.1%} in the median. A plan made at once takes up to "
        f"{max(first, default=0):.1f} CPU s."
    )


def _table(rows: list[Row], _: Any) -> str:
    cells, lines = _cells(rows), []
    names = (*SINGLES, AT_ONCE)
    for cell in cells:
        auto = cell[AUTO]
        singles = " | ".join(signed(cell[name].overhead) for name in names)
        limit = f"{auto.limit_s:g}" if auto.limit_s else "default"
        lines.append(
            f"{auto.device} | {auto.model} | {auto.operators} | .{round(100 * auto.share):02d} | "
            f"{limit} | {singles} | **{signed(auto.overhead)}** | {auto.chosen} | "
            f"{signed(auto.gap)} | {auto.cpu_s:.0f}"
        )
    head = f"device | model | operators | share | limit, s | {' | '.join(names)}"
    return joined(_summary(cells), table(f"{head} | auto | chosen | gap | auto, CPU s", lines))


LINK = Device(to_host_bytes_per_s=2.0, from_host_bytes_per_s=2.0)
GRAPH_SIZES, CHAIN_SIZES = (18, 180, 1800, 6500), (50, 1000, 5000, 10_000)
"""Forward operators asked for, of which a step has some three times as many; and stages."""
ROOM = 0.6
LEFT_OUT = ("checkmate", "checkmate-rounding")
"""As `monet`, whose place they had."""


@dataclass(frozen=True)
class Ended:
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


def _ended(given: Any, kind: str, size: int, name: str) -> list[Ended]:
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
    return [Ended(kind, count, name, outcome, round(cpu_s, 2), given.limit, most)]


def _outcome(model: Graph | Chain, budget: int, strategy: Any, limit_s: float) -> str:
    try:
        plan = solve(model, budget, strategy, device=LINK, time_limit_s=limit_s)
    except (MemoptError, ValueError) as error:
        return "cannot plan it" if isinstance(error, ValueError) else "no plan"
    return f"{plan.overhead:+.0%}"


def _said(rows: list[Ended], given: Any) -> str:
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
    cases=lambda given: crossed(given.devices, given.models, given.shares, given.limits),
    measure=_planned,
    blocks=_table,
    options={"limits": (5.0,), "models": MODELS, "devices": DEVICES, "shares": SHARES},
    selects=("models", "devices", "shares", "limits"),
    # Machine code is made once, outside of any limit.
    prepare=lambda _: [_compiled(name) for name in (*SINGLES, AUTO)],
)
LIMITS = Benchmark(
    row=Ended,
    cases=_cases,
    measure=_ended,
    head="instance | operators or stages | strategy | step | CPU s | MiB",
    line=lambda row: (
        f"{row.kind} | {row.size} | {row.strategy} | {row.outcome} | "
        f"{row.cpu_s:.2f}{'' if row.keeps else ' (late)'} | {row.most_mib}"
    ),
    summary=_said,
    options={"limit": 5.0, "operators": GRAPH_SIZES, "stages": CHAIN_SIZES, "strategies": NAMES},
    selects=("operators", "stages", "strategies"),
    apart=True,
)
