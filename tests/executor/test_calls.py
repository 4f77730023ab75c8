"""A planned module's attributes are its model's, and its calls are counted by how they ran."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import memopt
from memopt.executor.module import PlannedModule
from tests.executor.harness import Prepared, prepare

X = torch.randn(4, 6)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.Linear(6, 6))
        self.alpha = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * self.alpha


@pytest.fixture(scope="module")
def prepared() -> Prepared:
    return prepare(Model(), X)


@pytest.fixture
def planned(prepared: Prepared) -> PlannedModule:
    return copy.deepcopy(prepared.planned())


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def counts(planned: PlannedModule) -> tuple[int, int, int]:
    return planned.calls.planned, planned.calls.original, planned.calls.replanned


@pytest.mark.usefixtures("no_warning")
def test_modes_restored_one_by_one(planned: PlannedModule) -> None:
    """As Lightning does after a validation."""
    before = [module.training for module in planned.modules()]
    planned.eval()
    assert not planned.training
    with torch.no_grad():
        planned(X)
    for module, training in zip(planned.modules(), before, strict=True):
        module.training = training
    assert planned.training
    assert planned.original.training
    assert planned(X).grad_fn.name() == "CompiledFunctionBackward"
    assert counts(planned) == (1, 1, 0)


def test_the_original_is_the_mode(planned: PlannedModule) -> None:
    planned.original.eval()
    assert not planned.training
    planned.train()
    assert planned.original.layers[1].training


def test_a_training_step_that_falls_back_warns_once(planned: PlannedModule) -> None:
    """In its backward: without one it is no training step."""
    planned.original.training = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss = planned(X).sum()
    with pytest.warns(UserWarning, match=r"without its plan: the model itself is in eval mode"):
        loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        planned(X).sum().backward()
    assert counts(planned) == (0, 2, 0)


def test_calls_that_run_as_original_are_counted() -> None:
    model = Model()
    plan = memopt.plan(model, X, strategy="store-all", progress=False)
    planned = plan.apply(model, on_mismatch="original")
    planned(X)
    with pytest.warns(UserWarning, match=r"without its plan: argument 0: planned .*\.calls counts"):
        planned(torch.randn(5, 6)).sum().backward()
    assert counts(planned) == (1, 1, 0)


@pytest.mark.usefixtures("no_warning")
def test_evaluation_is_no_reason_to_warn(planned: PlannedModule) -> None:
    planned.eval()
    planned(X)
    planned.train()
    with torch.no_grad():
        planned(X)
    assert counts(planned) == (0, 2, 0)
    assert counts(copy.deepcopy(planned)) == (0, 0, 0)


def test_attributes_are_set_on_the_model(planned: PlannedModule) -> None:
    planned.alpha = 0.5
    planned.noted = "here"
    assert (planned.original.alpha, planned.original.noted) == (0.5, "here")
    with pytest.raises(memopt.GuardError, match=r"model\.alpha: planned 1\.0, got 0\.5"):
        planned(X)
    del planned.noted
    assert not hasattr(planned.original, "noted")
    planned.extra = nn.Linear(2, 2)
    planned.weight = nn.Parameter(torch.ones(1))
    assert planned.original.extra is planned.extra
    assert "weight" in dict(planned.original.named_parameters())


def test_what_is_the_planned_modules_own_stays_there(planned: PlannedModule) -> None:
    fired = []
    planned.register_full_backward_hook(lambda *_: fired.append(1))
    planned(X).sum().backward()
    assert fired == [1]
    assert not planned.original._backward_hooks
    planned.forward = lambda x: x + 1  # as accelerate wraps a forward
    assert torch.equal(planned(X), X + 1)
    assert "forward" not in planned.original.__dict__
    with pytest.raises(AttributeError):
        planned.original = nn.Linear(1, 1)


def test_a_planned_module_inside_a_planned_module(planned: PlannedModule) -> None:
    """The whole is planned as if the part were not."""
    outer = nn.Sequential(planned, nn.Linear(6, 2))
    whole = prepare(outer, X).planned()
    torch.manual_seed(1)
    found = whole(X)
    torch.manual_seed(1)
    assert torch.equal(found, outer(X))
    assert (counts(whole), counts(planned)) == ((1, 0, 0), (1, 0, 0))
    planned.alpha = 0.5
    with pytest.raises(memopt.GuardError, match=r"alpha: planned 1\.0, got 0\.5"):
        whole(X)


def test_hooks_on_all_modules_meet_an_applied_plan_too() -> None:
    model, met = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), []
    everywhere = nn.modules.module.register_module_forward_hook(
        lambda module, _args, _output: met.append(type(module).__name__)
    )
    try:
        plan = memopt.plan(model, X, strategy="store-all", progress=False)
        with pytest.warns(UserWarning, match="once more on the planned module"):
            planned = plan.apply(model)
        met.clear()
        planned(X)
    finally:
        everywhere.remove()
    assert met == ["Linear", "Tanh", "Sequential", "PlannedModule"]
