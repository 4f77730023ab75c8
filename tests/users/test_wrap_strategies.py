"""Strategies that can plan whole steps plan the module alone where that is what is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memopt

WHOLE_STEPS = ("offload-graph", "olla", "store-all")
INPUTS, TARGETS = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)), torch.arange(4) % 3


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 3))


def accumulated(model: nn.Module) -> list[torch.Tensor | None]:
    """The gradients of two micro-batches, added up."""
    for _ in range(2):
        F.cross_entropy(model(INPUTS), TARGETS).backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("strategy", WHOLE_STEPS)
@pytest.mark.parametrize("given", ["nothing", "loss", "loss and optimizer"])
def test_wrap_plans_micro_batches(strategy: str, given: str) -> None:
    model, expected = network(), accumulated(network())
    how: dict[str, Any] = {"time_limit_s": 5, "progress": False}
    if given != "nothing":
        how |= {"loss_fn": F.cross_entropy, "targets": (TARGETS,)}
    if given == "loss and optimizer":
        how["optimizer"] = torch.optim.Adam(model.parameters())
    memopt.wrap(model, strategy=strategy, **how)
    for found, gradient in zip(accumulated(model), expected, strict=True):
        assert found is not None
        assert gradient is not None
        assert torch.equal(found, gradient)
    assert (model.calls.planned, model.calls.original) == (2, 0)


@pytest.mark.parametrize("strategy", WHOLE_STEPS)
def test_plan_with_accumulate_is_of_the_module(strategy: str) -> None:
    model = network()
    how: dict[str, Any] = {"loss_fn": F.cross_entropy, "targets": (TARGETS,), "strategy": strategy}
    how |= {"optimizer": torch.optim.Adam(model.parameters()), "time_limit_s": 5}
    once = memopt.plan(model, INPUTS, whole_step=False, progress=False, **how)
    plan = memopt.plan(model, INPUTS, accumulate=True, progress=False, **how)
    gradient_bytes = sum(p.nbytes for p in model.parameters())
    assert plan.resident_bytes == once.resident_bytes + gradient_bytes
    planned = plan.apply(model)
    accumulated(planned)
    assert planned.calls.planned == 2
    with pytest.raises(ValueError, match="leave out what makes it a whole step"):
        memopt.plan(model, INPUTS, accumulate=True, whole_step=True, progress=False, **how)


def test_an_estimate_with_an_optimizer_is_of_the_module() -> None:
    model = network()
    how: dict[str, Any] = {"loss_fn": F.cross_entropy, "targets": (TARGETS,), "device": "H100"}
    how |= {"optimizer": torch.optim.Adam(model.parameters()), "mode": "estimate"}
    plan = memopt.plan(model, INPUTS, strategy="store-all", accumulate=True, progress=False, **how)
    assert plan.record is not None
    assert plan.record.accumulated_bytes > 0
