"""Planned steps inside the user's hooks on saved tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.errors import GuardError


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3))


def _copied(value: Tensor) -> Tensor:
    return value.clone()


def _detached(value: Tensor) -> Tensor:
    return value.detach().clone()


def _itself(value: Tensor) -> Tensor:
    return value


def _as_text(value: Tensor) -> str:
    return str(value)


def _halved(value: Tensor) -> Tensor:
    return value.detach() / 2


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("pack", [_itself, _copied, _detached, _halved])
def test_hooks_of_the_users_see_what_eager_saves(
    pack: Callable[[Tensor], Tensor], wrapped: bool
) -> None:
    x, model = torch.randn(4, 6), _model()
    run: Any = model

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        with saved_tensors_hooks(pack, _itself):
            loss = run(x).square().sum()
        loss.backward()
        return [p.grad for p in model.parameters()]

    expected = gradients()
    if wrapped:
        run = memopt.wrap(model, progress=False)
    else:
        run = memopt.plan(model, x, progress=False).apply(model)
    with pytest.warns(UserWarning, match=rf"saved_tensors_hooks\(.*{pack.__name__}"):
        found = gradients()
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    gradients()  # which says nothing: a warning is an error here
    assert (run.calls.planned, run.calls.original) == (0, 2)
    model.zero_grad()
    run(x).square().sum().backward()
    assert run.calls.planned == 1


def test_hooks_of_torch_and_of_a_checkpoint(recwarn: pytest.WarningsRecorder) -> None:
    x = torch.randn(4, 6)
    model = _model()
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    planned = memopt.plan(model, x, progress=False).apply(model)
    recwarn.clear()
    model.zero_grad()
    with save_on_cpu():
        loss = planned(x).square().sum()
    loss.backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    model.zero_grad()
    checkpoint(planned, x, use_reentrant=False).square().sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    assert planned.calls.planned == 3, "the checkpoint runs the call again"
    assert not recwarn.list


def test_a_train_step_refuses_the_users_hooks() -> None:
    model, x, y = _model(), torch.randn(4, 6), torch.randn(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plan = memopt.plan(
        model, x, strategy="store-all", loss_fn=nn.functional.mse_loss, targets=y,
        optimizer=optimizer, progress=False,
    )  # fmt: skip
    step = plan.train_step(model, nn.functional.mse_loss, optimizer)
    with (
        pytest.raises(GuardError, match=r"_as_text.*outside"),
        saved_tensors_hooks(_as_text, _itself),
    ):
        step(x, targets=y)
    with save_on_cpu():
        step(x, targets=y)


@pytest.mark.parametrize("wrapped", [False, True])
def test_parametrized_tensors_that_are_cached(wrapped: bool) -> None:
    def gradients(run: Any, x: Tensor) -> list[Tensor | None]:
        model.zero_grad()
        with parametrize.cached():
            (run(x).square().sum() + run(x).sin().sum()).backward()
        return [p.grad for p in model.parameters()]

    model, x = _model(), torch.randn(4, 6)
    parametrizations.weight_norm(model[0])
    expected = gradients(model, x)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        with parametrize.cached():
            if wrapped:
                run: Any = memopt.wrap(model, progress=False)
            else:
                run = memopt.plan(model, x, progress=False).apply(model)
        found = gradients(run, x)
    assert "parametrize.cached()" in str(said[-1].message)
    assert all(torch.equal(p, q) for p, q in zip(found, expected, strict=True))
    assert (run.calls.planned, run.calls.original) == (0, 2)


@pytest.mark.parametrize("wrapped", [False, True])
def test_traced_by_jit_in_training(wrapped: bool) -> None:
    model, x = _model(), torch.randn(4, 6)
    if wrapped:
        run: Any = memopt.wrap(model, strategy="store-all", progress=False)
    else:
        run = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    with pytest.warns(UserWarning, match=r"traced by torch\.jit\.trace"):
        found = torch.jit.trace(run, x, check_trace=False)
    assert torch.equal(found(2 * x), _model()(2 * x))
    assert (run.calls.planned, run.calls.original) == (0, 1)


@pytest.mark.parametrize("wrapped", [False, True])
def test_forward_mode_derivatives(wrapped: bool) -> None:
    model, x = _model(), torch.randn(4, 6)

    def tangent(run: Any) -> Tensor | None:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(run(forward_ad.make_dual(x, torch.ones(4, 6)))).tangent

    expected = tangent(model)
    if wrapped:
        run: Any = memopt.wrap(model, strategy="store-all", progress=False)
    else:
        run = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    with pytest.warns(UserWarning, match="forward-mode AD"):
        found = tangent(run)
    assert found is not None
    assert expected is not None
    assert torch.equal(found, expected)


def test_computed_parameters_are_not_asked_for_their_gradients() -> None:
    model, x = _model(), torch.randn(4, 6)
    memopt.wrap(model, strategy="store-all", progress=False)
    doubled = {name: 2 * parameter for name, parameter in model.named_parameters()}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.func.functional_call(model, doubled, (x,)).sum().backward()
    assert not [one for one in said if "not a leaf" in str(one.message)]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("wrapped", [False, True])
def test_gradients_of_each_example(wrapped: bool) -> None:
    """By torch.func, whose tensors of many examples no plan holds."""
    model, x = _model(), torch.randn(4, 6)

    def of_each(run: Any) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor], one: Tensor) -> Tensor:
            output: Tensor = torch.func.functional_call(run, parameters, (one[None],))
            return output.square().sum()

        found: dict[str, Tensor] = torch.func.vmap(torch.func.grad(loss), (None, 0))(
            {name: p.detach() for name, p in model.named_parameters()}, x
        )
        return found

    expected = of_each(model)
    if wrapped:
        run: Any = memopt.wrap(model, strategy="store-all", progress=False)
    else:
        run = memopt.plan(model, x[:1], strategy="store-all", progress=False).apply(model)
    with pytest.warns(UserWarning, match=r"inside of torch\.func"):
        found = of_each(run)
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert (run.calls.planned, run.calls.original) == (0, 1)
