"""Snapshots for PyTorch's memory visualiser: its code reads them; totals are the replay's."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from torch.cuda import _memory_viz

import memopt
from memopt.api.plan import Plan
from memopt.programs.replay import replay
from memopt.report.snapshot import ARENA, memory_snapshot
from tests.plan.tiny import make, profiled, tight_plan
from tests.report.cases import moving_plan, random_plan

SIGNS = {"alloc": 1, "free_completed": -1, "free_requested": 0}


def totals(snapshot: dict[str, Any]) -> list[int]:
    changes = [SIGNS[e["action"]] * e["size"] for e in snapshot["device_traces"][0]]
    return list(accumulate(changes, initial=0))


def allocated(snapshot: dict[str, Any]) -> int:
    return sum(_memory_viz.calc_active(segment) for segment in snapshot["segments"])


@pytest.mark.parametrize("made", [random_plan, moving_plan])
@pytest.mark.parametrize("seed", range(12))
def test_totals_are_the_replay(made: Callable[[int], Plan], seed: int) -> None:
    plan = made(seed)
    snapshot = memory_snapshot(plan.graph, plan.program, plan.device)
    timeline = replay(plan.graph, plan.program, plan.device)
    assert plan.resident_bytes + max(totals(snapshot)) == timeline.peak_bytes
    assert plan.resident_bytes + totals(snapshot)[-1] == timeline.live_bytes[-1]
    assert allocated(snapshot) == timeline.live_bytes[-1]
    free: dict[int, int] = {}
    for event in snapshot["device_traces"][0]:
        begin, end = event["addr"], event["addr"] + event["size"]
        if event["action"] == "alloc":
            assert all(end <= low or high <= begin for low, high in free.items())
            free[begin] = end
        elif event["action"] == "free_completed":
            assert free.pop(begin) == end
    times = [event["time_us"] for event in snapshot["device_traces"][0]]
    assert times == sorted(times)


def test_pytorch_reads_the_file(tmp_path: Path) -> None:
    plan = tight_plan(profiled(make("mlp")))
    plan.snapshot(tmp_path / "s.pickle")
    snapshot = pickle.loads((tmp_path / "s.pickle").read_bytes())
    lines: list[str] = []
    _memory_viz.segments(snapshot, format_flamegraph=lines.append)
    _memory_viz.memory(snapshot, format_flamegraph=lines.append)
    sizes = [
        int(line.rpartition(" ")[2]) for line in lines[1].splitlines() if "inactive" not in line
    ]
    assert sum(sizes) == allocated(snapshot) > plan.resident_bytes
    assert f"total_allocated: {_memory_viz.Bytes(allocated(snapshot))}" in _memory_viz.segsum(
        snapshot
    )
    assert f"{len(snapshot['device_traces'][0])} entries" in _memory_viz.trace(snapshot)
    for page in (_memory_viz.trace_plot(snapshot), _memory_viz.segment_plot(snapshot)):
        assert "snapshot.pickle" in page
    names = {frame["name"] for e in snapshot["device_traces"][0] for frame in e["frames"]}
    assert "addmm" in names
    freed = pickle.loads((tmp_path / "s.pickle").read_bytes())
    kept = _memory_viz.filter_alloc_free_pairs(freed)["device_traces"][0]
    assert sum(event["size"] for event in kept) == allocated(snapshot) - plan.resident_bytes


def test_planned_addresses_are_kept() -> None:
    plan = memopt.plan(profiled(make("mlp")), strategy="store-all", place=True, progress=False)
    assert plan.program.offsets
    snapshot = memory_snapshot(plan.graph, plan.program, plan.device)
    found = {e["addr"] for e in snapshot["device_traces"][0] if e["action"] == "alloc"}
    assert {ARENA + offset for _, _, offset in plan.program.offsets} <= found
    assert snapshot["segments"][1]["total_size"] == replay(plan.graph, plan.program).arena_bytes


@pytest.mark.parametrize("kind", ["snapshot", "trace"])
def test_an_interrupted_write_leaves_the_old_file(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, path = getattr(random_plan(0), kind), tmp_path / "step"
    path.write_text("old")

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write(path)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])
    write(Path("/dev/null"))
