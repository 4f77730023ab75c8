"""Llama on clusters that are not there, beside published figures: docs/results/cluster.md.

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
try the script.

The rates of torchtitan's H100s are those of torchao's roofline of "Meta's H100 variant" (2.4 TB/s):
92% of the memory bandwidth, and of 989 tera-operations per second 60% at the commit that the report
names (torchao/float8/roofline_utils.py at eab345c), 78% since March 2025 (d8af7d7). The first, of
whole steps, holds for the rows; what the second gives, of products alone, is a row of its own.
"""

from __future__ import annotations

import resource
import time
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import memopt
from benchmarks.cluster_llama import SHAPES, Llama, published_step
from benchmarks.runner import Benchmark
from benchmarks.table import gib, table
from memopt.models.graph import TensorKind
from memopt.models.presets import find_device
from memopt.programs.allocator_requests import reserved_by
from memopt.programs.replay import replay

SEQUENCE = 8192
UNLIMITED = "1000TiB"
LIMIT_S, LIMIT_BYTES = 600.0, 16 * 2**30
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
    product_exposure=0.0,
    source="torchtitan's description of its machines; shares of the rates as in torchao's roofline",
)
GRAND_TETON_2025 = replace(
    GRAND_TETON,
    name="H100-96GB-500W at 78%",
    flops_fraction=0.78,
    product_exposure=find_device("H100").product_exposure,
)


@dataclass(frozen=True)
class Step:
    """One model of SHAPES on one cluster, 8 GPUs in a node.

    Attributes:
        batch: sequences of a rank.
        published, published_gib: tokens per second and GPU, and memory that the allocator reserved,
            by torchtitan; the memory is the budget, where it is known.
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
STEPS = {
    row.name: row
    for row in (
        Step("8B", 8, 2, GRAND_TETON, 5762, 82.4),
        Step("8B", 8, 2, GRAND_TETON_2025, 5762, 82.4),
        Step("8B", 128, 2, GRAND_TETON, 5605, 67.0),
        Step("8B", 512, 2, GRAND_TETON),
        Step("8B", 64, 1, A100, 2973, fused=True),
        Step("70B", 64, 1, A100, 331, selective=False),
        Step("70B", 64, 1, GRAND_TETON, selective=False),
        Step("70B", 256, 1, GRAND_TETON, selective=False),
        Step("70B", 512, 1, GRAND_TETON, selective=False),
        Step("405B", 512, 1, GRAND_TETON, selective=False),
    )
}


@dataclass(frozen=True)
class Row:
    """A step's lines of both tables; "": it is not in that one. What is beyond the limits."""

    published: str
    planned: str
    failed: str


def figures(row: Step, plan: memopt.Plan) -> dict[str, Any]:
    """Give what is said of the step that was published, and of a planned one."""
    graph, device = plan.graph, plan.device
    sizes = (t.size_bytes for t in graph.tensors if t.kind is TensorKind.PARAMETER)
    bandwidth = device.memory_bytes_per_s * device.memory_fraction
    update_s = UPDATE_BYTES * sum(sizes) / 4 / bandwidth
    published = published_step(graph, device, "selective" if row.selective else "full")
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


def _measured(given: Any, step: Step) -> list[Row]:
    depth, width, heads, inner = SHAPES[step.model]

    def build(mesh: DeviceMesh) -> nn.Module:
        with torch.device("meta"):
            layers = given.layers or depth
            model = Llama(layers, width, heads, inner, SEQUENCE, step.fused)
        return memopt.shard(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    ids = torch.zeros(step.batch, SEQUENCE, dtype=torch.int64, device="meta")
    budget = None if step.published_gib is None else f"{step.published_gib}GiB"
    within = {"strategy": "rotor", "budget": budget}
    if given.estimates:
        within = {"strategy": "store-all", "budget": UNLIMITED}
    begin = time.perf_counter(), time.process_time()
    refused, found = "", {}
    try:
        how = {"mode": "estimate", "device": step.device, "optimizer": "adamw", "progress": False}
        plan = memopt.plan(build, (ids, ids), mesh=memopt.Mesh(data=step.ranks), **within, **how)
        found = figures(step, plan)
    except memopt.InfeasibleBudgetError as error:
        refused = str(error)
    spent = time.perf_counter() - begin[0], time.process_time() - begin[1]
    host_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    cost = [f"{spent[0]:.0f} s", f"{spent[1]:.0f} s", f"{gib(host_bytes)} GiB"]
    beyond = spent[0] > LIMIT_S or host_bytes > LIMIT_BYTES
    published = " | ".join(_published_cells(step, found)) if found else ""
    planned = "" if given.estimates else " | ".join([*_planned_cells(step, found, refused), *cost])
    return [Row(published, planned, f"{step.name}: beyond {LIMIT_S:.0f} s or 16 GiB" * beyond)]


def _published_cells(step: Step, found: dict[str, float]) -> list[str]:
    rate, memory = step.batch * SEQUENCE / found["published_s"], found["published_reserved"]
    known, known_gib = step.published, step.published_gib
    memories, rates = [f"{gib(memory)} GiB", ""], [f"{rate:,.0f}", ""]
    if known_gib is not None:
        memories[1] = f"{memory / known_gib / 2**30 - 1:+.0%}"
    if known is not None:
        rates[1] = f"{rate / known - 1:+.0%}"
    return [
        *(step.model, f"{step.ranks} {step.device.name}", str(step.batch)),
        *("" if known_gib is None else f"{known_gib} GiB", *memories),
        *("" if known is None else f"{known:,.0f}", *rates),
    ]


def _planned_cells(step: Step, found: dict[str, float], refused: str) -> list[str]:
    where = [step.model, f"{step.ranks} {step.device.name}"]
    if refused:
        return [*where, refused, *[""] * 8]
    budget = step.published_gib or gib(step.device.capacity_bytes or 0)
    return [
        *(*where, f"{budget} GiB"),
        *(f"{gib(found[what])} GiB" for what in ("peak", "store_all", "resident")),
        *(f"{found['time_s']:.2f} s", f"{found['network_s']:.2f} s", f"{found['hidden']:.0%}"),
        f"{step.batch * SEQUENCE / found['time_s']:,.0f}",
        f"{found['published_s'] / found['time_s']:.2f}",
    ]


def _blocks(rows: list[Row], _: Any) -> dict[str, str]:
    published = table(
        "model | GPUs | sequences | reserved memory, published | estimated | deviation | "
        "tokens/s per GPU, published | estimated | deviation",
        [row.published for row in rows if row.published],
    )
    planned = table(
        "model | GPUs | budget | peak | as it is | never moves | step | network | of it hidden | "
        "tokens/s per GPU | beside torchtitan's step | planning | processor | host memory",
        [row.planned for row in rows if row.planned],
    )
    return {"published": published} | ({"planned": planned} if rows[0].planned else {})


BENCHMARK = Benchmark(
    row=Row,
    cases={name: (step,) for name, step in STEPS.items()},
    measure=_measured,
    blocks=_blocks,
    options={"layers": int, "estimates": False},
    apart=True,
)
