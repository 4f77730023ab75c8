"""Llama 3 on clusters that are not there, planned within a GPU's memory: docs/results/cluster.md.

Sequences of 8,192 tokens, AdamW, parameters gathered in bfloat16, gradients averaged in float32,
eager's kernels. The step is one rank's, through the fake process group, its model on `meta`,
sharded by `memopt.shard`, and Rotor plans it. Beside it stands torchtitan's step of the same graph
(`published_step`), by the same costs; what torchtitan has published of such steps is among the
rows of `published_steps`. Each row runs in a process of its own, whose planning time and highest
resident size it reports. `--layers` makes the models shallower, to try the script.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import memopt
from benchmarks.published import measurements
from benchmarks.published.decoder import Decoder, Style, sharded
from benchmarks.published.meshes import DEVICES, published_step
from benchmarks.runner import Benchmark, Line
from benchmarks.steps import timed
from benchmarks.table import gib
from memopt.models.graph import TensorKind
from memopt.programs.replay import replay

SEQUENCE = 8192
LIMIT_S, LIMIT_BYTES = 600.0, 16 * 2**30
UPDATE_BYTES = 92
"""What clipping and a step of torch's AdamW (`foreach`, its default) read and write for each
parameter, in float32: the norm of gradients 4 and their scaling 8; weight decay 8, the first moment
12, the second's decay 8 and sum 12, its root, the root's division and addition 8 each, the change
16."""


@dataclass(frozen=True)
class Step:
    """One shape of Llama 3 on one cluster, 8 GPUs in a node.

    Attributes:
        batch: sequences of a rank.
        recompute: of torchtitan's step, "selective" or "full".
        budget: that torchtitan has published; None: the device's capacity.
    """

    model: str
    ranks: int
    gpu: str
    batch: int = 1
    recompute: str = "full"
    budget: str | None = None


STEPS = (
    Step("8b", 8, "H100-96GB-500W", 2, "selective", "82.4GiB"),
    Step("8b", 128, "H100-96GB-500W", 2, "selective", "67GiB"),
    Step("8b", 512, "H100-96GB-500W", 2, "selective"),
    Step("70b", 64, "A100-80GB"),
    Step("70b", 512, "H100-96GB-500W"),
    Step("405b", 512, "H100-96GB-500W"),
)


def _measured(given: Any, step: Step) -> list[Line]:
    shape, device = measurements().models[f"llama-3-{step.model}"], DEVICES[step.gpu]

    def build(mesh: DeviceMesh) -> nn.Module:
        layers = given.layers or shape["layers"]
        with torch.device("meta"):
            model = Decoder(shape, Style(), layers, SEQUENCE, first=True)
        return sharded(model, mesh)

    ids = torch.zeros(step.batch, SEQUENCE, dtype=torch.int64, device="meta")
    how = {"mode": "estimate", "device": device, "optimizer": "adamw", "progress": False}
    within = {"strategy": "rotor", "budget": step.budget, "mesh": memopt.Mesh(data=step.ranks)}
    plan, wall_s, cpu_s = timed(lambda: memopt.plan(build, (ids, ids), **within, **how))
    host_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    sizes = (t.size_bytes for t in plan.graph.tensors if t.kind is TensorKind.PARAMETER)
    moved_bytes = UPDATE_BYTES * sum(sizes) / 4
    update_s = moved_bytes / (device.memory_bytes_per_s * device.memory_fraction)
    theirs = published_step(plan.graph, device, step.recompute)
    time_s = plan.step_time_s + update_s
    their_s = replay(plan.graph, theirs, device).time_s + update_s
    cells = (
        *(step.model, f"{step.ranks} {step.gpu}", f"{gib(plan.budget or 0)} GiB"),
        *(f"{gib(plan.peak_bytes)} GiB", f"{gib(plan.baseline.peak_bytes)} GiB"),
        *(f"{gib(plan.resident_bytes)} GiB", f"{time_s:.2f} s"),
        *(f"{plan.stats['network_s']:.2f} s", f"{plan.stats['network_hidden']:.0%}"),
        *(f"{step.batch * SEQUENCE / time_s:,.0f}", f"{their_s / time_s:.2f}"),
        *(f"{wall_s:.0f} s", f"{cpu_s:.0f} s", f"{gib(host_bytes)} GiB"),
    )
    beyond = cpu_s > LIMIT_S or host_bytes > LIMIT_BYTES
    return [Line(" | ".join(cells), f"{step}: beyond {LIMIT_S:.0f} s or 16 GiB" * beyond)]


BENCHMARK = Benchmark(
    cases={f"{step.model} {step.ranks} {step.gpu}": (step,) for step in STEPS},
    measure=_measured,
    head="model | GPUs | budget | peak | as it is | never moves | step | network | of it hidden | "
    "tokens/s per GPU | beside torchtitan's step | planning | processor | host memory",
    options={"layers": int},
    apart=True,
)
