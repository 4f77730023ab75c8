"""Random operators on tensors of every layout draw for the elements that eager draws for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import memopt
from memopt.capture.capture import capture
from memopt.step.inputs import to_call
from tests.executor.harness import Case, check

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "row-major": lambda h: h,
    "transposed": lambda h: h.transpose(-1, -2),
    "permuted": lambda h: h.permute(2, 0, 1),
    "gaps": lambda h: torch.cat([h, h], -1)[..., ::2],
    "gaps, transposed": lambda h: torch.cat([h, h], 1)[:, ::2].transpose(-1, -2),
    "expanded": lambda h: h[:1].expand(3, 8, 8),
}


def _like(g: Tensor) -> Tensor:
    return torch.empty_like(g)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    # 0.15 rounds otherwise than torch's fused kernel, 0.5 does not: two kernels in one graph.
    "dropouts": lambda g: functional.dropout(functional.dropout(g, 0.5).sin(), 0.15),
    "in place": lambda g: functional.dropout(g * 1, 0.15, inplace=True),
    "alpha": lambda g: functional.alpha_dropout(g, 0.3, training=True),
    "features": lambda g: functional.feature_alpha_dropout(g, 0.3, training=True),
    "channels": lambda g: functional.dropout1d(g, 0.4),
    "bernoulli_": lambda g: g * _like(g).bernoulli_(0.4) * _like(g).bernoulli_(g.sigmoid()),
    "bernoulli": lambda g: g * torch.bernoulli(g.detach().sigmoid()),
    "uniform_": lambda g: g * _like(g).uniform_(-1, 1),
    "normal_": lambda g: g * _like(g).normal_(0, 0.1),
    "others": lambda g: g * _like(g).exponential_(2.0) + _like(g).geometric_(0.3),
    "again": lambda g: g * _like(g).bernoulli_(0.4).normal_().add_(1),
    "part": lambda g: g * _part(g),
    "like": lambda g: g * torch.rand_like(g) + torch.randn_like(g),
    "rrelu": lambda g: functional.rrelu(g, training=True),
    "gumbel": lambda g: functional.gumbel_softmax(g, hard=True),
    "attention": lambda g: functional.scaled_dot_product_attention(g, g, g, dropout_p=0.15),
}


def _part(g: Tensor) -> Tensor:
    """Ones, but for numbers drawn into a part that has gaps."""
    ones = torch.ones(g.shape)
    ones[1:, ::2].transpose(-1, -2).normal_()
    return ones


class Draws(nn.Module):
    def __init__(self, draws: list[str], layout: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.draws, self.layout = [DRAWS[name] for name in draws], LAYOUTS[layout]

    def forward(self, x: Tensor) -> Tensor:
        given = self.layout(self.a(x).tanh())
        total: Tensor = sum(draw(given).tanh().sum(0) for draw in self.draws)  # type: ignore[assignment]
        return functional.dropout(self.b(total).sin(), 0.3)


def _inputs() -> Tensor:
    return torch.linspace(-1, 1, 3 * 8 * 8).view(3, 8, 8).sin()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("half", [0, 1])
def test_as_eager(layout: str, half: int) -> None:
    """Under every program: stored, recomputed, swapped, in place, at planned addresses."""
    names = list(DRAWS)[half::2]
    check(Case(partial(Draws, names, layout), _inputs, steps=1))


class NoisyBuffer(nn.Module):
    """A transposed buffer that every forward draws anew."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 8)
        self.register_buffer("noise", torch.zeros(8, 8).t())

    def forward(self, x: Tensor) -> Tensor:
        noise: Tensor = self.noise.normal_()  # type: ignore[operator]
        return self.a(x) * noise


def test_a_buffer_is_drawn_into() -> None:
    check(Case(NoisyBuffer, _inputs))


def test_only_the_dropout_that_rounds_otherwise_is_replaced() -> None:
    """Two kernels of one operator have names of their own in generated code."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.15), nn.Tanh(), nn.Dropout(0.5))
    captured = capture(layers, to_call(torch.randn(4, 8)))
    drops = [n.target for n in captured.module.graph.nodes if "native_dropout.d" in str(n.target)]
    assert [type(target) for target in drops].count(torch._ops.OpOverload) == 1
    assert len(drops) == 2
    plan = memopt.plan(layers, torch.randn(4, 8), strategy="store-all", progress=False)
    assert "aten_native_dropout_default_2(" in plan.apply(layers).code


class Noisy(nn.Module):
    """So small that a generator's state is larger than the step."""

    def __init__(self, draw: Callable[[Tensor], Tensor], width: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.draw(self.b(self.draw(self.a(x)).sin()).tanh()).sin()
        return y


@pytest.mark.parametrize("place", [False, True])
@pytest.mark.parametrize("width", [4, 16])
def test_states_are_within_the_budget(width: int, place: bool) -> None:
    """What torch allocates to save and to restore a generator's state is charged."""
    x = torch.randn(width, width)
    for draw in (lambda h: h * torch.randn_like(h), lambda h: functional.dropout(h, 0.3)):
        model = Noisy(draw, width)
        for strategy in ("rotor",) if place else ("rotor", "rotor-menus"):
            plan = memopt.plan(
                model, x, budget="min", strategy=strategy, place=place, progress=False
            )
            assert plan.budget is not None
            assert plan.check(model, x).measured_peak_bytes <= plan.budget
