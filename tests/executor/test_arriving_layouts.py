"""Gradients that arrive in another memory layout than the output has."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt

Return = Callable[[Tensor], Tensor]


class Positions(nn.Module):
    """Wav2Vec2's position embeddings: a convolution over time, of rows of features."""

    def __init__(self, returned: Return) -> None:
        super().__init__()
        self.convolution, self.returned = nn.Conv1d(8, 8, 4, padding=2), returned

    def forward(self, x: Tensor) -> Tensor:
        return self.returned(functional.gelu(self.convolution(x.transpose(1, 2))))


def transposed(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def contiguous(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous()


def gradients(model: nn.Module, weights: Tensor) -> list[Tensor]:
    found = []
    for _ in range(2):
        model.zero_grad()
        (model(torch.linspace(-1, 1, 2 * 9 * 8).view(2, 9, 8)) * weights).sum().backward()
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return found


def planned(model: nn.Module) -> nn.Module:
    inputs = torch.randn(2, 9, 8)
    return memopt.plan(model, inputs, strategy="store-all", progress=False).apply(model)


def test_it_is_said_once_and_the_remedy_works() -> None:
    weights = torch.randn(2, 10, 8)
    if torch.__version__ < (2, 13):  # it traces backwards of rows, whatever the output's layout
        weights = weights.mT.contiguous().mT
    with pytest.warns(UserWarning, match=r"another memory layout.*contiguous\(\)") as said:
        gradients(planned(Positions(transposed)), weights)
    assert sum("memory layout" in str(one.message) for one in said) == 1
    model, weights = Positions(contiguous), weights.contiguous()
    plain = gradients(copy.deepcopy(model), weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, gradients(planned(model), weights), plain))


def test_nothing_is_said_of_gradients_that_are_put_in_rows() -> None:
    """As of a linear layer's: eager copies another layout, too."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    weights = torch.randn(2, 8, 9).transpose(1, 2)
    plain = gradients(copy.deepcopy(model), weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, gradients(planned(model), weights), plain))


def test_it_is_said_of_what_is_scaled_up_with_its_channels_last() -> None:
    """A segmentation head: bilinear sampling keeps the layout, and the bias's sum minds it."""
    model = nn.Sequential(nn.Conv2d(8, 3, 1), nn.UpsamplingBilinear2d(scale_factor=4))
    x = torch.linspace(-1, 1, 2 * 8 * 8 * 8).view(2, 8, 8, 8)
    x = x.contiguous(memory_format=torch.channels_last)
    step = memopt.plan(model, x, strategy="store-all", progress=False).apply(model)
    with pytest.warns(UserWarning, match="another memory layout"):
        step(x).square().mean().backward()
