"""OLLA's tables and curves (§5.3 to §5.7) on whole training steps of full size.

A step is forward + loss + backward + one update of every parameter (plain SGD, in place), batch 1
and 32, images 224 pixels, text 512 tokens, estimated for the paper's GPU. Beside the page two
figures are written. Steps that really run are `olla_steps`'.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from matplotlib.axes import Axes

from benchmarks.graphs import updated_graph
from benchmarks.pictures import panels
from benchmarks.runner import Benchmark, crossed
from benchmarks.steps import timed
from benchmarks.table import GIB, MIB, by, joined, mib, percent, table
from memopt.models.generate import random_graph
from memopt.models.graph import Graph
from memopt.passes.order.program_tasks import tasks_of
from memopt.passes.order.task_contraction import eager
from memopt.programs.allocator_requests import Allocate, Event, allocation_trace, reserved_by
from memopt.programs.in_place import with_in_place
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate
from memopt.strategies.olla import order_program, place_program

NAMES = (
    "resnet50", "vgg16", "googlenet", "mobilenet_v2", "densenet121", "efficientnet_b0",
    "inception_v3", "vit_b_16", "r3d_18", "unet", "mlp", "gpt2", "gpt2_no_dropout", "bert",
    "bert_no_dropout", "llama",
)  # fmt: skip
"""The sixteen model graphs: fourteen families, GPT-2 and BERT with and without dropout."""
PAPER_NAMES = ("alexnet", "mnasnet", "xlm_r_large", "transformer")
"""Models of the paper that are not among them."""
MODELS, BATCHES = (*NAMES, *PAPER_NAMES), (1, 32)
TIME_LIMIT_S = 60.0
PAPER_REORDERED = {1: 0.225, 32: 0.101}
PAPER_WITH_ADDRESSES = {1: 0.304, 32: 0.361}
PAPER_FRAGMENTATION = {1: 0.079, 32: 0.261}
"""OLLA §5.3, §5.7 and §5.4, by the batch."""
FAMILIES_SHARED = (
    "resnet50", "vgg16", "googlenet", "mobilenet_v2", "efficientnet_b0", "vit_b_16", "r3d_18",
    *PAPER_NAMES,
)  # fmt: skip
"""Models of the paper's experiments that the tables have (ResNet-50 for its ResNet)."""
PAPER_MINUTES, PAPER_STEPS, PAPER_BATCH = 5, 1_000_000, 32
"""§5.7: what addresses save on average in so many steps of batch 32 (figure 14)."""
MOST_WRITTEN, PAGE = 6 * GIB, 4096
"""First writes are measured for steps that ask for at most so many bytes."""
SHOWN = 8
START_S = 1e-3


@dataclass(frozen=True)
class Row:
    """One training step. Bytes include resident ones.

    Attributes:
        framework_bytes: the framework's order, updates at the end.
        early_bytes: the framework's order with every update as early as it can be.
        peak_bytes, bound_bytes: of the best order found, and of any.
        order_s: CPU seconds of the search for an order.
        trace: (seconds, peak, bound) whenever either got better.
        own, best: placements of the framework's and of the best order, see `_placed`.
        requests: of memory in a step of the framework's order.
        allocator_s: CPU seconds that they take, from torch's allocator for the CPU, and with the
            first write to every page over that to pages in use; None: too large.
    """

    name: str
    batch: int
    operators: int
    resident_bytes: int
    framework_bytes: int
    early_bytes: int
    peak_bytes: int
    bound_bytes: int
    order_s: float
    trace: list[list[float]]
    own: dict[str, Any]
    best: dict[str, Any]
    requests: int
    allocator_s: list[float | None]


def warm_up(_: Any) -> None:
    """Compile what is compiled, so that no row pays for it."""
    graph = random_graph(Random(2), 30, updates=True)
    place_program(graph, order_program(graph, store_all(graph))[0])


def _planned(_: Any, name: str, batch: int) -> list[Row]:
    graph = updated_graph(name, batch)
    own = with_in_place(graph, store_all(graph))
    trace, how = _traced()
    (best, ordering), _, order_s = timed(lambda: order_program(graph, own, **how))
    tasks = tasks_of(graph, own).tasks
    early_bytes = tasks.peak(eager(tasks, tasks.topological))
    if validate(graph, best) is not None or ordering.peak > early_bytes:
        raise AssertionError(f"{name} b{batch}: the order is invalid or worse than the framework's")
    sizes = (replay(graph, own).peak_bytes, early_bytes, ordering.peak, ordering.bound)
    what = (name, batch, len(graph.operators), graph.resident_bytes)
    placed = (_placed(graph, own), _placed(graph, best))
    return [Row(*what, *sizes, order_s, trace, *placed, *_allocator(graph, own))]


def _traced() -> tuple[list[list[float]], dict[str, Any]]:
    """Give a list, and how to search so that every improvement is noted there."""
    trace: list[list[float]] = []
    note = lambda *at: trace.append([*map(float, at)])  # noqa: E731
    return trace, {"time_limit_s": TIME_LIMIT_S, "on_improvement": note}


def _allocator(graph: Graph, program: Program) -> tuple[int, list[float | None]]:
    """Ask torch for a step's memory and give it back, and nothing else."""
    events = [x for x in allocation_trace(graph, program) if "resident" not in (x.id, _first(x))]
    sizes = [x.size_bytes for x in events if isinstance(x, Allocate)]
    whole, nothing = (min(_replayed(events, one) for _ in range(5)) for one in (1, 0))
    if sum(sizes) > MOST_WRITTEN:
        return len(sizes), [whole - nothing, None]
    used = torch.zeros(max(sizes), dtype=torch.uint8)
    fresh, warm = _replayed(events, 1, used[:0]), _replayed(events, 1, used)
    return len(sizes), [whole - nothing, whole - nothing + fresh - warm]


def _first(event: Event) -> object:
    return event.id[0] if isinstance(event.id, tuple) else None


def _replayed(events: Sequence[Event], share: int, used: torch.Tensor | None = None) -> float:
    """Measure the CPU seconds of a step's requests, or (0) of as many for no bytes. With `used`,
    every page is written once, there instead if it is not empty."""
    held: dict[object, torch.Tensor] = {}

    def replayed() -> None:
        for event in events:
            if isinstance(event, Allocate):
                held[event.id] = block = torch.empty(share * event.size_bytes, dtype=torch.uint8)
                if used is not None:
                    (used[: event.size_bytes] if len(used) else block)[::PAGE] = 0
            else:
                del held[event.id]

    return timed(replayed)[2]


def _placed(graph: Graph, program: Program) -> dict[str, Any]:
    trace, how = _traced()
    (placed, placement), _, cpu_s = timed(lambda: place_program(graph, program, **how))
    if (violation := validate(graph, placed)) is not None:
        raise AssertionError(f"the placement is invalid: {violation}")
    loose, tight = (reserved_by(graph, p) for p in (program, placed))
    return {
        "arena_bytes": placement.peak,
        "bound_bytes": placement.bound,
        "cpu_s": cpu_s,
        "trace": trace,
        "reserved_bytes": loose.reserved_peak_bytes,
        "allocated_bytes": loose.allocated_peak_bytes,
        "arena_reserved_bytes": tight.reserved_peak_bytes,
    }


def saved(before: int, after: int, aside: int = 0) -> float:
    """Give the share of `before` that `after` saves, without what both have `aside`."""
    return 1 - (after - aside) / (before - aside)


def gap(placed: dict[str, float]) -> float:
    """Give a placement's gap to its bound."""
    return placed["arena_bytes"] / placed["bound_bytes"] - 1


def fragmentation(placed: dict[str, float]) -> float:
    """Give (reserved - allocated) / reserved, of the caching allocator (OLLA §5.4)."""
    return 1 - placed["allocated_bytes"] / placed["reserved_bytes"]


def _order_line(row: Row) -> str:
    sizes = (row.framework_bytes, row.early_bytes, row.peak_bytes, row.bound_bytes)
    figures = " | ".join(mib(x - row.resident_bytes) for x in sizes)
    return (
        f"{row.name} b{row.batch} | {row.operators} | {figures} | "
        f"{percent(row.peak_bytes / row.bound_bytes - 1, 3)} | {row.order_s:.2f} | "
        f"{percent(saved(row.framework_bytes, row.peak_bytes, row.resident_bytes))} | "
        f"{percent(saved(row.framework_bytes, row.peak_bytes))}"
    )


def _placement_line(row: Row) -> str:
    own, best = row.own, row.best
    return (
        f"{row.name} b{row.batch} | {percent(gap(own), 4)} | {own['cpu_s']:.2f} | "
        f"{percent(gap(best), 4)} | {best['cpu_s']:.2f} | {percent(fragmentation(own))} | "
        f"{percent(fragmentation(best))} | {own['reserved_bytes'] / MIB:.0f} | "
        f"{best['arena_reserved_bytes'] / MIB:.0f} | "
        f"{percent(saved(own['reserved_bytes'], best['arena_reserved_bytes']))}"
    )


def of_paper(rows: list[Any]) -> dict[str, list[Any]]:
    """Give all rows, and those of the paper's models, by what they are and how many."""
    shared = [row for row in rows if row.name in FAMILIES_SHARED]
    found = (("all", rows), ("the paper's", shared))
    return {f"{which}, {len(some)}": some for which, some in found if some}


def means(lines: Iterable[Iterable[float]]) -> list[str]:
    """Give the mean of every column of shares."""
    return [percent(statistics.mean(column)) for column in zip(*lines, strict=True)]


def _averages(rows: list[Row]) -> str:
    lines = []
    for batch, own in by(rows, "batch").items():
        for which, some in of_paper(own).items():
            found = means(
                (
                    saved(r.framework_bytes, r.peak_bytes, r.resident_bytes),
                    saved(r.framework_bytes, r.peak_bytes),
                    saved(r.framework_bytes, r.bound_bytes),
                    fragmentation(r.own),
                    saved(r.own["reserved_bytes"], r.best["arena_reserved_bytes"]),
                )
                for r in some
            )
            papers = (PAPER_REORDERED, PAPER_FRAGMENTATION, PAPER_WITH_ADDRESSES)
            known = [percent(one[batch]) if batch in one else "" for one in papers]
            cells = (*found[:3], known[0], found[3], known[1], found[4], known[2])
            lines.append((batch, which, *cells))
    return table(
        "batch | models | saved by order: without resident bytes | of all | bound, of all | paper "
        "| allocator's fragmentation | paper | saved by order and addresses, of all | paper",
        lines,
    )


def _runtime(rows: list[Row]) -> str:
    lines, minutes = [], []
    for row in rows:
        asked, written = row.allocator_s
        planned_s = row.order_s + row.best["cpu_s"]
        assert asked is not None
        minutes.append((PAPER_STEPS * asked - planned_s) / 60)
        lines.append(
            f"{row.name} | {row.requests} | {1e6 * asked:.0f} | "
            f"{'' if written is None else f'{1e3 * written:.0f}'} | {planned_s:.2f} | "
            f"{minutes[-1]:.0f}"
        )
    head = (
        "step, batch 32 | requests | µs for them | ms, with first writes | planning, CPU s | "
        "minutes saved in a million steps"
    )
    mean = f"{statistics.mean(minutes):.0f} (the paper's {PAPER_MINUTES})" if minutes else ""
    return joined(f"Mean: {mean} minutes saved.", table(head, lines))


def summary(rows: list[Row]) -> list[str]:
    """Say what the paper says of orders and addresses."""
    order_s = [row.order_s for row in rows]
    place_s = [p["cpu_s"] for row in rows for p in (row.own, row.best)]
    close = sum(row.peak_bytes <= 1.01 * row.bound_bytes for row in rows)
    exact = sum(row.peak_bytes == row.bound_bytes for row in rows)
    return [
        f"Orders: {close} of {len(rows)} proved within 1% of optimal, {exact} optimal; CPU s: "
        f"median {statistics.median(order_s):.2f} (the paper's 1.4), most {max(order_s):.2f}.",
        "None is worse than the framework's with early updates.",
        f"Addresses: no fragmentation (extent = bound) on "
        f"{sum(gap(row.own) == 0 for row in rows)} of {len(rows)} original and "
        f"{sum(gap(row.best) == 0 for row in rows)} of {len(rows)} best orders, largest gap "
        f"{percent(max(max(gap(r.own), gap(r.best)) for r in rows), 2)}; CPU s: median "
        f"{statistics.median(place_s):.2f} (the paper's 5.7), most {max(place_s):.2f}.",
    ]


def _blocks(rows: list[Row], _: Any) -> dict[str, str]:
    first = [row for row in rows if row.name in NAMES]
    others = [row for row in rows if row.name not in NAMES]
    order = (
        "step | operators | framework | early updates | best | bound | gap | CPU s | saved | "
        "saved, of all"
    )
    placement = (
        "step | own order: gap | CPU s | best order: gap | CPU s | allocator's fragmentation: own "
        "order | best order | reserved MiB: own order | best order, addresses | saved"
    )
    return {
        "order": joined(
            table(order, map(_order_line, first)),
            "More models of the paper:" if others else "",
            table(order, map(_order_line, others)) if others else "",
            "\n".join(summary(first)) if first else "",
        ),
        "addresses": table(placement, map(_placement_line, rows)),
        "averages": _averages(rows),
        "runtime": _runtime([row for row in rows if row.batch == PAPER_BATCH]),
    }


def curves(rows: list[Row], given: Any) -> None:
    """Draw what the searches have found after so many seconds (the paper's figures 10 and 12): the
    share of the framework's peak, without resident bytes, that the best order so far saves, and
    (extent - bound) / extent of the best addresses so far of the framework's order."""
    page: Path = given.out
    with panels(page.with_name(f"{page.stem}_order.png"), legend="outside right center") as (axes,):
        for row in sorted(rows, key=_share, reverse=True)[:SHOWN]:
            start, moving = row.framework_bytes, row.framework_bytes - row.resident_bytes
            points = [(t, 100 * (start - peak) / moving) for t, peak, _ in row.trace]
            color = _curve(axes, row, [(START_S, 0.0), *points], "saved by the order so far, %")
            axes.axhline(100 * _share(row), color=color, linewidth=0.5, linestyle=":")
    path = page.with_name(f"{page.stem}_addresses.png")
    with panels(path, legend="outside right center") as (axes,):
        for row in sorted(rows, key=lambda r: -r.own["cpu_s"])[:SHOWN]:
            points = [(t, 100 * (1 - bound / extent)) for t, extent, bound in row.own["trace"]]
            _curve(axes, row, points, "fragmentation of the addresses so far, %")
        axes.set_yscale("symlog", linthresh=0.1)
        axes.set_ylim(bottom=0)


def _share(row: Row) -> float:
    """Give what any order could save at most."""
    return (row.framework_bytes - row.bound_bytes) / (row.framework_bytes - row.resident_bytes)


def _curve(axes: Axes, row: Row, points: list[tuple[float, float]], label: str) -> Any:
    """Draw a curve, every improvement marked; its colour."""
    x, y = [max(START_S, t) for t, _ in points], [value for _, value in points]
    name = f"{row.name} b{row.batch}"
    (line,) = axes.step(x, y, where="post", marker="o", markersize=3, label=name)
    axes.set(xlabel="seconds", ylabel=label, xscale="log")
    return line.get_color()


BENCHMARK = Benchmark(
    page="docs/results/olla.md",
    row=Row,
    cases=crossed(MODELS, BATCHES),
    measure=_planned,
    blocks=_blocks,
    prepare=warm_up,
    pictures=curves,
)
