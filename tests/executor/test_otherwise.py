"""Calls that were not planned: an error, the original model, or another plan in the same budget."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.step.inputs import Call


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
    )


@dataclass(frozen=True)
class Subject:
    model: nn.Module
    plan: memopt.Plan


@pytest.fixture(scope="module")
def subject() -> Subject:
    model = make()
    inputs = torch.randn(16, 8)
    return Subject(
        model, memopt.plan(model, inputs, strategy="sequential", budget="min", progress=False)
    )


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    module.zero_grad()
    module(x).square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(map(torch.equal, a, b))


def test_error_is_the_default(subject: Subject) -> None:
    with pytest.raises(memopt.GuardError, match=r"planned float32\[16, 8\].*got float32\[5, 8\]"):
        subject.plan.apply(subject.model)(torch.randn(5, 8))


def test_original(subject: Subject) -> None:
    planned = subject.plan.apply(subject.model, on_mismatch="original")
    for rows, kind in ((5, "AddmmBackward0"), (16, "CompiledFunctionBackward")):
        x = torch.randn(rows, 8)
        assert planned(x).grad_fn.name() == kind
        assert equal(gradients(planned, x), gradients(subject.model, x))


def test_replan(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[nn.Module] = []
    plan_again = memopt.Plan._plan_again

    def count(self: memopt.Plan, model: nn.Module, call: Call) -> nn.Module:
        made.append(plan_again(self, model, call))
        return made[-1]

    monkeypatch.setattr(memopt.Plan, "_plan_again", count)
    planned = subject.plan.apply(subject.model, on_mismatch="plan")
    for rows in (5, 16, 5, 7, 5):
        x = torch.randn(rows, 8)
        assert planned(x).grad_fn.name() == "CompiledFunctionBackward"
        assert equal(gradients(planned, x), gradients(subject.model, x))
    assert len(made) == 2
    copied = copy.deepcopy(planned)
    x = torch.randn(5, 8)
    assert equal(gradients(copied, x), gradients(subject.model, x))
    assert len(made) == 3


def test_replanned_call_that_does_not_fit(subject: Subject) -> None:
    planned = subject.plan.apply(subject.model, on_mismatch="plan")
    with pytest.raises(memopt.InfeasibleBudgetError, match="smallest feasible budget"):
        planned(torch.randn(1000, 8))


def test_unknown_choice(subject: Subject) -> None:
    with pytest.raises(ValueError, match=r"one of 'plan', 'original', 'error', got 'ignore'"):
        subject.plan.apply(subject.model, on_mismatch="ignore")


def test_not_a_module(subject: Subject) -> None:
    with pytest.raises(ValueError, match=r"applied to an nn\.Module, got int"):
        subject.plan.apply(3)  # type: ignore[arg-type]  # the misuse under test
