"""OLLA's steps that ran here on the CPU: PyTorch's own beside the planned one, measured.

Small models, and with --gib those of published size whose peak is at most so many GiB. Written into
`olla_tables`' page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

import memopt
from benchmarks import olla_tables
from benchmarks.graphs import family_of, updated_graph
from benchmarks.olla_tables import PAPER_REORDERED, means, of_paper, saved
from benchmarks.runner import Benchmark, Cases, crossed
from benchmarks.steps import CPU, peak_of
from benchmarks.table import GIB, by, joined, mib, percent, table
from memopt.programs.in_place import with_in_place
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.step.inputs import to_call
from memopt.strategies.olla import Olla
from tests import zoo
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
    family = family_of(name)
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
            known = size == "paper" and batch in PAPER_REORDERED
            shares.insert(2, percent(PAPER_REORDERED[batch]) if known else "")
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
    large = crossed(olla_tables.MODELS, olla_tables.BATCHES, ("paper",)) if given.gib else {}
    return {**crossed(olla_tables.NAMES, (TINY_BATCH,), ("tiny",)), **large}


BENCHMARK = Benchmark(
    page="docs/results/olla.md",
    row=Row,
    cases=_cases,
    measure=_measured,
    blocks=_blocks,
    selects=("gib",),
    options={"gib": 0.0},
    prepare=olla_tables.warm_up,
)
