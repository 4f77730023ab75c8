"""A backward's parts run in the device's thread, on the forward's stream, whatever the caller's."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.executor import handover
from memopt.pricing import device_measure
from tests.device import accelerator

LINK = memopt.Device(name="link", to_host_bytes_per_s=1e9, from_host_bytes_per_s=1e9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Dropout(0.1), nn.Linear(96, 48))
            for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def gradients(module: nn.Module, model: nn.Module, x: Tensor, on: Any = None) -> list[Tensor]:
    """The gradients of a step whose forward runs on a stream."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    here = torch.accelerator.current_stream(x.device)
    if on is not None:
        on.wait_stream(here)
    with accelerator.mod.stream(here if on is None else on):
        loss = module(x).square().sum()
    if on is not None:
        here.wait_stream(on)
    loss.backward()
    torch.accelerator.synchronize(x.device)
    return [p.grad.cpu() for p in model.parameters() if p.grad is not None]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Gradients are handed over in parts, as inside DistributedDataParallel; where each part ran:
    (thread, stream)."""
    found: list[tuple[int, int]] = []
    run = handover.Handover.next_part

    def noted(self: Any, number: int) -> dict[int, Any]:
        stream = torch.accelerator.current_stream().stream_id
        found.append((threading.get_ident(), stream))
        return run(self, number)

    around = SimpleNamespace(bucket_bytes_cap=80_000)
    monkeypatch.setattr(handover, "data_parallel_around", lambda: around)
    monkeypatch.setattr(handover.Handover, "next_part", noted)
    return found


@pytest.mark.parametrize("strategy", ["store-all", "offload-graph"])
def test_handed_over_from_a_side_stream(
    strategy: str, device: torch.device, parts: list[tuple[int, int]]
) -> None:
    """Before, parts after the first ran in the caller's thread and on its stream: wrong gradients,
    in five of five steps under delays."""
    torch.manual_seed(0)
    model, x = Net().to(device), torch.randn(64, 48).to(device)
    expected = gradients(model, model, x)
    more = {} if strategy == "store-all" else {"budget": "min", "device": LINK}
    plan = memopt.plan(model, x, strategy=strategy, progress=False, cache=False, **more)
    planned = plan.apply(model)
    for _ in range(3):
        parts.clear()
        side = accelerator.mod.Stream(device)
        accelerator.delay(500)
        assert all(map(torch.equal, gradients(planned, model, x, side), expected))
        accelerator.delay(0)
        assert len(parts) > 2
        threads, streams = map(set, zip(*parts, strict=True))
        assert streams == {side.stream_id}
        assert len(threads) == 1
        assert threading.get_ident() not in threads


@pytest.mark.parametrize("kind", ["fake", "cpu"])
def test_a_default_device_changes_nothing(
    kind: str,
    device: torch.device,
    parts: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before, host memory was asked for on the default device, and the runtime's token was on it,
    which cost two synchronisations a step."""
    monkeypatch.setattr(device_measure, "_COPY_BYTES", 4096)
    torch.manual_seed(0)
    place = device if kind == "fake" else torch.device("cpu")
    model, x = Net().to(place), torch.randn(64, 48).to(place)
    loss, more = nn.functional.mse_loss, {"progress": False, "cache": False}
    y = torch.zeros(64, 48, device=place)
    expected = gradients(model, model, x) if kind == "fake" else []
    torch.set_default_device(device)
    try:
        assert device_measure._link(place)[0] > 0
        plan = memopt.plan(model, x, strategy="offload-graph", budget="min", device=LINK, **more)
        planned = plan.apply(model)
        if kind == "fake":
            assert all(map(torch.equal, gradients(planned, model, x), expected))
            model.zero_grad(set_to_none=True)
            before = accelerator.counts()[2]
            planned(x).square().sum().backward()
            assert accelerator.counts()[2] == before
            model.zero_grad(set_to_none=True)
        optimizer = torch.optim.AdamW(model.parameters())
        memopt.plan(
            model,
            x,
            loss_fn=loss,
            targets=(y,),
            optimizer=optimizer,
            whole_step=True,
            strategy="olla",
            offload_optimizer=kind == "fake",
            **more,
        ).train_step(model, loss, optimizer)(x, targets=(y,))
    finally:
        torch.set_default_device(None)
