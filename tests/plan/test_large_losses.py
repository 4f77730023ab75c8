"""Losses that torch returns in a storage as large as the output, alive into the next step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from memopt.models.presets import CPU_CORE
from memopt.pricing.memory import metered
from memopt.step.backend import backend_of

CPU = torch.device("cpu")
INPUTS = torch.randn(4, 3, 32, 32)
TARGETS = torch.rand(4, 3, 32, 32)


def crossed(output: Tensor, targets: Tensor) -> Tensor:
    return functional.binary_cross_entropy(output.sigmoid(), targets)


LARGE: dict[str, Callable[..., Tensor]] = {
    "mse": nn.MSELoss(),
    "mse sum": nn.MSELoss(reduction="sum"),
    "smooth l1": functional.smooth_l1_loss,
    "binary cross entropy": crossed,
    "soft margin": functional.soft_margin_loss,
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 3, 3, padding=1),
    )  # fmt: skip


def planned(loss: Callable[..., Tensor], **options: Any) -> memopt.Plan:
    chosen: dict[str, Any] = {"budget": "min", "strategy": "rotor", **options}
    return memopt.plan(model(), INPUTS, loss_fn=loss, targets=(TARGETS,), progress=False, **chosen)


def loop_peak_bytes(plan: memopt.Plan, loss: Callable[..., Tensor]) -> int:
    """The peak of a training loop's steps, the last one's loss held until the next replaces it."""
    module = plan.apply(model())
    value: Tensor | None = None
    with metered(CPU) as use:
        for _ in range(3):
            module.zero_grad()
            output = module(INPUTS)
            value = loss(output, TARGETS)
            value.backward()  # type: ignore[no-untyped-call]
    assert value is not None
    return (
        plan.resident_bytes
        - plan.loss_bytes
        - backend_of("cpu").step_scalars_bytes
        + use.peak_bytes
    )


@pytest.mark.parametrize("name", LARGE)
def test_the_budget_is_kept_in_a_loop_that_holds_its_loss(name: str, tmp_path: Path) -> None:
    loss = LARGE[name]
    plan = planned(loss)
    assert plan.loss_bytes == TARGETS.nbytes
    assert plan.budget is not None
    assert 0.99 * plan.peak_bytes <= loop_peak_bytes(plan, loss) <= plan.budget
    plan.save(tmp_path / "plan")
    loaded = memopt.load(tmp_path / "plan")
    assert loaded.loss_bytes == plan.loss_bytes
    for one in (plan, loaded):
        found = one.check(model(), INPUTS, loss_fn=loss, targets=(TARGETS,))
        assert found.within_budget
        assert found.peak_ratio == pytest.approx(1, abs=0.005)


@pytest.mark.parametrize("name", LARGE)
def test_estimated_as_measured(name: str) -> None:
    estimate = planned(LARGE[name], budget=None, mode="estimate", device=CPU_CORE)
    assert estimate.loss_bytes == TARGETS.nbytes


def test_losses_that_are_a_number_cost_nothing_more() -> None:
    for loss in (nn.L1Loss(), functional.huber_loss):
        assert planned(loss, budget=None, strategy="store-all").loss_bytes == 0


def test_the_unplanned_step_is_charged_its_loss_once() -> None:
    plan = planned(nn.MSELoss(), budget=None, strategy="store-all")
    other = planned(nn.L1Loss(), budget=None, strategy="store-all")
    assert plan.profiled is not None
    assert other.profiled is not None
    more = plan.profiled.baseline.peak_bytes - other.profiled.baseline.peak_bytes
    assert 0 <= more <= TARGETS.nbytes
