"""What a train step was planned with and finds otherwise: followed, or refused before anything has
changed. And the gradients of its inputs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import ExecutionError, GuardError
from memopt.executor.train_step import TrainStep

X, Y = torch.randn(4, 6), torch.randn(4, 3)
WEIGHT = {"mse": 1.0}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)
        self.alpha = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).tanh()) * self.alpha


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.mse_loss(output, target) * WEIGHT["mse"]


def planned(
    x: Tensor, *, trained: Callable[[nn.Module], Any] = nn.Module.parameters
) -> tuple[Net, torch.optim.Optimizer, TrainStep]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)
    plan = memopt.plan(
        model, x, strategy="store-all", loss_fn=loss_fn, targets=Y, optimizer=optimizer,
        progress=False,
    )  # fmt: skip
    return model, optimizer, plan.train_step(model, loss_fn, optimizer)


@pytest.fixture(scope="module")
def every() -> tuple[Net, torch.optim.Optimizer, TrainStep]:
    return planned(X)


def state(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(model.state_dict())


def assert_unchanged(model: nn.Module, before: dict[str, Tensor]) -> None:
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_loss_that_weighs_otherwise_is_refused(every: Any) -> None:
    model, _, step = every
    before = state(model)
    WEIGHT["mse"] = 100.0
    try:
        with pytest.raises(GuardError, match=r"WEIGHT\['mse'\]: planned 1\.0, got 100\.0"):
            step(X, targets=Y)
    finally:
        WEIGHT["mse"] = 1.0
    assert_unchanged(model, before)


def test_an_attribute_of_the_model_is_named_as_the_user_does(every: Any) -> None:
    model, _, step = every
    model.alpha = 0.5
    try:
        with pytest.raises(GuardError, match=r"^model\.alpha: planned 1\.0, got 0\.5"):
            step(X, targets=Y)
    finally:
        model.alpha = 1.0


def test_a_frozen_parameter_is_refused(every: Any) -> None:
    model, _, step = every
    before = state(model)
    model.first.weight.requires_grad_(False)
    try:
        with pytest.raises(GuardError, match=r"first\.weight: planned .*requires_grad, got"):
            step(X, targets=Y)
    finally:
        model.first.weight.requires_grad_()
    assert_unchanged(model, before)


def test_parameters_taken_out_of_the_optimizer_are_refused(every: Any) -> None:
    model, optimizer, step = every
    before, (group,) = state(model), optimizer.param_groups
    kept = group["params"]
    group["params"] = kept[:2]
    try:
        with pytest.raises(GuardError, match=r"second\.weight: the planned optimizer trains and"):
            step(X, targets=Y)
    finally:
        group["params"] = kept
    assert_unchanged(model, before)


def test_a_parameter_that_was_replaced_is_refused(every: Any) -> None:
    model, _, step = every
    before, kept = state(model), model.second.bias
    model.second.bias = nn.Parameter(kept.detach().clone())
    try:
        with pytest.raises(ValueError, match="trains a tensor that is no parameter of the model"):
            step(X, targets=Y)
    finally:
        model.second.bias = kept
    assert_unchanged(model, before)


def test_a_parameter_that_was_replaced_in_the_optimizer_too(every: Any) -> None:
    model, optimizer, step = every
    (group,) = optimizer.param_groups
    twin = copy.deepcopy(model)
    fresh = nn.Parameter(torch.ones(3))
    kept, model.second.bias = model.second.bias, fresh
    twin.second.bias = nn.Parameter(torch.ones(3))
    group["params"] = [fresh if p is kept else p for p in group["params"]]
    step(X, targets=Y)
    loss_fn(twin(X), Y).backward()
    torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9).step()
    for found, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, expected)


def test_weights_that_became_one_are_refused() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = memopt.plan(
        model, X, strategy="store-all", loss_fn=loss_fn, targets=X, optimizer=optimizer,
        progress=False,
    )  # fmt: skip
    step = plan.train_step(model, loss_fn, optimizer)
    model[1].weight = model[0].weight
    with pytest.raises(GuardError, match=r"1\.weight: planned as a tensor of its own, got one"):
        step(X, targets=X)


def test_a_group_added_to_the_optimizer_is_refused() -> None:
    model, optimizer, step = planned(X, trained=lambda model: model.first.parameters())
    step(X, targets=Y)
    model.zero_grad()
    before = state(model)
    optimizer.add_param_group({"params": list(model.second.parameters())})
    with pytest.raises(GuardError, match=r"second\.weight: this optimizer trains and the planned"):
        step(X, targets=Y)
    assert_unchanged(model, before)


@pytest.fixture(scope="module")
def of_input() -> tuple[Net, torch.optim.Optimizer, TrainStep]:
    return planned(X.clone().requires_grad_())


def eager_gradient(model: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.grad(loss_fn(model(x), Y), x)[0]


def test_inputs_get_their_gradients(of_input: Any) -> None:
    model, _, step = of_input
    x = X.clone().requires_grad_()
    first = eager_gradient(model, x)
    step(x, targets=Y)
    assert torch.equal(x.grad, first)
    second = eager_gradient(model, x)
    step(x, targets=Y)
    assert torch.equal(x.grad, first + second)


def test_hooks_of_inputs_run(of_input: Any) -> None:
    model, _, step = of_input
    x = X.clone().requires_grad_()
    expected = eager_gradient(model, x) * 2
    x.register_hook(lambda gradient: gradient * 2)
    step(x, targets=Y)
    assert torch.equal(x.grad, expected)


def test_computed_inputs_pass_their_gradients_on(of_input: Any) -> None:
    model, _, step = of_input
    encoder = nn.Linear(6, 6)
    x = encoder(X)
    (expected,) = torch.autograd.grad(loss_fn(model(encoder(X)), Y), [encoder.weight])
    step(x, targets=Y)
    assert torch.equal(encoder.weight.grad, expected)


def test_inputs_computed_from_the_model_itself_are_refused(of_input: Any) -> None:
    model, _, step = of_input
    before = state(model)
    with pytest.raises(ExecutionError, match=r"argument 1 was computed from the model's own"):
        step(model.first(X), targets=Y)
    assert_unchanged(model, before)
