"""Estimates of compiled kernels: nothing is compiled or computed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import memopt
from memopt.api.plan import Plan
from memopt.models.device import Device
from memopt.models.presets import find_device
from memopt.step.kernel import PREFIX
from tests.kernels.compiled.steps import ROWS, WIDTH, inputs, network


def estimated(model: nn.Module, x: torch.Tensor, kernels: str, device: Device | str) -> Plan:
    return memopt.plan(
        model,
        x,
        strategy="store-all",
        mode="estimate",
        device=device,
        kernels=kernels,
        progress=False,
    )


def test_a_region_reads_and_writes_once_in_one_launch() -> None:
    device = find_device("H100")
    aten = estimated(network(), inputs(), "aten", device)
    plan = estimated(network(), inputs(), "compiled", device)
    regions = [one for one in plan.graph.operators if one.target.startswith(PREFIX)]
    assert len(regions) == 6
    rate = device.memory_bytes_per_s * device.memory_fraction
    value = ROWS * WIDTH * 4
    for one in regions:
        assert one.workspace_bytes == 0
        moved = (one.time_s - device.launch_latency_s) * rate
        # Two to six tensors of a block, sums over rows, and seeds: one backward reads the block's
        # input, too, and writes its output again, for the gradient of the next weight.
        assert 2 * value <= moved < 7 * value, one
    assert plan.step_time_s < aten.step_time_s
    assert plan.peak_bytes <= aten.peak_bytes
    assert any("priced as fused kernels" in note for note in plan.notes)


def test_of_a_table_the_rows_looked_up_are_read() -> None:
    device = find_device("H100")
    rate = device.memory_bytes_per_s * device.memory_fraction

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = nn.Embedding(50_000, 64), nn.LayerNorm(64)
            self.head = nn.Linear(64, 2)

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.head(self.norm(self.table(words)))
            return y

    plan = estimated(Words(), torch.zeros(2, 5, dtype=torch.long), "compiled", device)
    first = next(one for one in plan.graph.operators if one.target.startswith(PREFIX))
    moved = (first.time_s - device.launch_latency_s) * rate
    assert moved < 64 * 1024


def test_a_region_without_floating_point_numbers_is_priced_by_its_bytes() -> None:
    """A mask that several layers read; the device has no rate for what computes in no number."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, words: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            kept = (words != 0) & (words < 7)
            y: torch.Tensor = self.last(self.first(x) * kept) * kept
            return y

    given = torch.arange(12).view(3, 4), torch.randn(3, 4)
    plan = memopt.plan(
        Masked(), given, strategy="store-all", mode="estimate", device="H100", kernels="compiled"
    )
    assert any("bitwise_and" in one.name for one in plan.graph.operators)


def test_a_plan_made_for_another_device_runs_here() -> None:
    model = network(depth=1)
    plan = estimated(model, inputs(), "compiled", "H100")
    planned = plan.apply(model)
    planned(inputs()).sum().backward()
    assert planned.calls.planned == 1


def test_kernels_of_another_name_are_refused() -> None:
    with pytest.raises(ValueError, match="'aten', 'compiled', 'auto'"):
        estimated(nn.Linear(2, 2), torch.ones(1, 2), "triton", "H100")
