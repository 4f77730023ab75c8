"""torchtitan's step, as the benchmark of clusters prices it: valid, and what runs again in it."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import memopt
from benchmarks.published.decoder import Decoder, Style
from benchmarks.published.meshes import published_step
from memopt.programs.instructions import Program
from memopt.programs.liveness import store_all
from memopt.programs.replay import replay
from memopt.programs.validate import validate

LAYERS, TOKENS = 3, 32
SHAPE = {
    "hidden": 64,
    "heads": 8,
    "kv_heads": 8,
    "ffn": 128,
    "vocabulary": 256,
    "gated": True,
    "norm": "layer",
    "positions": "rope",
}


def build(mesh: DeviceMesh) -> nn.Module:
    with torch.device("meta"):
        model = Decoder(SHAPE, Style(), LAYERS, TOKENS, first=True)
    return memopt.shard(model, mesh, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.slow
def test_what_runs_again() -> None:
    ids = torch.zeros(2, TOKENS, dtype=torch.int64, device="meta")
    plan = memopt.plan(
        build,
        (ids, ids),
        mesh=memopt.Mesh(data=8),
        mode="estimate",
        device="H100",
        strategy="store-all",
        progress=False,
    )
    graph, device = plan.graph, plan.device

    def again(program: Program) -> Counter[tuple[str, str]]:
        """How many operators run twice, by block and target."""
        runs = Counter(run.op for _, run in program.computes)
        assert set(runs.values()) == {1, 2}
        twice = (graph.operators[op] for op, count in runs.items() if count == 2)
        return Counter((x.module.split(".")[1], x.target.split(".")[1]) for x in twice)

    def gathered_again(program: Program, block: str) -> int:
        """How many weights of a block are gathered twice."""
        runs = Counter(run.op for _, run in program.computes)
        twice = (graph.operators[op] for op, count in runs.items() if count == 2)
        gathers = (x for x in twice if x.collective and x.module.split(".")[1] == block)
        return sum(len(x.writes) for x in gathers)

    full, selective = (published_step(graph, device, one) for one in ("full", "selective"))
    for program in (full, selective):
        assert validate(graph, program) is None
        # All of a block's weights but the last block's.
        assert [gathered_again(program, str(k)) for k in range(LAYERS)] == [9, 9, 0]
    # The last product of a block, whose result its backward does not read, does not run again.
    assert again(full)["1", "mm"] == 6
    # Of the others every second: k, o and up.
    assert again(selective)["1", "mm"] == 3
    attention = {target for _, target in again(selective) if "attention" in target}
    assert attention == set()
    peaks = [replay(graph, one, device).peak_bytes for one in (full, selective, store_all(graph))]
    assert peaks == sorted(peaks)
