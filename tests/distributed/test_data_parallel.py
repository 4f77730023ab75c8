"""DistributedDataParallel around a planned module: gradients come while the backward runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

import memopt
from tests.distributed import cases, processes

BUCKET_MB = 0.02


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))


def trained(rank: int, ranks: int, name: str, steps: int, bucket_mb: float) -> dict[str, Any]:
    """Planned and unplanned training under DDP, with and without accumulation."""
    build = {"mlp": cases.mlp, "gpt2": cases.gpt2, "resnet50": cases.resnet50}[name]
    found: dict[str, Any] = {}
    for what in ("plain", "no_sync"):
        ends = []
        for planned in (False, True):
            model = build()
            if planned:
                memopt.wrap(model, "min", progress=False)
            around = DistributedDataParallel(model, bucket_cap_mb=bucket_mb)
            accumulate = around.no_sync if what == "no_sync" else None
            ends.append((cases.train(around, model, rank, steps, accumulate), cases.own(model)))
        found[what] = ends[0][0] == ends[1][0] and cases.same(ends[0][1], ends[1][1])
        found[f"{what} calls"] = model.calls.planned
    found["first"], found["last kernel"] = overlap(around, model)
    found["all"] = sum(p.grad is not None for p in model.parameters())
    return found


def overlap(around: torch.nn.Module, model: torch.nn.Module) -> tuple[float, float]:
    """When in a backward the first all-reduce starts, and when its last matrix product or
    convolution does."""
    loss = cases.loss_of(around(**cases.batch(model)))
    with profile() as profiler:
        loss.backward()
    starts: dict[str, list[float]] = {}
    for event in profiler.events():
        starts.setdefault(event.name, []).append(event.time_range.start)
    products = [*starts.get("aten::mm", []), *starts.get("aten::convolution_backward", [])]
    return min(starts["c10d::allreduce_"]), max(products)


def test_two_ranks(tmp_path: Path) -> None:
    found = processes.results(processes.run(trained, 2, tmp_path, "mlp", 3, 0.001))
    for one in found:
        assert one["plain"]
        assert one["no_sync"]
        assert one["plain calls"] == 3
        assert one["no_sync calls"] == 6
        assert one["first"] < one["last kernel"]
        assert one["all"] == 14


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_twenty_steps(name: str, tmp_path: Path) -> None:
    found = processes.results(processes.run(trained, 2, tmp_path, name, 20, 0.1, timeout_s=900))
    for one in found:
        assert one["plain"]
        assert one["no_sync"]
        assert one["first"] < one["last kernel"]
