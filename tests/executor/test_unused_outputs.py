"""Outputs that the user's loss does not use: no gradient is made for them, and none is accepted."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError, ExecutionError
from memopt.profiler.estimate import estimate_model
from memopt.profiler.session import loss_notes

CLASSES = 4000


@dataclass
class Output:
    """What a model with its loss inside returns."""

    loss: Tensor
    scores: Tensor


torch.export.register_dataclass(Output, serialized_type_name="tests.unused.Output")


class WithLoss(nn.Module):
    """A classifier called with its labels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.drop = nn.Dropout(0.2)
        self.last = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, labels: Tensor) -> Output:
        scores = self.last(self.drop(self.first(x).relu()))
        return Output(nn.functional.cross_entropy(scores, labels), scores)


def its_loss(output: Output) -> Tensor:
    return output.loss


def planned(loss_fn: Any) -> tuple[WithLoss, dict[str, Tensor], memopt.Plan]:
    torch.manual_seed(0)
    model = WithLoss()
    inputs = {"x": torch.randn(32, 6), "labels": torch.randint(0, CLASSES, (32,))}
    plan = memopt.plan(model, inputs, loss_fn=loss_fn, cache=False, progress=False)
    return model, inputs, plan


def test_the_gradient_of_the_rest_is_neither_made_nor_charged(tmp_path: Path) -> None:
    model, inputs, plan = planned(its_loss)
    whole = planned(None)[2]
    assert not any("returns a scalar" in note for note in plan.notes)
    assert any("loss_fn=lambda output: output.loss" in note for note in whole.notes)
    size = 32 * CLASSES * 4
    assert whole.peak_bytes - plan.peak_bytes >= size
    assert plan.baseline is not None
    assert whole.baseline is not None
    assert whole.baseline.peak_bytes - plan.baseline.peak_bytes >= size
    assert plan.check(model).measured_peak_bytes <= plan.peak_bytes
    plan.save(tmp_path / "plan")
    twin = copy.deepcopy(model)
    module = memopt.load(tmp_path / "plan").apply(copy.deepcopy(model))
    for one in (module, twin):
        torch.manual_seed(1)
        one(**inputs).loss.backward()
    found = dict(module.named_parameters())
    assert all(torch.equal(found[name].grad, p.grad) for name, p in twin.named_parameters())


def test_a_gradient_for_the_rest_is_refused() -> None:
    model, inputs, plan = planned(its_loss)
    module = plan.apply(model, on_mismatch="plan")
    smaller = {name: value[:16] for name, value in inputs.items()}
    for call in (inputs, smaller):
        output = module(**call)
        assert output.scores.requires_grad  # as eager's
        with pytest.raises(ExecutionError, match="the loss that the plan was made for"):
            (output.loss + output.scores.square().mean()).backward()
    with torch.no_grad():
        assert not module(**inputs).scores.requires_grad


def test_an_estimate_sees_the_same() -> None:
    model, inputs, plan = planned(its_loss)
    loss = memopt.profiler.Loss(its_loss)
    estimated = estimate_model(
        model, inputs, memopt.Device(flops_per_s={"float32": 1e9}), loss=loss
    )
    assert plan.profiled is not None
    assert estimated.record is not None
    assert plan.profiled.record is not None
    found = (estimated.record, plan.profiled.record)
    assert [record.output_gradients.unused for record in found] == [(1,), (1,)]
    assert loss_notes(estimated.captured, covered=True) == ()


class Cache:
    """No pytree."""


class Generating(nn.Module):
    """As Hugging Face's models are by default: returns its cache."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.config = type("Config", (), {"use_cache": True})()

    def forward(self, x: Tensor) -> tuple[Tensor, Cache]:
        return self.layer(x), Cache()


def test_a_returned_cache_is_refused_with_its_remedy() -> None:
    with pytest.raises(CaptureError, match=r"set model\.config\.use_cache = False"):
        memopt.plan(Generating(), torch.randn(2, 4), cache=False, progress=False)


class Carrying(nn.Module):
    """Returns what it is given and a parameter of its own beside what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.linear(x), x, self.linear.weight, x


def test_inputs_and_parameters_that_are_returned_are_themselves() -> None:
    """Although the loss does not use them; a gradient of theirs is theirs, as in eager."""
    torch.manual_seed(0)
    model, x = Carrying(), torch.randn(4, 6, requires_grad=True)
    plan = memopt.plan(
        model, x, loss_fn=lambda out: out[0].square().mean(), cache=False, progress=False
    )
    found = []
    for module in (copy.deepcopy(model), plan.apply(copy.deepcopy(model))):
        given = x.detach().clone().requires_grad_()
        out = module(given)
        weight = module.get_parameter("linear.weight")
        assert out[1] is given
        assert out[2] is weight
        assert out[3] is given
        (out[0].square().mean() + out[1].sum() + out[2].sum()).backward()
        found.append((given.grad, weight.grad))
    for eager, own in zip(*found, strict=True):
        assert eager is not None
        assert own is not None
        assert torch.equal(eager, own)
