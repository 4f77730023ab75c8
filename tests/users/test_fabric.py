"""Lightning Fabric: wrapped before or after its `setup`, the same bits and every step planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch import nn

import memopt
from memopt.errors import CaptureError
from memopt.executor.calls import Calls

STEPS = 4


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1)) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def trained(where: str, precision: Any, folder: Path) -> tuple[list[Any], Calls | None]:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)
    inner = network()
    if where == "before":
        memopt.wrap(inner, "min", progress=False)
    model, optimizer = fabric.setup(inner, torch.optim.AdamW(inner.parameters(), 1e-2))
    if where == "after":
        assert memopt.wrap(model, "min", progress=False) is model
    torch.manual_seed(1)
    found: list[Any] = []
    for step in range(STEPS):
        accumulating = step % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulating):
            loss = nn.functional.cross_entropy(model(torch.randn(8, 16)), torch.arange(8) % 4)
            fabric.backward(loss / 2)
        found.append(loss.detach())
        if not accumulating:
            found.append(fabric.clip_gradients(model, optimizer, max_norm=0.1))
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            state = {"model": model, "optimizer": optimizer}
            fabric.save(folder / "half.ckpt", state)
            nn.init.zeros_(inner[-1].weight)
            fabric.load(folder / "half.ckpt", state)
    found += inner.state_dict().values()
    if where == "never":
        return found, None
    calls: Calls = model.calls
    memopt.unwrap(model)
    assert "memopt" not in inner.__dict__
    return found, calls


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_wrapped_before_or_after_setup(precision: str, tmp_path: Path) -> None:
    expected, _ = trained("never", precision, tmp_path)
    for where in ("before", "after"):
        found, calls = trained(where, precision, tmp_path)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        assert calls == Calls(planned=STEPS)


def test_a_plan_is_of_the_module_inside() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="bf16-mixed")
    model = fabric.setup(network())
    with pytest.raises(CaptureError, match=r"memopt\.wrap\(model"):
        memopt.plan(model, torch.randn(8, 16), budget="min", progress=False)
    memopt.plan(model.module, torch.randn(8, 16), budget="min", progress=False)
