"""Llama on clusters that are not there, beside published figures: docs/results/cluster.md.

    python -m benchmarks.cluster [--out docs/results/cluster.md] [--rows NAME ...] [--layers N]
                                 [--estimates] [--resume FILE.json]

The published figures are torchtitan's (github.com/pytorch/torchtitan): H100 in
benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 (FSDP2 without torch.compile), on H100s
with 96 GB of HBM2e (2.4 TB/s) at 500 W; A100 in docs/performance.md of April 2024 (commit
1ea476e), 64 of them. Sequences of 8,192 tokens, AdamW, parameters gathered in bfloat16, gradients
averaged in float32, as there; the model's operators are torchtitan's (`benchmarks.cluster_llama`).

Two steps are priced by one cost model: the one that was published (torchtitan's own checkpointing),
which its figures are beside, and the one that memopt plans with Rotor, within the memory that was
published, else the device's capacity. Both are one rank's, through the fake process group, its
model on `meta`, sharded by `memopt.shard`, and to both the optimizer's update is added. Each row
runs in a process of its own, whose planning time and highest resident size it reports.
`--estimates` prices the published steps and plans none; `--layers` makes the models shallower, to
try the script; `--resume` keeps finished rows.

The rates of torchtitan's H100s are those of torchao's roofline of "Meta's H100 variant" (2.4 TB/s):
92% of the memory bandwidth, and of 989 tera-operations per second 60% at the commit that the report
names (torchao/float8/roofline_utils.py at eab345c), 78% since March 2025 (d8af7d7). The first holds
for the rows; what the second gives is a row of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import memopt
from benchmarks.cluster_llama import SHAPES, Llama, published_step
from benchmarks.kept import Kept
from memopt.models.graph import TensorKind
from memopt.models.presets import find_device
from memopt.programs.allocator_requests import reserved_by
from memopt.programs.replay import replay

SEQUENCE = 8192
UNLIMITED = "1000TiB"
LIMIT_S, LIMIT_BYTES = 600.0, 16 * 2**30
BEGIN, END = "<!-- {}: begin -->", "<!-- {}: end -->"
UPDATE_BYTES = 92
"""What clipping and a step of torch's AdamW (`foreach`, its default) read and write for each
parameter, in float32: the norm of gradients 4 and their scaling 8; weight decay 8, the first moment
12, the second's decay 8 and sum 12, its root, the root's division and addition 8 each, the change
16."""
GRAND_TETON = replace(
    find_device("H100"),
    name="H100-96GB-500W",
    capacity_bytes=int(93.6 * 2**30),
    memory_bytes_per_s=2400e9,
    flops_fraction=0.60,
    memory_fraction=0.92,
    source="torchtitan's description of its machines; shares of the rates as in torchao's roofline",
)
GRAND_TETON_2025 = replace(GRAND_TETON, name="H100-96GB-500W at 78%", flops_fraction=0.78)


@dataclass(frozen=True)
class Row:
    """One model on one cluster.

    Attributes:
        model: a name of SHAPES.
        ranks: GPUs, 8 in a node.
        batch: sequences of a rank.
        device: what they are.
        published: tokens per second and GPU, by torchtitan; None: nobody published one.
        published_gib: memory that the allocator reserved, likewise; the budget, where there is one.
        selective: the published step's checkpointing; else full.
        fused: its norms, see `cluster_llama.Block`.
    """

    model: str
    ranks: int
    batch: int
    device: memopt.Device
    published: float | None = None
    published_gib: float | None = None
    selective: bool = True
    fused: bool = False

    @property
    def name(self) -> str:
        """For the command line."""
        share = self.device.name.partition(" at ")[2].rstrip("%")
        parts = (self.model, str(self.ranks), self.device.name.partition("-")[0], share)
        return "-".join(filter(None, parts))


A100 = find_device("A100")
ROWS = {
    row.name: row
    for row in (
        Row("8B", 8, 2, GRAND_TETON, 5762, 82.4),
        Row("8B", 8, 2, GRAND_TETON_2025, 5762, 82.4),
        Row("8B", 128, 2, GRAND_TETON, 5605, 67.0),
        Row("8B", 512, 2, GRAND_TETON),
        Row("8B", 64, 1, A100, 2973, fused=True),
        Row("70B", 64, 1, A100, 331, selective=False),
        Row("70B", 64, 1, GRAND_TETON, selective=False),
        Row("70B", 256, 1, GRAND_TETON, selective=False),
        Row("70B", 512, 1, GRAND_TETON, selective=False),
        Row("405B", 512, 1, GRAND_TETON, selective=False),
    )
}


@dataclass(frozen=True)
class Found:
    """What a finished row came to, by its name."""

    name: str
    figures: dict[str, Any]


def figures(row: Row, plan: memopt.Plan) -> dict[str, Any]:
    """What is said of the step that was published, and of a planned row."""
    graph, device = plan.graph, plan.device
    sizes = (t.size_bytes for t in graph.tensors if t.kind is TensorKind.PARAMETER)
    bandwidth = device.memory_bytes_per_s * device.memory_fraction
    update_s = UPDATE_BYTES * sum(sizes) / 4 / bandwidth
    published = published_step(graph, device, row.selective)
    return {
        "published_s": replay(graph, published, device).time_s + update_s,
        "published_reserved": reserved_by(graph, published).reserved_peak_bytes,
        "peak": plan.peak_bytes,
        "resident": plan.resident_bytes,
        "store_all": plan.baseline.peak_bytes,
        "time_s": plan.step_time_s + update_s,
        "network_s": plan.stats["network_s"],
        "hidden": plan.stats["network_hidden"],
    }


def measured(row: Row, layers: int | None, estimate: bool) -> dict[str, Any]:
    """One row; in a process of its own.

    Args:
        row: which.
        layers: fewer than the model has; None: all.
        estimate: price the published step alone: nothing is planned but the step as it is.
    """
    depth, width, heads, inner = SHAPES[row.model]

    def build(mesh: DeviceMesh) -> nn.Module:
        with torch.device("meta"):
            model = Llama(layers or depth, width, heads, inner, SEQUENCE, row.fused)
        return memopt.shard(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    ids = torch.zeros(row.batch, SEQUENCE, dtype=torch.int64, device="meta")
    budget = None if row.published_gib is None else f"{row.published_gib}GiB"
    begin = time.perf_counter(), time.process_time()
    try:
        plan = memopt.plan(
            build,
            (ids, ids),
            mesh=memopt.Mesh(data=row.ranks),
            mode="estimate",
            device=row.device,
            optimizer="adamw",
            strategy="store-all" if estimate else "rotor",
            budget=UNLIMITED if estimate else budget,
            progress=False,
        )
    except memopt.InfeasibleBudgetError as error:
        found: dict[str, Any] = {"refused": str(error)}
    else:
        found = figures(row, plan)
    found["planned"] = not estimate
    found["planning_s"] = time.perf_counter() - begin[0]
    found["planning_cpu_s"] = time.process_time() - begin[1]
    found["host_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


PUBLISHED_HEAD = (
    "model",
    "GPUs",
    "sequences",
    "reserved memory, published",
    "estimated",
    "deviation",
    "tokens/s per GPU, published",
    "estimated",
    "deviation",
)
PLANNED_HEAD = (
    "model",
    "GPUs",
    "budget",
    "peak",
    "as it is",
    "never moves",
    "step",
    "network",
    "of it hidden",
    "tokens/s per GPU",
    "beside torchtitan's step",
    "planning",
    "processor",
    "host memory",
)


def gib(size_bytes: float) -> str:
    """GiB with one decimal."""
    return f"{size_bytes / 2**30:.1f} GiB"


def where(row: Row) -> list[str]:
    """The cells that name a row."""
    return [row.model, f"{row.ranks} {row.device.name}"]


def published_cells(row: Row, found: dict[str, Any]) -> list[str]:
    """The row of the published step, estimated."""
    rate, memory = row.batch * SEQUENCE / found["published_s"], found["published_reserved"]
    known, known_gib = row.published, row.published_gib
    return [
        *where(row),
        str(row.batch),
        "" if known_gib is None else f"{known_gib} GiB",
        gib(memory),
        "" if known_gib is None else f"{memory / known_gib / 2**30 - 1:+.0%}",
        "" if known is None else f"{known:,.0f}",
        f"{rate:,.0f}",
        "" if known is None else f"{rate / known - 1:+.0%}",
    ]


def planned_cells(row: Row, found: dict[str, Any]) -> list[str]:
    """The row of the planned step."""
    cost = [f"{found['planning_s']:.0f} s", f"{found['planning_cpu_s']:.0f} s"]
    cost.append(gib(found["host_bytes"]))
    if "refused" in found:
        return [*where(row), found["refused"], *[""] * 8, *cost]
    capacity = gib(row.device.capacity_bytes or 0)
    return [
        *where(row),
        capacity if row.published_gib is None else f"{row.published_gib} GiB",
        gib(found["peak"]),
        gib(found["store_all"]),
        gib(found["resident"]),
        f"{found['time_s']:.2f} s",
        f"{found['network_s']:.2f} s",
        f"{found['hidden']:.0%}",
        f"{row.batch * SEQUENCE / found['time_s']:,.0f}",
        f"{found['published_s'] / found['time_s']:.2f}",
        *cost,
    ]


def table(head: tuple[str, ...], rows: Iterable[list[str]]) -> str:
    """Markdown."""
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def tables(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Both tables, by the names of their places on the page; without those that have no rows."""
    published = [published_cells(ROWS[name], x) for name, x in found.items() if "refused" not in x]
    planned = [planned_cells(ROWS[name], x) for name, x in found.items() if x["planned"]]
    made = {"published": (PUBLISHED_HEAD, published), "planned": (PLANNED_HEAD, planned)}
    return {name: table(head, rows) for name, (head, rows) in made.items() if rows}


def rows(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The wanted rows, each measured in a process of its own or kept from an earlier run."""
    with tempfile.TemporaryDirectory() as folder:
        path = options.resume or Path(folder, "rows.json")
        settings = {name: getattr(options, name) for name in ("layers", "estimates")}
        kept = Kept(path, Found, {**settings, "torch": torch.__version__})
        for name in kept.missing(options.rows, print):
            command = [sys.executable, "-m", "benchmarks.cluster", "--one", name]
            command += ["--layers", str(options.layers)] if options.layers else []
            command += ["--estimates"] if options.estimates else []
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            kept.add(name, [Found(name, json.loads(done.stdout.splitlines()[-1]))])
            print("\n\n".join(tables({name: kept.rows[name][0].figures}).values()), flush=True)
        return {one.name: one.figures for one in kept.ordered(options.rows)}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--one", choices=ROWS, help="one row, as JSON")
    parser.add_argument("--estimates", action="store_true", help="plan nothing")
    parser.add_argument("--resume", type=Path, help="where finished rows are kept (JSON)")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(ROWS[options.one], options.layers, options.estimates)))
        return
    found = rows(options)
    for name, row in found.items():
        if row["planning_s"] > LIMIT_S or row["host_bytes"] > LIMIT_BYTES:
            print(f"{name}: beyond {LIMIT_S:.0f} s or {gib(LIMIT_BYTES)} of host memory")
    if options.out:
        page = options.out.read_text(encoding="utf-8")
        for name, text in tables(found).items():
            before, _, rest = page.partition(BEGIN.format(name))
            _, _, after = rest.partition(END.format(name))
            page = f"{before}{BEGIN.format(name)}\n{text}\n{END.format(name)}{after}"
        options.out.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
