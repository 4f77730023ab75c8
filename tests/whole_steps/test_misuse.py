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
from memopt.errors import ExecutionError, GuardError
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
def test_ctrl_c_leaves_no_half_step(at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first update it stops at once; then the step is finished first."""
    model, _, _, step = planned()
    twin = copy.deepcopy(model)
    LOSS(twin(X), Y).backward()
    if at:
        torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9).step()
    real, calls = torch.optim.SGD.step, []

    def interrupted(self: torch.optim.SGD) -> None:
        calls.append(1)
        if len(calls) == at:
            signal.raise_signal(signal.SIGINT)
        real(self)

    def from_outside(*_: Any) -> Tensor:
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(torch.optim.SGD, "step", interrupted)
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


def _hook(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight.register_hook(lambda gradient: gradient)


def _step_hook(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(lambda *_: None)


def _own_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    theirs = optimizer.step

    def decayed(*args: Any) -> None:
        theirs(*args)
        with torch.no_grad():
            model[0].weight.mul_(0.9)

    optimizer.step = decayed  # type: ignore[method-assign]


def _gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2].bias.grad = torch.zeros(3)


def _parameter(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())


def _module(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model[2] = copy.deepcopy(model[2])


def _more(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


def _fewer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.param_groups[0]["params"][0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_hook, "^0.weight has gradient hooks"),
        (_step_hook, "SGD has step hooks"),
        (_own_step, "this SGD's step was replaced by .*decayed, which would run once"),
        (_gradient, "^2.bias has a gradient from before"),
        (_parameter, "SGD trains a tensor that is no parameter of the model"),
        (_module, "SGD trains a tensor that is no parameter of the model"),
        (_more, "SGD trains a tensor that is no parameter of the model"),
        (_fewer, "^0.weight: the planned optimizer trains and this one does not"),
    ],
)
def test_what_changes_after_a_step_is_seen_before_the_next(change: Any, message: str) -> None:
    """Parameters are looked up anew only where others are registered or trained."""
    model, optimizer, _, step = planned()
    step(X, targets=Y)
    change(model, optimizer)
    before = copy.deepcopy(model.state_dict())
    for _ in range(2):
        with pytest.raises((ValueError, ExecutionError, GuardError), match=message):
            step(X, targets=Y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_step_that_a_scheduler_wraps_is_the_optimizers_own() -> None:
    model, optimizer, _, step = planned()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.0)
    assert "step" in vars(optimizer)
    for _ in range(2):
        before = model[0].weight.detach().clone()
        step(X, targets=Y)
        scheduler.step()
    assert torch.equal(model[0].weight, before)  # at a rate of 0
    # As what undoes a patch leaves it.
    vars(optimizer)["step"] = torch.optim.SGD.step.__get__(optimizer)
    step(X, targets=Y)


def test_a_parameter_may_be_replaced_with_its_optimizers() -> None:
    model, optimizer, _, step = planned()
    step(X, targets=Y)
    old = model[0].weight
    model[0].weight = new = nn.Parameter(old.detach().clone())
    params = optimizer.param_groups[0]["params"]
    params[next(i for i, one in enumerate(params) if one is old)] = new
    kept = old.detach().clone()
    step(X, targets=Y)
    assert torch.equal(old, kept)
    assert not torch.equal(new, kept)
