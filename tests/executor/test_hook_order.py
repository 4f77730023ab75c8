"""Hooks on gradients are called in the order in which they are called without a plan."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt


class Branches(nn.Module):
    """Uses one weight in all branches and at the end, and a layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(8))
        layers = (nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.PReLU(8)) for _ in range(3))
        self.branches = nn.ModuleList(layers)
        self.join = nn.Bilinear(8, 8, 8)

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (branch(x * self.scale) for branch in self.branches)
        found: Tensor = self.join(a + b, self.branches[1](c)) + self.scale
        return found


class Recurrent(nn.Module):
    """One kernel returns more than two gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(x.unsqueeze(0))[0][0]
        return found


def images() -> nn.Module:
    norm = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    layers = [nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 4, 3, padding=1), norm]
    return nn.Sequential(*layers, nn.Conv2d(4, 2, 3, padding=1), nn.Flatten(), nn.Linear(16, 2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.Sequential(nn.Unflatten(1, (1, 8)), nn.TransformerEncoder(layer, 2))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "branches": Branches,
    "images": images,
    "encoder": encoder,
}


def made(make: Callable[[], nn.Module], planned: bool) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    return memopt.wrap(model, strategy="store-all", progress=False) if planned else model


def called(make: Callable[[], nn.Module], planned: bool) -> list[str]:
    """The names of the parameters whose hooks two steps call, in order."""
    model, names = made(make, planned), list[str]()
    for name, one in model.named_parameters():
        one.register_hook(lambda _gradient, name=name: names.append(name))
        one.register_post_accumulate_grad_hook(
            lambda _one, name=name: names.append(f"{name} added")
        )
    for _ in range(2):
        model(torch.randn(4, 8)).square().mean().backward()
    return names


@pytest.mark.parametrize("name", MODELS)
def test_the_order_is_eagers(name: str) -> None:
    expected = called(MODELS[name], planned=False)
    assert called(MODELS[name], planned=True) == expected
    assert len(expected) == 4 * sum(1 for _ in MODELS[name]().parameters())


def test_the_order_with_gradients_of_an_argument_and_of_two_calls() -> None:
    def found(planned: bool) -> list[str]:
        model, names, x = made(Branches, planned), list[str](), torch.randn(4, 8)
        x.requires_grad_().register_hook(lambda _gradient: names.append("x"))
        for name, one in model.named_parameters():
            one.register_hook(lambda _gradient, name=name: names.append(name))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*more than once")
            functional.mse_loss(model(x), model(x.tanh())).backward()
        return names

    assert found(planned=True) == found(planned=False)


def noisy(make: Callable[[], nn.Module], planned: bool) -> list[Tensor]:
    """The gradients of three steps, to which hooks add noise."""
    model = made(make, planned)
    for one in model.parameters():
        one.register_hook(lambda gradient: gradient + torch.randn_like(gradient))
    for _ in range(3):
        model(torch.randn(4, 8)).square().mean().backward()
    return [one.grad for one in model.parameters() if one.grad is not None]


def test_hooks_that_draw_get_eagers_numbers() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        found = noisy(Branches, planned=True)
    assert all(map(torch.equal, found, noisy(Branches, planned=False)))


@pytest.mark.parametrize("draws", [True, False])
def test_hooks_that_draw_in_an_unknown_order_are_said_once(draws: bool) -> None:
    """Each got another's noise, and nothing said so."""
    model = made(Recurrent, planned=True)
    for one in model.parameters():
        one.register_hook(lambda g: g + torch.randn_like(g) if draws else g * 2)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            model(torch.randn(4, 8)).square().mean().backward()
    assert sum("hooks on gradients draw" in str(one.message) for one in said) == draws


def test_updates_in_hooks_by_a_norm_that_hooks_add_up() -> None:
    """As LOMO trains: a first backward adds up norms, a second one updates by the sum."""

    def trained(planned: bool) -> list[Tensor]:
        model = made(Branches, planned)
        norms: list[Tensor] = []
        scale: list[Tensor] = []

        def update(one: Tensor) -> None:
            assert one.grad is not None
            if scale:
                one.data.add_(one.grad * scale[0], alpha=-0.1)
            else:
                norms.append(one.grad.norm())
            one.grad = None

        for one in model.parameters():
            one.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            x = torch.randn(4, 8)
            model(x).square().mean().backward()
            scale.append(1 / sum(norms, torch.zeros(())))
            model(x).square().mean().backward()
            norms.clear()
            scale.clear()
        return list(model.parameters())

    assert all(map(torch.equal, trained(planned=True), trained(planned=False)))
