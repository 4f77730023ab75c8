"""OLLA's tables and curves (§5.3 to §5.7) on whole training steps of full size.

    python -m benchmarks.olla_tables [--folder FOLDER] [--resume FILE] [--fresh]
        [--report] [--batches 1 32] [--measure-gib 0] [--out docs/results/olla.md] [NAME ...]

Captured steps (benchmarks.olla_graphs) are kept in FOLDER and finished rows in FILE, so a run cut
short goes on where it was. Small models' steps, and full ones of at most so many GiB, are also run
here, PyTorch's and the planned one. Beside the page two figures are written.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path

from benchmarks.kept import Kept
from benchmarks.olla_curves import fragmentation_curves, saving_curves
from benchmarks.olla_graphs import DEVICE, NAMES, PAPER_NAMES
from benchmarks.olla_rows import (
    SMALL,
    TIME_LIMIT_S,
    MeasuredRow,
    Row,
    measured_row,
    row_of,
    warm_up,
)
from tests import zoo

MIB, GIB = 2**20, 2**30
PAPER_REORDERED = {1: 0.225, 32: 0.101}
"""OLLA §5.3."""
PAPER_WITH_ADDRESSES = {1: 0.304, 32: 0.361}
"""OLLA §5.7."""
PAPER_FRAGMENTATION = {1: 0.079, 32: 0.261}
"""OLLA §5.4."""
FAMILIES_SHARED = (
    "resnet50", "vgg16", "googlenet", "mobilenet_v2", "efficientnet_b0", "vit_b_16", "r3d_18",
    "alexnet", "mnasnet", "xlm_r_large",
)  # fmt: skip
"""Models of the paper's experiments that the tables have (ResNet-50 for its ResNet)."""


def saved(before: int, after: int, aside: int = 0) -> float:
    """The share of `before` that `after` saves, without what both have `aside`."""
    return 1 - (after - aside) / (before - aside)


def percent(share: float, digits: int = 1) -> str:
    """Of a share, without a minus sign before zero."""
    return f"{round(100 * share, digits) + 0.0:.{digits}f}%"


def gap(placed: dict[str, float]) -> float:
    """Of a placement, to its bound."""
    return placed["arena_bytes"] / placed["bound_bytes"] - 1


def fragmentation(placed: dict[str, float]) -> float:
    """(reserved - allocated) / reserved, of the caching allocator (OLLA §5.4)."""
    return 1 - placed["allocated_bytes"] / placed["reserved_bytes"]


def order_table(rows: Iterable[Row]) -> list[str]:
    """The orders: peaks in MiB without resident bytes."""
    lines = [
        "| step | operators | framework | early updates | best | bound | gap | CPU s | saved | "
        "saved, of all |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        mib = [
            f"{(x - row.resident_bytes) / MIB:.1f}"
            for x in (row.framework_bytes, row.early_bytes, row.peak_bytes, row.bound_bytes)
        ]
        lines.append(
            f"| {row.name} b{row.batch} | {row.operators} | {' | '.join(mib)} | "
            f"{percent(row.peak_bytes / row.bound_bytes - 1, 3)} | {row.order_s:.2f} | "
            f"{percent(saved(row.framework_bytes, row.peak_bytes, row.resident_bytes))} | "
            f"{percent(saved(row.framework_bytes, row.peak_bytes))} |"
        )
    return lines


def placement_table(rows: Iterable[Row]) -> list[str]:
    """The addresses, and the caching allocator on the same orders."""
    lines = [
        "| step | own order: gap | CPU s | best order: gap | CPU s | allocator's fragmentation: "
        "own order | best order | reserved MiB: own order | best order, addresses | saved |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        own, best = row.own, row.best
        lines.append(
            f"| {row.name} b{row.batch} | {percent(gap(own), 4)} | {own['cpu_s']:.2f} | "
            f"{percent(gap(best), 4)} | {best['cpu_s']:.2f} | {percent(fragmentation(own))} | "
            f"{percent(fragmentation(best))} | {own['reserved_bytes'] / MIB:.0f} | "
            f"{best['arena_reserved_bytes'] / MIB:.0f} | "
            f"{percent(saved(own['reserved_bytes'], best['arena_reserved_bytes']))} |"
        )
    return lines


def measured_table(rows: Iterable[MeasuredRow]) -> list[str]:
    """Steps that ran here: peaks in MiB without resident bytes."""
    lines = [
        "| step | eager, measured | planned | planned step, measured | saved, measured | "
        "saved at the bound |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        figures = (row.eager_bytes, row.planned_bytes, row.step_bytes)
        mib = [f"{(x - row.resident_bytes) / MIB:.2f}" for x in figures]
        lines.append(
            f"| {row.name} b{row.batch}, {row.size} | {' | '.join(mib)} | "
            f"{percent(saved(row.eager_bytes, row.step_bytes, row.resident_bytes))} | "
            f"{percent(saved(row.eager_bytes, row.order_bound_bytes, row.resident_bytes))} |"
        )
    return lines


def means_measured(rows: list[MeasuredRow]) -> list[str]:
    """The mean shares of eager's measured peaks that are saved, by size and batch."""
    lines = [
        "| steps | models | saved, measured | at the bound | paper | of all, measured | "
        "at the bound |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    groups = [
        (which, size, batch, names)
        for size, batch in dict.fromkeys((row.size, row.batch) for row in rows)
        for which, names in (("all", None), ("the paper's", FAMILIES_SHARED))
        if size == "paper" or names is None
    ]
    for which, size, batch, names in groups:
        some = [
            row
            for row in rows
            if (row.size, row.batch) == (size, batch) and (names is None or row.name in names)
        ]
        if not some:
            continue
        means = [
            percent(
                statistics.mean(
                    saved(r.eager_bytes, getattr(r, peak), aside * r.resident_bytes) for r in some
                )
            )
            for aside in (1, 0)
            for peak in ("step_bytes", "order_bound_bytes")
        ]
        known = size == "paper" and batch in PAPER_REORDERED
        means.insert(2, percent(PAPER_REORDERED[batch]) if known else "")
        lines.append(f"| {size}, batch {batch} | {which}, {len(some)} | {' | '.join(means)} |")
    return lines


def not_measured(rows: list[Row], measured: list[MeasuredRow]) -> str:
    """The steps of published size that did not run here, with what eager's would need."""
    done = {(row.name, row.batch) for row in measured if row.size == "paper"}
    parts = [
        f"{row.name} b{row.batch} ({row.framework_bytes / GIB:.1f})"
        for row in rows
        if (row.name, row.batch) not in done
    ]
    return (
        f"Of published size, not run here for memory or time (GiB of their peaks by liveness): "
        f"{', '.join(parts)}."
        if parts
        else ""
    )


def averages(rows: list[Row]) -> list[str]:
    """Mean savings beside the paper's."""
    lines = [
        "| batch | models | saved by order: without resident bytes | of all | bound, of all | "
        "paper | allocator's fragmentation | paper | saved by order and addresses, of all | "
        "paper |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for batch in dict.fromkeys(row.batch for row in rows):
        for which, names in (("all", None), ("the paper's", FAMILIES_SHARED)):
            some = [r for r in rows if r.batch == batch and (names is None or r.name in names)]
            if not some:
                continue
            mean = [
                statistics.mean(values)
                for values in zip(
                    *(
                        (
                            saved(r.framework_bytes, r.peak_bytes, r.resident_bytes),
                            saved(r.framework_bytes, r.peak_bytes),
                            saved(r.framework_bytes, r.bound_bytes),
                            fragmentation(r.own),
                            saved(r.own["reserved_bytes"], r.best["arena_reserved_bytes"]),
                        )
                        for r in some
                    ),
                    strict=True,
                )
            ]
            papers = [
                percent(known[batch]) if batch in known else ""
                for known in (PAPER_REORDERED, PAPER_FRAGMENTATION, PAPER_WITH_ADDRESSES)
            ]
            lines.append(
                f"| {batch} | {which}, {len(some)} | {percent(mean[0])} | {percent(mean[1])} | "
                f"{percent(mean[2])} | {papers[0]} | {percent(mean[3])} | {papers[1]} | "
                f"{percent(mean[4])} | {papers[2]} |"
            )
    return lines


def summary(rows: list[Row]) -> list[str]:
    """What issue and paper ask of orders and addresses, in sentences."""
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


def page(rows: list[Row], measured: list[MeasuredRow], stem: str) -> str:
    """The whole page."""
    first = [row for row in rows if row.name in NAMES]
    others = [row for row in rows if row.name not in NAMES]
    parts = [
        "# OLLA: orders and addresses of whole steps",
        "`python -m benchmarks.olla_tables --out docs/results/olla.md`: forward, loss, backward "
        "and one in-place update (plain SGD) of every parameter, models of published size "
        f"(images 224 pixels, text 512 tokens), captured under fake tensors and priced for an "
        f"{DEVICE}; blocks of 512 bytes. One thread of a shared machine, so CPU seconds; limit "
        f"{TIME_LIMIT_S:.0f} s of wall clock each. See [the strategy](../strategies/olla.md).",
        "## Order",
        "Peaks in MiB without resident bytes, by liveness. The framework's order has all updates "
        "at the end, as eager does, and computes in place wherever that is possible, which is more "
        "often than eager does; its liveness stands for eager's peak here, see below for measured "
        "ones. Saved: of the framework's peak, without and with resident bytes.",
        "\n".join(order_table(first)),
    ]
    if others:
        parts += ["More models of the paper:", "\n".join(order_table(others))]
    parts += [
        "\n".join(summary(first)) if first else "",
        "## Addresses and the caching allocator",
        "Gap: extent of all addresses over the most bytes live at once. The CUDA caching allocator "
        "is replayed (`memopt.programs.allocator_requests`): what it would reserve for an order's "
        "allocations, resident tensors included, and with all addresses in one allocation. "
        "Saved: of what it would reserve for the framework's order.",
        "\n".join(placement_table(rows)),
        "## Beside the paper",
        "Means of the tables above. The paper's are against PyTorch 1.11's order of 2022 and its "
        'allocator on an A100. "Bound" is what the best order could save at most.',
        "\n".join(averages(rows)),
    ]
    if measured:
        parts += [
            "## Measured",
            "Steps that ran here on the CPU: PyTorch's own (forward, loss, backward, "
            "`optimizer.step()`, `zero_grad()`) and OLLA's order with measured workspaces. Paper: "
            "models of published size, as above (`--measure-gib`); tiny: narrow models on small "
            "inputs, as the tests run them. MiB without resident bytes. The CPU's kernels need "
            "other workspaces than the priced GPU's, and save other tensors.",
            "Means, without resident bytes and of all:",
            "\n".join(means_measured(measured)),
            not_measured(rows, measured),
            "\n".join(measured_table(measured)),
        ]
    parts += [
        "## Over time",
        "As the paper's figures 10 and 12, by wall clock: the share saved by the order found so "
        "far (dotted: the bound), of the steps where most can be saved; and the fragmentation of "
        "the addresses found so far for the framework's order, of those that take longest.",
        f"![Saved over time]({stem}_order.png)",
        f"![Fragmentation over time]({stem}_addresses.png)",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    """Print the page; write it and its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=(*NAMES, *PAPER_NAMES))
    parser.add_argument("--batches", nargs="*", type=int, default=(1, 32))
    parser.add_argument("--folder", type=Path, default=Path("out/olla-graphs"))
    parser.add_argument("--resume", type=Path, default=Path("out/olla-tables.json"))
    parser.add_argument("--report", action="store_true", help="only write what is kept")
    parser.add_argument("--fresh", action="store_true", help="drop the rows kept in FILE")
    parser.add_argument("--measure-gib", type=float, default=0.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    settings = {"device": DEVICE, "time_limit_s": TIME_LIMIT_S}
    kept = Kept(options.resume, Row, settings, fresh=options.fresh)
    runs_path = options.resume.with_stem(f"{options.resume.stem}-measured")
    runs = Kept(runs_path, MeasuredRow, {}, fresh=options.fresh)
    cases = {
        f"{name} b{batch}": (name, batch) for name in options.names for batch in options.batches
    }
    if not options.report:
        warm_up()
    for case in () if options.report else kept.missing(cases, _note):
        kept.add(case, [row_of(*cases[case], options.folder)])
        _note(f"{case}: planned")
    limit_bytes = options.measure_gib * GIB
    steps: dict[str, tuple[str, int, zoo.Size]] = {
        f"{name}, small": (name, *SMALL) for name in options.names if name in NAMES
    }
    steps |= {
        f"{row.name} b{row.batch}": (row.name, row.batch, "paper")
        for row in kept.ordered(cases)
        if row.framework_bytes <= limit_bytes
    }
    for case in () if options.report else runs.missing(steps, _note):
        runs.add(case, [measured_row(*steps[case])])
        gc.collect()
        _note(f"{case}: measured")
    rows = kept.ordered(cases)
    stem = options.out.stem if options.out is not None else "olla"
    text = page(rows, runs.ordered(steps), stem)
    sys.stdout.write(text)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text, encoding="utf-8")
        saving_curves(rows, options.out.with_name(f"{stem}_order.png"))
        fragmentation_curves(rows, options.out.with_name(f"{stem}_addresses.png"))


def _note(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
