"""Llama on clusters that are not there, beside published figures: docs/results/cluster.md.

    python -m benchmarks.cluster [--out docs/results/cluster.md] [--rows NAME ...] [--layers N]

The published figures are torchtitan's (github.com/pytorch/torchtitan): H100 in
benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3 (FSDP2 without torch.compile), on H100s
with 96 GB of HBM2e (2.4 TB/s) at 500 W; A100 in an early docs/performance.md, 64 of them. Sequences
of 8,192 tokens, AdamW, parameters gathered in bfloat16, gradients averaged in float32, as there.

A rank is planned by Rotor through the fake process group, its model on `meta`, sharded by
`memopt.shard`: each row in a process of its own, whose planning time and highest resident size it
reports. The budget is the memory that was published; else the device's capacity. `--layers` makes
the models shallower, to try the script.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

import memopt
from memopt.models.presets import find_device

SEQUENCE, VOCABULARY = 8192, 128256
LIMIT_S, LIMIT_BYTES = 600.0, 16 * 2**30
BEGIN, END = "<!-- cluster: begin -->", "<!-- cluster: end -->"
SHAPES = {
    "8B": (32, 4096, 32, 14336),
    "70B": (80, 8192, 64, 28672),
    "405B": (126, 16384, 128, 53248),
}
"""Layers, width, heads (8 of keys and values), width within the feed-forward layers."""
GRAND_TETON = replace(
    find_device("H100"),
    name="H100-96GB-HBM2e",
    capacity_bytes=int(93.6 * 2**30),
    memory_bytes_per_s=2400e9,
    source="torchtitan's description of its machines; rates as of an H100 of 700 W",
)


@dataclass(frozen=True)
class Row:
    """One model on one cluster.

    Attributes:
        model: a name of SHAPES.
        ranks: GPUs, 8 in a node.
        batch: sequences of a rank.
        device: what they are.
        published: tokens per second and GPU, by torchtitan; None: nobody published one.
        published_gib: memory, likewise; the budget, where there is one.
    """

    model: str
    ranks: int
    batch: int
    device: memopt.Device
    published: float | None = None
    published_gib: float | None = None

    @property
    def name(self) -> str:
        """For the command line."""
        return f"{self.model}-{self.ranks}-{self.device.name.partition('-')[0]}"


A100 = find_device("A100")
ROWS = {
    row.name: row
    for row in (
        Row("8B", 8, 2, GRAND_TETON, 5762, 82.4),
        Row("8B", 128, 2, GRAND_TETON, 5605, 67.0),
        Row("8B", 512, 2, GRAND_TETON),
        Row("8B", 64, 1, A100, 2973),
        Row("70B", 64, 1, A100, 323),
        Row("70B", 64, 1, GRAND_TETON),
        Row("70B", 256, 1, GRAND_TETON),
        Row("70B", 512, 1, GRAND_TETON),
        Row("405B", 512, 1, GRAND_TETON),
    )
}


class Block(nn.Module):
    """A layer of Llama 3: grouped attention with rotary positions, and a gated feed-forward."""

    def __init__(self, width: int, heads: int, inner: int, groups: int = 8) -> None:
        super().__init__()
        self.head, self.repeats = width // heads, heads // groups
        narrow = groups * self.head
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        self.q, self.o = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, narrow, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (self._heads(part(y)) for part in (self.q, self.k, self.v))
        q, k = (_rotated(part, cosines, sines) for part in (q, k))
        k, v = (part.repeat_interleave(self.repeats, 1) for part in (k, v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(mixed.transpose(1, 2).flatten(2))
        y = self.between(x)
        added: Tensor = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return added

    def _heads(self, value: Tensor) -> Tensor:
        return value.unflatten(-1, (-1, self.head)).transpose(1, 2)


def _rotated(value: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    first, second = value.chunk(2, -1)
    return value * cosines + torch.cat((-second, first), -1) * sines


class Llama(nn.Module):
    """Llama 3 with its loss."""

    def __init__(self, layers: int, width: int, heads: int, inner: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.layers = nn.ModuleList(Block(width, heads, inner) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)
        for name in ("cosines", "sines"):
            angles = torch.zeros(SEQUENCE, width // heads, dtype=torch.bfloat16)
            self.register_buffer(name, angles)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x, self.cosines, self.sines)
        logits = self.head(self.norm(x)).flatten(0, 1).float()
        return functional.cross_entropy(logits, labels.flatten())


def planned(row: Row, layers: int | None) -> dict[str, Any]:
    """One row; in a process of its own."""
    depth, *widths = SHAPES[row.model]

    def build(mesh: DeviceMesh) -> nn.Module:
        with torch.device("meta"):
            model = Llama(layers or depth, *widths)
        return memopt.shard(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    ids = torch.zeros(row.batch, SEQUENCE, dtype=torch.int64, device="meta")
    found: dict[str, Any] = {}
    begin = time.perf_counter(), time.process_time()
    try:
        plan = memopt.plan(
            build,
            (ids, ids),
            mesh=memopt.Mesh(data=row.ranks),
            mode="estimate",
            device=row.device,
            optimizer="adamw",
            budget=None if row.published_gib is None else f"{row.published_gib}GiB",
            progress=False,
        )
        found = {
            "peak": plan.peak_bytes,
            "resident": plan.resident_bytes,
            "store_all": plan.baseline.peak_bytes,
            "time_s": plan.step_time_s,
            "rate": plan.stats["tokens_per_s_per_rank"],
            "network_s": plan.stats["network_s"],
            "hidden": plan.stats["network_hidden"],
        }
    except memopt.InfeasibleBudgetError as error:
        found = {"refused": str(error)}
    found["planning_s"] = time.perf_counter() - begin[0]
    found["planning_cpu_s"] = time.process_time() - begin[1]
    found["host_bytes"] = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return found


HEAD = (
    "model",
    "GPUs",
    "sequences",
    "memory, published",
    "planned peak",
    "of it never moves",
    "as it is",
    "step",
    "network",
    "of it hidden",
    "tokens/s per GPU",
    "published",
    "deviation",
    "planning",
    "host memory",
)


def gib(size_bytes: float) -> str:
    """GiB with one decimal."""
    return f"{size_bytes / 2**30:.1f} GiB"


def cells(row: Row, found: dict[str, Any]) -> list[str]:
    """The row of the table."""
    where = [row.model, f"{row.ranks} {row.device.name}", str(row.batch)]
    memory = "" if row.published_gib is None else f"{row.published_gib} GiB"
    cost = [f"{found['planning_s']:.0f} s", gib(found["host_bytes"])]
    if "refused" in found:
        return [*where, memory, found["refused"], *[""] * 8, *cost]
    rate, known = found["rate"], row.published
    return [
        *where,
        memory,
        gib(found["peak"]),
        gib(found["resident"]),
        gib(found["store_all"]),
        f"{found['time_s']:.2f} s",
        f"{found['network_s']:.2f} s",
        f"{found['hidden']:.0%}",
        f"{rate:,.0f}",
        "" if known is None else f"{known:,.0f}",
        "" if known is None else f"{rate / known - 1:+.0%}",
        *cost,
    ]


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += ["| " + " | ".join(cells(ROWS[name], row)) + " |" for name, row in found.items()]
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--rows", nargs="*", choices=ROWS, default=list(ROWS))
    parser.add_argument("--layers", type=int, help="fewer than the model has")
    parser.add_argument("--one", choices=ROWS, help="one row, as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(planned(ROWS[options.one], options.layers)))
        return
    found = {}
    for name in options.rows:
        command = [sys.executable, "-m", "benchmarks.cluster", "--one", name]
        command += ["--layers", str(options.layers)] if options.layers else []
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found[name] = json.loads(done.stdout.splitlines()[-1])
        print(" | ".join(cells(ROWS[name], found[name])), flush=True)
    for name, row in found.items():
        if row["planning_s"] > LIMIT_S or row["host_bytes"] > LIMIT_BYTES:
            print(f"{name}: beyond {LIMIT_S:.0f} s or {gib(LIMIT_BYTES)} of host memory")
    if options.out:
        page = options.out.read_text(encoding="utf-8")
        before, _, rest = page.partition(BEGIN)
        _, _, after = rest.partition(END)
        text = f"{before}{BEGIN}\n{table(found)}\n{END}{after}"
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
