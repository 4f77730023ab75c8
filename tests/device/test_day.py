"""What runs when a GPU is there: each cell of `make bench-gpu`, at tiny size, and each
test of `make test-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import memopt
from benchmarks.gpu.cells import CELLS
from benchmarks.gpu.subject import Machine
from tests.device.harness import small_probes
from tests.device.recorded_graphs import RecordedGraphs, record_streams
from tests.executor import test_cuda_graph, test_swap_streams
from tests.strategies.offload import test_on_device

QUICK = ("calibration", "CUDA graphs mlp")
"""The others are slow."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(one, marks=() if one in QUICK else pytest.mark.slow) for one in CELLS],
)
def test_a_cell_of_the_day(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_probes(monkeypatch)
    if "graphs" in name:
        record_streams(device, monkeypatch)
    rows = CELLS[name](Machine(device, "tiny", 1))
    if name.startswith("compiled"):  # Triton has none for it
        with pytest.raises(memopt.MemoptError, match="needs a compiler, and there is none"):
            list(rows)
        return
    found = list(rows)
    assert found
    assert [row for row in found if row.verdict == "no"] == []


def test_transfers(device: torch.device) -> None:
    test_swap_streams.check_on(device)


def test_replayed_steps(device: torch.device) -> None:
    test_cuda_graph.check_on(device, RecordedGraphs(device))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "resnet50"])
def test_an_offloaded_step(
    name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_probes(monkeypatch)
    test_on_device.test_peak_gradients_and_time(name, str(device))


@pytest.mark.slow
def test_a_recorded_step(
    device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_probes(monkeypatch)
    test_on_device.test_a_recorded_step(str(device), tmp_path)


def test_optimizer_state_on_the_host(device: torch.device) -> None:
    test_on_device.test_optimizer_state_on_the_host(str(device))
