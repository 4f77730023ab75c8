"""Memory of a step that ran out of it is free at once, not when the next step begins."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.device import accelerator

LINK = memopt.Device(name="link", to_host_bytes_per_s=1e9, from_host_bytes_per_s=1e9)
WAYS: dict[str, dict[str, Any]] = {
    "store-all": {"strategy": "store-all"},
    "rotor": {"strategy": "rotor", "budget": "min"},
    "offload": {"strategy": "offload-graph", "budget": "min", "device": LINK},
    "placed": {"strategy": "rotor", "place": True},
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
            for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.mark.parametrize("way", WAYS)
def test_memory_is_back_when_the_error_arrives(way: str, device: torch.device) -> None:
    """Before, autograd's thread held the frames of the step that failed in it until some time after
    the caller had the error: a smaller step begun at once ran out of memory, too. Eager's holds
    gradients that have arrived."""
    torch.manual_seed(0)
    model, x = Net().to(device), torch.randn(64, 32).to(device)
    plan = memopt.plan(model, x, progress=False, cache=False, **WAYS[way])
    module = plan.apply(model)
    for _ in range(2):
        module(x).square().sum().backward()
    model.zero_grad(set_to_none=True)
    gc.collect()
    torch.accelerator.synchronize(device)
    before = accelerator.mod.memory_allocated()
    gc.disable()
    most = 2 * x.nbytes
    late: list[tuple[int, str, int]] = []
    failed = 0
    try:
        for number in range(1, 1000):
            where, loss = "forward", None
            accelerator.fail_in(0, number)
            try:
                loss = module(x).square().sum()
                where = "backward"
                loss.backward()
            except torch.OutOfMemoryError:
                failed += 1
            else:
                break
            finally:
                accelerator.fail_in(0, 0)
            del loss
            model.zero_grad(set_to_none=True)
            torch.accelerator.synchronize(device)
            held = accelerator.mod.memory_allocated() - before
            if held > most:
                late.append((number, where, held))
            end = time.monotonic() + 20
            while accelerator.mod.memory_allocated() != before and time.monotonic() < end:
                time.sleep(0.001)
            assert accelerator.mod.memory_allocated() == before
    finally:
        gc.enable()
    assert failed > 10
    assert not late
