"""Calls that nothing is trained in, and calls in eval mode that something is trained in."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import memopt


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path))


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6))


class Detaching(nn.Module):
    """Returns no gradient while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()
        self.detaching = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y.detach() if self.detaching else y


@pytest.mark.parametrize("on_mismatch", ["plan", "original", "error"])
def test_a_frozen_model_runs_as_the_original(on_mismatch: str) -> None:
    model, x = network(), torch.randn(3, 4)
    memopt.wrap(model, budget="min", on_mismatch=on_mismatch, progress=False)  # type: ignore[arg-type]
    model(x).sum().backward()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = model.requires_grad_(False)(x)
    assert not output.requires_grad
    assert torch.equal(output, network()(x))
    assert (model.calls.planned, model.calls.original) == (1, 1)
    model.requires_grad_(True)(x).sum().backward()
    assert model.calls.planned == 2


def test_a_frozen_model_whose_input_has_a_gradient_is_planned() -> None:
    model = memopt.wrap(network().requires_grad_(False), budget="min", progress=False)
    x = torch.randn(3, 4, requires_grad=True)
    model(x.detach())
    model(x).sum().backward()
    assert x.grad is not None
    assert (model.calls.planned, model.calls.original) == (1, 1)


@pytest.mark.parametrize("on_mismatch", ["plan", "original", "error"])
def test_a_frozen_planned_module_runs_as_the_original(on_mismatch: str) -> None:
    model, x = network(), torch.randn(3, 4)
    plan = memopt.plan(model, x, budget="min", progress=False)
    planned = plan.apply(model, on_mismatch=on_mismatch)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        output = planned.requires_grad_(False)(x)
    assert torch.equal(output, network()(x))
    assert (planned.calls.planned, planned.calls.original) == (0, 1)


def test_outputs_without_gradients_run_as_the_original_until_they_have_some() -> None:
    model, x = memopt.wrap(Detaching(), budget="min", progress=False), torch.randn(3, 4)
    for _ in range(2):
        assert torch.equal(model(x), network()(x))
    assert (model.calls.planned, model.calls.original) == (0, 2)
    model.detaching = False
    with pytest.warns(UserWarning, match="seemed to have nothing to train"):
        model(x).sum().backward()
    model.zero_grad()
    model(x).sum().backward()
    assert (model.calls.planned, model.calls.original) == (1, 3)


@pytest.mark.parametrize("way", ["wrap", "apply"])
def test_training_in_eval_mode_is_warned_of_once_and_the_remedy_plans(way: str) -> None:
    model, x = network(), torch.randn(3, 4)
    if way == "wrap":
        planned: nn.Module = memopt.wrap(model, budget="min", progress=False)
    else:
        planned = memopt.plan(model, x, budget="min", progress=False).apply(model)
    planned.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs = planned(x), planned(x)
        with torch.no_grad():
            planned(x)
    assert all(map(torch.equal, outputs, [network()(x)] * 2))
    with pytest.warns(UserWarning, match=r"eval mode.*call model\.train\(\) first"):
        outputs[0].sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        outputs[1].sum().backward()
        planned(x).sum().backward()
    assert memopt.running(planned).calls.planned == 0
    planned.zero_grad()
    planned.train()
    if way == "wrap":
        model[1].eval()
    planned(x).sum().backward()
    assert memopt.running(planned).calls.planned == 1


def test_evaluation_with_transforms_is_left_alone() -> None:
    model, x = memopt.wrap(network(), budget="min", progress=False).eval(), torch.randn(3, 4)
    parameters = dict(model.named_parameters())

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, parameters, (x,)).sum()

    expected = torch.autograd.grad(network()(x).sum(), [*network().parameters()], allow_unused=True)
    assert len(expected) == len(parameters)
    found = torch.func.grad(loss)(parameters)
    plain = network()
    plain(x).sum().backward()
    for name, parameter in plain.named_parameters():
        assert torch.equal(found[name], parameter.grad)


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = network(), torch.optim.Adam(network().parameters())
    match = r"the Adam trains no parameter of this model: .*made with model\.parameters\(\)"
    with pytest.raises(ValueError, match=match):
        memopt.wrap(model, optimizer=other)
    with pytest.raises(ValueError, match=match):
        memopt.plan(model, torch.randn(3, 4), optimizer=other, progress=False)
    with pytest.raises(ValueError, match=match):
        memopt.fits(model, torch.randn(3, 4), device="H100", optimizer=other, progress=False)
    memopt.plan(
        model, torch.randn(3, 4), optimizer=torch.optim.Adam(model.parameters()), progress=False
    )


def trained(model: nn.Module, by: Callable[[torch.Tensor], torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        by(torch.ones(3, 4)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("parts", [None, "auto"])
def test_a_model_that_is_trained_by_other_means_than_its_call_is_warned_of(
    parts: str | None,
) -> None:
    """As agents (reinforcement learning) and Lightning's modules are, by methods of their own."""
    model = memopt.wrap(Detaching(), budget="min", progress=False, parts=parts)
    with torch.no_grad():
        model(torch.ones(3, 4))
    with pytest.warns(UserWarning, match="Detaching is trained and was not called.*wrap") as warned:
        trained(model, model.inner)
    assert len(warned) == 1
    memopt.unwrap(model)
    memopt.wrap(model.inner, budget="min", progress=False)  # the remedy
    trained(model, model.inner)
    assert model.inner.calls.planned == 3


def test_the_remedy_for_a_function_compiled_with_a_plain_model_works() -> None:
    """Dynamo's code does not ask for hooks, by which a wrapped model is seen."""
    plain, model, x = nn.Linear(4, 2), nn.Linear(4, 2), torch.ones(3, 4)
    run = torch.compile(lambda model, x: model(x).square(), backend="eager")
    run(plain, x)
    memopt.wrap(model, budget="min", progress=False)
    with pytest.warns(UserWarning, match=r"trained and was not called.*torch\.compiler\.reset"):
        trained(model, lambda x: run(model, x))
    torch.compiler.reset()
    for number in range(1, 4):
        run(model, x).sum().backward()
        assert model.calls.planned == number  # type: ignore[comparison-overlap]


def test_the_remedy_for_a_model_that_is_compiled_in_place_works() -> None:
    model = Detaching()
    model.detaching = False
    model.compile(backend="eager")
    with pytest.raises(ValueError, match=r"torch\.compile\(model\) of the wrapped model"):
        memopt.wrap(model, budget="min", progress=False)
    plain = copy.deepcopy(model)
    memopt.wrap(plain, budget="min", progress=False)
    plain.compile(backend="eager")
    with pytest.warns(UserWarning, match=r"torch\.compile\(model\) in place of model\.compile"):
        trained(plain, plain)
    wrapped = memopt.wrap(copy.deepcopy(plain), budget="min", progress=False)
    trained(wrapped, torch.compile(wrapped, backend="eager"))
    assert wrapped.calls.planned == 3


def test_a_model_inside_of_one_that_is_called_is_not_warned_of() -> None:
    model = Detaching()
    model.detaching = False
    for one in (model, model.inner):
        memopt.wrap(one, budget="min", progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(model, model)
    assert model.calls.planned == 3


def test_the_call_that_makes_a_lazy_model_s_parameters_runs_as_it_is() -> None:
    """It ended in torch's ValueError about an uninitialized parameter."""

    def trained(wraps: bool) -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.LazyLinear(8), nn.LazyBatchNorm1d(), nn.ReLU(), nn.LazyLinear(2))
        if wraps:
            memopt.wrap(model, "min", progress=False)
        for _ in range(3):
            model(torch.randn(3, 4)).square().sum().backward()
        return model

    plain = trained(False)
    with pytest.warns(UserWarning, match="LazyLinear '0' has no parameters before"):
        model = trained(True)
    assert model.calls == memopt.running(model).calls  # type: ignore[union-attr]
    assert (model.calls.planned, model.calls.original) == (2, 1)  # type: ignore[union-attr]
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]
