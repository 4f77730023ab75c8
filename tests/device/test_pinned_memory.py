"""Pinned host memory is as large as planned, and goes when nothing copies it any more."""

from __future__ import annotations

import gc
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.executor.apply import apply_plan
from memopt.step.backend import BACKENDS
from memopt.step.pinned_memory import pinned_bytes
from memopt.step.step_optimizer import host_like
from tests.device import accelerator

LINK = memopt.Device(name="link", to_host_bytes_per_s=1e9, from_host_bytes_per_s=1e9)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@pytest.fixture(autouse=True)
def initialised(device: torch.device) -> None:
    torch.empty(1, pin_memory=True)  # before, torch takes nothing for pinned


def now() -> int:
    gc.collect()
    return int(accelerator.pinned()[0])


def peak_of(run: Any) -> int:
    before = now()
    accelerator.reset_pinned_peak()
    run()
    torch.accelerator.synchronize(0)
    return int(accelerator.pinned()[1]) - before


@pytest.mark.parametrize("size", [1, 513, 5000, 2_500_000])
def test_no_byte_more_than_asked_for(size: int, device: torch.device) -> None:
    """Before, 2.5 MB took 4.2: torch rounds pinned sizes up to powers of two."""
    there = torch.arange(size, device=device).to(torch.uint8)
    before = now()
    held = pinned_bytes(size, device)
    assert held.shape == (size,)
    assert held.is_pinned()
    assert now() - before == size
    accelerator.delay(2000)
    held.copy_(there, non_blocking=True)
    part = held[size // 2 :]
    del held
    assert now() - before == size, "a view keeps it"
    torch.accelerator.synchronize(device)
    assert torch.equal(part, torch.arange(size).to(torch.uint8)[size // 2 :])
    part.copy_(there[size // 2 :], non_blocking=True)
    del part  # while it is copied: it waits
    assert now() == before


def test_a_copy_of_any_layout(device: torch.device) -> None:
    for value in (torch.ones(5, 7, device=device).t(), torch.ones(3, 1, 1, device=device)):
        before = now()
        host = host_like(value, device)
        assert (host.stride(), host.is_pinned()) == (value.stride(), True)
        assert torch.equal(host.copy_(value), torch.ones(value.shape))
        assert now() - before == 4 * value.numel()
        del host


def test_a_host_budget_holds_in_pinned_bytes(device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Net().to(device), torch.randn(700, 48).to(device)
    how: dict[str, Any] = {"progress": False, "cache": False, "device": LINK}
    free = memopt.plan(model, x, strategy="offload-graph", budget="min", **how)
    limit = free.host_peak_bytes
    # Just above a power of two, where rounding costs most.
    assert limit & (limit - 1)
    plan = memopt.plan(
        model, x, strategy="offload-graph", budget=free.peak_bytes, host_budget=limit, **how
    )
    for interpreted in (False, True):  # before, interpreted copies were rounded one by one
        module = apply_plan(plan, model, interpreted=interpreted)
        assert 0 < peak_of(lambda run=module: run(x).sum().backward()) <= limit  # type: ignore[misc]  # bound now
        del module


@pytest.mark.parametrize("how", ["offload_optimizer", "movable"])
def test_whole_steps_pin_what_they_say(how: str, device: torch.device) -> None:
    torch.manual_seed(0)
    model, x = Net().to(device), torch.randn(200, 48).to(device)
    y = torch.zeros(200, 48, device=device)
    loss, optimizer = nn.functional.mse_loss, torch.optim.AdamW(model.parameters())
    chosen: dict[str, Any] = (
        {"strategy": "olla", "offload_optimizer": True}
        if how == "offload_optimizer"
        else {"strategy": "offload-graph", "budget": "min", "movable": "all"}
    )
    plan = memopt.plan(
        model,
        x,
        loss_fn=loss,
        targets=(y,),
        optimizer=optimizer,
        whole_step=True,
        progress=False,
        cache=False,
        device=LINK,
        **chosen,
    )
    step = plan.train_step(model, loss, optimizer)
    found = peak_of(lambda: [step(x, targets=(y,)) for _ in range(2)])
    state_bytes = 2 * sum(p.nbytes for p in model.parameters())
    limit = plan.host_peak_bytes if how == "movable" else state_bytes
    assert 0 < found <= limit


def test_where_nothing_can_be_registered_torch_pins(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = BACKENDS[device.type]
    monkeypatch.setitem(BACKENDS, device.type, replace(row, register_host=None))
    with pytest.warns(UserWarning, match="knows no way.*128 bytes where 100 are planned"):
        held = pinned_bytes(100, device)  # before, in silence
    assert held.is_pinned()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert pinned_bytes(128, device).is_pinned()

    def refused(*_: int) -> None:
        raise RuntimeError("operation not supported")

    monkeypatch.setitem(BACKENDS, device.type, replace(row, register_host=refused))
    with pytest.warns(UserWarning, match="operation not supported.*half the host_budget="):
        assert pinned_bytes(100, device).is_pinned()
