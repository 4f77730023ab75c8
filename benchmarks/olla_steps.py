"""OLLA's steps that ran here on the CPU: PyTorch's own beside the planned one, measured.

Small models, and with --gib those of published size whose peak is at most so many GiB. Written into
`olla_tables`' page.

`olla_cp_sat`: OLLA's own programs in CP-SAT beside the search: orders (eq. 14), and with addresses
(eq. 9). Whole steps as in `olla_tables`, and random graphs. CP-SAT begins from the framework's
order and knows nothing of the search, so that the two are apart; CPU seconds of one thread.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch

import memopt
from benchmarks import olla_tables
from benchmarks.graphs import updated_graph
from benchmarks.olla_tables import BATCHES, MODELS, NAMES, means, of_paper, saved, warm_up
from benchmarks.runner import Benchmark, Cases, crossed
from benchmarks.steps import CPU, peak_of, timed
from benchmarks.table import GIB, by, joined, mib, percent, table
from memopt.passes.cp_sat import CpSat
from memopt.passes.order.ordering import Ordering, order_tasks
from memopt.passes.order.program_tasks import tasks_of
from memopt.passes.order.tasks import Tasks
from memopt.programs.in_place import with_in_place
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.step.inputs import to_call
from memopt.strategies.olla import Olla
from tests import zoo
from tests.passes.oracles import random_tasks
from tests.zoo.family import TINY_BATCH


@dataclass(frozen=True)
class Row:
    """A step that ran here, or is too large (no text: its peak by liveness instead).

    Attributes:
        size: "paper", or "tiny": narrow, on small inputs.
        eager_bytes: PyTorch's own step, measured, or by liveness.
        saved: shares of that that the planned step saves, measured, and that an order with the
            smallest predicted peak would; without resident bytes, then of all.
    """

    name: str
    batch: int
    size: str
    eager_bytes: int
    text: str
    saved: list[float]


def _measured(given: Any, name: str, batch: int, size: zoo.Size) -> list[Row]:
    if size == "paper":
        graph = updated_graph(name, batch)
        least = replay(graph, with_in_place(graph, store_all(graph))).peak_bytes
        if least > given.gib * GIB:
            return [Row(name, batch, size, least, "", [])]
    family = zoo.get(name)
    model, inputs = family.build(size), family.inputs(size, batch=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    plan = memopt.plan(
        model, inputs, loss_fn=family.loss, optimizer=optimizer, strategy=Olla(place=False),
        cache=False, progress=False,
    )  # fmt: skip
    call = to_call(inputs)
    step = plan.train_step(model, family.loss, optimizer)
    peak = peak_of(model, lambda: step(*call.args, **call.kwargs), CPU)
    bound = plan.stats["order_bound_bytes"]
    assert isinstance(bound, int)
    aside, before = plan.resident_bytes, plan.baseline.peak_bytes
    sizes = (before, plan.peak_bytes, aside + peak)
    shares = [saved(before, now, a) for a in (aside, 0) for now in (aside + peak, bound)]
    text = (
        f"{name} b{batch}, {size} | {' | '.join(mib(x - aside, 2) for x in sizes)} | "
        f"{percent(shares[0])} | {percent(shares[1])}"
    )
    return [Row(name, batch, size, before, text, shares)]


def _means(rows: list[Row]) -> str:
    lines = []
    for (size, batch), own in by(rows, "size", "batch").items():
        for which, some in list(of_paper(own).items())[: 1 if size == "tiny" else 2]:
            shares = means(row.saved for row in some)
            papers = olla_tables.PAPER_REORDERED.get(batch) if size == "paper" else None
            shares.insert(2, "" if papers is None else percent(papers))
            lines.append((f"{size}, batch {batch}", which, *shares))
    return table(
        "steps | models | saved, measured | at the bound | paper | of all, measured | at the bound",
        lines,
    )


def _blocks(rows: list[Row], _: Any) -> dict[str, str]:
    ran = [row for row in rows if row.text]
    large = [f"{r.name} b{r.batch} ({r.eager_bytes / GIB:.1f})" for r in rows if not r.text]
    head = (
        "step | eager, measured | planned | planned step, measured | saved, measured | "
        "saved at the bound"
    )
    return {
        "measured": joined(
            "Means, without resident bytes and of all:",
            _means(ran),
            f"Of published size, not run here for memory or time (GiB of their peaks by liveness): "
            f"{', '.join(large)}."
            if large
            else "",
            table(head, [row.text for row in ran]),
        )
    }


def _cases(given: Any) -> Cases:
    large = crossed(MODELS, BATCHES, ("paper",)) if given.gib else {}
    return {**crossed(NAMES, (TINY_BATCH,), ("tiny",)), **large}


SMALL = ("mlp", "alexnet", "vgg16")
"""Steps with few enough pairs of tensors for one program of all (`MOST_ROWS`)."""
SIZES = (20, 40, 60)
COUNT = 4
"""Random graphs of each size."""


@dataclass(frozen=True)
class Solved:
    """One problem, solved by the search and by CP-SAT.

    Attributes:
        search, cold, warm: (peak, bound, CPU seconds) of the search, of CP-SAT alone, and of one
            after the other; empty: not measured.
        variables: of CP-SAT's programs; below 0: of one that was too large to make.
    """

    kind: str
    name: str
    tasks: int
    resident_bytes: int
    search: list[float]
    cold: list[float]
    warm: list[float]
    variables: int


def _search(tasks: Tasks, how: CpSat | None) -> tuple[Ordering, list[float]]:
    found, _, cpu_s = timed(lambda: order_tasks(tasks, cp_sat=how))
    return found, [found.peak, found.bound, cpu_s]


def _figure(stats: Any, name: str) -> int:
    return int(stats.get(name, 0))


def _ordered(given: Any, kind: str, name: str, tasks: Tasks) -> Solved:
    how = CpSat(warm_start=False, effort=given.effort)
    _, search = _search(tasks, None)
    found, cold = _search(tasks, how)
    size = _figure(found.stats, "variables") or -_figure(found.stats, "too_large")
    warm = [] if search[0] == search[1] else _search(tasks, replace(how, warm_start=True))[1]
    return Solved(kind, name, len(tasks), tasks.base, search, cold, warm or search, size)


def _step(given: Any, name: str, batch: int) -> list[Solved]:
    graph = updated_graph(name, batch)
    tasks = tasks_of(graph, with_in_place(graph, store_all(graph))).tasks
    return [_ordered(given, "order", f"{name} b{batch}", tasks)]


def _random(given: Any, size: int) -> list[Solved]:
    rng = Random(size)
    graphs = [random_tasks(rng, size) for _ in range(COUNT)]
    return [_ordered(given, "random", f"{size}", tasks) for tasks in graphs]


def _joint(given: Any, name: str, batch: int) -> list[Solved]:
    graph = updated_graph(name, batch)
    found = []
    together = Olla(solver="cp-sat", joint=True, warm_start=False, effort=given.effort)
    for solver in (Olla(arena_cost=None), together):
        solution, _, cpu_s = timed(lambda solver=solver: solver.solve(graph, None))
        assert solution.peak_bytes is not None
        bounds = (_figure(solution.stats, f"{kind}_bound_bytes") for kind in ("joint", "order"))
        found.append([solution.peak_bytes, next(filter(None, bounds)), cpu_s])
    search, cold = found
    size, rows = len(graph.operators), _figure(solution.stats, "joint_rows")
    return [Solved("joint", f"{name} b{batch}", size, graph.resident_bytes, search, cold, [], rows)]


def _cells(row: Solved, found: list[float]) -> Iterable[object]:
    if not found:
        return ("", "", "")
    peak, bound, cpu_s = found
    return (mib(peak - row.resident_bytes), mib(bound - row.resident_bytes), f"{cpu_s:.2f}")


def _line(row: Solved) -> Iterable[object]:
    size = f"{-row.variables} (not made)" if row.variables < 0 else row.variables
    return (row.name, row.tasks, size, *_cells(row, row.search), *_cells(row, row.cold))


def _random_line(size: str, rows: list[Solved]) -> Iterable[object]:
    figures: list[object] = []
    for found in ([r.search for r in rows], [r.cold for r in rows], [r.warm for r in rows]):
        seconds = [cpu_s for _, _, cpu_s in found]
        figures += [
            f"{sum(peak == bound for peak, bound, _ in found)} of {len(rows)}",
            percent(statistics.mean(peak / bound - 1 for peak, bound, _ in found), 2),
            f"{statistics.median(seconds):.2f}",
        ]
    smaller = sum(r.cold[0] < r.search[0] for r in rows), sum(r.search[0] < r.cold[0] for r in rows)
    return (size, *figures, *smaller)


def _orders(rows: list[Solved]) -> str:
    proved = [row for row in rows if row.cold[0] == row.cold[1]]
    same = sum(row.cold[0] == row.search[0] for row in rows)
    behind = [row.cold[0] / row.search[0] - 1 for row in rows]
    quicker = sum(row.cold[2] < row.search[2] for row in rows)
    return joined(
        f"The search proves {sum(r.search[0] == r.search[1] for r in rows)} of {len(rows)} orders "
        f"optimal, so that CP-SAT, which starts from it unless told otherwise, ends with the same "
        f"optima and has nothing left to do. By itself it proves {len(proved)} optimal, finds the "
        f"optimum of {same}, and is the faster one for {quicker}; what it finds of the others is "
        f"up to {percent(max(behind))} above the optimum (resident bytes included).",
        table(
            "step | tasks | variables | search: MiB | bound | CPU s | CP-SAT alone: MiB | bound | "
            "CPU s",
            map(_line, rows),
        ),
    )


def _kinds(rows: list[Solved], _: Any) -> dict[str, str]:
    kinds: dict[str, list[Solved]] = {kind: [] for kind in WAYS} | by(rows, "kind")
    return {
        "order": _orders(kinds["order"]) if kinds["order"] else "",
        "random": table(
            "tasks | search: proved | mean gap | CPU s | CP-SAT alone: proved | mean gap | CPU s | "
            "one after the other: proved | mean gap | CPU s | CP-SAT alone is better | the search "
            "is better",
            [_random_line(*one) for one in by(kinds["random"], "name").items()],
        ),
        "joint": table(
            "step | operators | rows of eq. 6 | one after the other: MiB | bound | CPU s | "
            "together: MiB | bound | CPU s",
            map(_line, kinds["joint"]),
        ),
    }


WAYS = {"order": _step, "random": _random, "joint": _joint}
BENCHMARK = Benchmark(
    page="docs/results/olla.md",
    row=Row,
    cases=_cases,
    measure=_measured,
    blocks=_blocks,
    selects=("gib",),
    options={"gib": 0.0},
    prepare=warm_up,
)
OLLA_CP_SAT = Benchmark(
    row=Solved,
    cases={
        **crossed(("order",), MODELS, BATCHES),
        **crossed(("joint",), SMALL, BATCHES),
        **crossed(("random",), SIZES),
    },
    measure=lambda given, way, *what: WAYS[way](given, *what),
    blocks=_kinds,
    options={"effort": 5.0},
    prepare=warm_up,
)
