"""What a train step is given wrongly is said in the caller's words, and nothing is half done."""

from __future__ import annotations

import copy
import signal
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.api.plan import Plan
from memopt.errors import ExecutionError
from memopt.executor.train_step import TrainStep

X, Y = torch.randn(4, 6), torch.tensor([0, 1, 2, 1])
LOSS = nn.functional.cross_entropy


def planned(**given: Any) -> tuple[nn.Module, torch.optim.Optimizer, Plan, TrainStep]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    arguments = {"loss_fn": LOSS, "targets": (Y,), "optimizer": optimizer} | given
    plan = memopt.plan(model, X, strategy="store-all", **arguments)
    return model, optimizer, plan, plan.train_step(model, LOSS, optimizer)


def test_a_single_target_may_stand_for_its_tuple() -> None:
    model, _, _, step = planned(targets=Y)
    expected = LOSS(model(X), Y)
    assert torch.equal(step(X, targets=Y), expected)


def test_a_loss_that_fails_by_itself_is_said_to() -> None:
    with pytest.raises(ValueError, match=r"the loss fails without memopt, too .*with 0 targets"):
        planned(targets=())


def test_an_optimizer_class_is_no_optimizer() -> None:
    with pytest.raises(ValueError, match="a class must be called"):
        planned(optimizer=torch.optim.SGD)


def test_an_optimizer_that_keeps_more_is_refused() -> None:
    model, _, plan, _ = planned()
    with pytest.raises(ValueError, match="AdamW keeps"):
        plan.train_step(model, LOSS, torch.optim.AdamW(model.parameters()))


def test_inference_mode_is_refused() -> None:
    model, optimizer, _, step = planned()
    before = copy.deepcopy(model.state_dict())
    with torch.inference_mode(), pytest.raises(ExecutionError, match="inference_mode"):
        step(X, targets=Y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not optimizer.state


@pytest.mark.parametrize("at", [0, 1])
def test_ctrl_c_leaves_no_half_step(at: int) -> None:
    """Before the first update it stops at once; then the step is finished first."""
    model, optimizer, _, step = planned()
    twin = copy.deepcopy(model)
    LOSS(twin(X), Y).backward()
    if at:
        torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9).step()
    real, calls = optimizer.step, []

    def interrupted() -> None:
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        real()

    def from_outside(*_: Any) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    optimizer.step = interrupted  # type: ignore[method-assign,assignment]
    if not at:
        step._program = replace(step._program, backward=from_outside)
    with pytest.raises(KeyboardInterrupt):
        step(X, targets=Y)
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, expected)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class Task:
    """Has a loss, which is a new bound method each time that it is named."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return LOSS(output, target)


def test_a_bound_method_is_the_loss_that_was_planned() -> None:
    task = Task()
    model, optimizer, plan, _ = planned()
    plan = memopt.plan(
        model, X, strategy="store-all", loss_fn=task.loss, targets=(Y,), optimizer=optimizer
    )
    assert torch.isfinite(plan.train_step(model, task.loss, optimizer)(X, targets=(Y,)))
    with pytest.raises(ValueError, match="the model and loss it was planned with"):
        plan.train_step(model, Task().loss, optimizer)
