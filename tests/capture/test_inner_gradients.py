"""Forwards that call torch.autograd.grad: planned with eager's bits, or refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.errors import CaptureError
from memopt.torch_private.access import known

grad = torch.autograd.grad
own_leaves = pytest.mark.skipif(
    not known("torch._dynamo.output_graph.OutputGraph._check_requires_grad_intermediate_outputs"),
    reason="this torch traces no leaves that a forward makes",
)


class Differentiates(nn.Module):
    """A network, and a forward that takes derivatives of it."""

    def __init__(self, way: Callable[..., Any]) -> None:
        super().__init__()
        self.way = way
        self.network = nn.Sequential(
            nn.Linear(8, 16), nn.LayerNorm(16), nn.SiLU(), nn.Dropout(0.2), nn.Linear(16, 8)
        )

    def forward(self, x: Tensor) -> Any:
        return self.way(self.network, x)


def _forces(network: nn.Module, x: Tensor) -> Any:
    energy = network(x).square().sum()
    return energy + grad(energy, x, create_graph=True)[0].square().sum()


def _residual(network: nn.Module, x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    u = network(x)
    first = grad(u.sum(), x, create_graph=True)[0]
    second = grad(first.sum(), x, create_graph=True)[0]
    return (first + u * second).square().mean(), u


def _inner_loop(network: nn.Module, x: Tensor) -> Any:
    weights = dict(network.named_parameters())
    for _ in range(2):
        loss = torch.func.functional_call(network, weights, (x,)).square().mean()
        gradients = grad(loss, [*weights.values()], create_graph=True)
        weights = {n: w - 0.1 * g for (n, w), g in zip(weights.items(), gradients, strict=True)}
    return torch.func.functional_call(network, weights, (x,)).square().mean()


def _sampled(network: nn.Module, x: Tensor) -> Any:
    z = x
    for _ in range(3):
        z = z.detach().requires_grad_()
        z = z - 0.1 * grad(network(z).square().sum(), z)[0] + 0.01 * torch.randn_like(z)
    return (network(x) - network(z.detach())).square().mean()


def _jacobian(network: nn.Module, x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    y = network(x).sum(0)
    rows = grad(y, x, torch.eye(8), is_grads_batched=True, create_graph=True)[0]
    return rows.square().mean()


def _of_made_leaves(network: nn.Module, x: Tensor) -> Any:
    z = torch.zeros_like(x, requires_grad=network.training)
    scale = torch.full((1,), 2.0, requires_grad=True) + torch.ones(1, requires_grad=False)
    u = network(x + z) * scale
    return grad(u.square().sum(), z, create_graph=True)[0].square().mean(), u


def _step(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(5)
    x = x.detach().clone().requires_grad_(x.requires_grad)
    found = model(x)
    loss = sum(one.sum() for one in found) if isinstance(found, tuple) else found
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    given = [] if x.grad is None else [x.grad]
    return [loss.detach(), torch.get_rng_state(), *gradients, *given]


@pytest.mark.parametrize(
    "way",
    [
        _forces,
        _inner_loop,
        pytest.param(_residual, marks=own_leaves),
        pytest.param(_sampled, marks=own_leaves),
        pytest.param(_jacobian, marks=own_leaves),
        pytest.param(_of_made_leaves, marks=own_leaves),
    ],
)
def test_a_forward_that_differentiates_is_planned(way: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, x = Differentiates(way), torch.randn(6, 8, requires_grad=way is _forces)
    eager = copy.deepcopy(model)
    memopt.wrap(model, "min", strategy="rotor", progress=False)
    for _ in range(2):
        found, expected = _step(model, x), _step(eager, x)
        assert len(found) == len(expected)
        assert all(map(torch.equal, found, expected))
    assert memopt.running(model).calls.original == 0


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradients[0]


def _custom(network: nn.Module, x: Tensor) -> Any:
    u = Cubed.apply(network(x))  # type: ignore[no-untyped-call]
    return grad(u.sum(), x, create_graph=True)[0].square().sum()


class Summed(torch.autograd.Function):
    """No trace goes through its forward: it runs as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x.numpy(force=True).sum().item()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.sum()


def _run_as_it_is(network: nn.Module, x: Tensor) -> Any:
    u = Summed.apply(network(x))  # type: ignore[no-untyped-call]
    return grad(u.sum(), x, create_graph=True)[0].square().sum()


def _product(network: nn.Module, x: Tensor) -> Any:
    return grad(network(x).prod(1).sum(), x, create_graph=True)[0].square().sum()


def _checkpointed(network: nn.Module, x: Tensor) -> Any:
    u = checkpoint(network, x, use_reentrant=False)
    return grad(u.sum(), x, create_graph=True)[0].square().sum()


def _with_autocast(network: nn.Module, x: Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        u = network(x).float()
    return grad(u.sum(), x, create_graph=True)[0].square().sum()


def _returned_where_made(network: nn.Module, x: Tensor) -> Any:
    z = torch.zeros_like(x, requires_grad=True)
    return network(x + z).sum(), z


def _backward(network: nn.Module, x: Tensor) -> Any:
    functional.mse_loss(network(x), x).backward()
    return network(x).sum()


def _returned(network: nn.Module, x: Tensor) -> Any:
    z = x.detach().requires_grad_()
    return grad(network(z).sum(), z, create_graph=True)[0].sum(), z


@pytest.mark.parametrize(
    ("way", "words"),
    [
        (_custom, "beside a custom autograd function"),
        (_run_as_it_is, "beside Summed.*write that with other operators of torch's"),
        (_product, "beside prod"),
        (_checkpointed, "beside a checkpoint"),
        (_with_autocast, "runs under autocast.*without autocast"),
        (_backward, r"in a way that no graph holds \(backward\(\)"),
        (_returned, r"requires_grad_\(\).*not returned"),
        pytest.param(_returned_where_made, r"requires_grad_\(\).*not returned", marks=own_leaves),
    ],
)
def test_a_derivative_that_no_trace_follows_is_refused(way: Callable[..., Any], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        memopt.plan(Differentiates(way), torch.randn(6, 8, requires_grad=True), progress=False)


class Quantizer(nn.Module):
    """Its first training call lets a buffer require gradients, as vector quantizers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("zero", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        loss = self.zero
        if self.training:
            loss.requires_grad_()
        return loss + self.linear(x).square().mean()


def test_a_buffer_that_the_first_call_lets_train_has_eagers_gradients() -> None:
    """It was refused."""
    model = Quantizer()
    twin = copy.deepcopy(model)
    planned = memopt.plan(model, torch.ones(3, 4), budget="min", progress=False).apply(model)
    for step in range(3):
        x = torch.full((3, 4), float(step))
        for one in (planned, twin):
            one(x).sum().backward()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert torch.equal(model.zero.grad, twin.zero.grad)
    assert planned.calls.planned == 3
