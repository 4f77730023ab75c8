"""plan.check measures a step of the real model and leaves the model as it was."""

from __future__ import annotations

import pytest
import torch

import memopt
from memopt.report.step_check import StepCheck
from tests.plan.tiny import make, profiled, tight_plan


def test_measures_and_leaves_the_model_alone() -> None:
    made = make("convolutions")
    model, inputs, loss = made
    plan = tight_plan(profiled(made))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    gradients = [parameter.grad for parameter in model.parameters()]
    state = torch.random.get_rng_state()
    for result in (
        plan.check(model, inputs, loss_fn=loss),
        plan.check(model),
        plan.check(make("convolutions")[0], inputs, loss_fn=loss),
    ):
        assert result.peak_ratio == pytest.approx(1.0, abs=0.005)
        assert result.within_budget
        assert result.measured_time_s > 0
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is gradient
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_plan_of_a_cost_model_cannot_be_checked() -> None:
    model, inputs, _ = made = make("mlp")
    plan = memopt.plan(profiled(made).graph, strategy="store-all")
    for given in (inputs, None):
        with pytest.raises(ValueError, match="cost model"):
            plan.check(model, given)


def test_table() -> None:
    check = StepCheck(1000, 1020, 0.5, 1.0, 1010)
    assert check.peak_ratio == 1.02
    assert check.time_ratio == 2.0
    assert not check.within_budget
    assert "EXCEEDED" in str(check)
    assert "kept" in str(StepCheck(1000, 1000, 0.0, 1.0, 1000))
    assert StepCheck(1000, 1000, 0.0, 1.0, None).time_ratio == 0.0
    assert all(len(line) <= 80 for line in str(check).splitlines())
