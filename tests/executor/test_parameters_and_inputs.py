"""Tied, unused, frozen and unregistered parameters; inputs of every kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from tests.executor.harness import Case, check, prepare


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.b.weight = self.a.weight


class Unused(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Linear(3, 3)
        self.register_buffer("never", torch.ones(7))


class PartlyFrozen(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.a.requires_grad_(False)
        self.b.bias.requires_grad_(False)


class Frozen(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)


UNREGISTERED = torch.randn(6, generator=torch.Generator().manual_seed(0))


class Unregistered(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x) * UNREGISTERED).tanh() * torch.tensor([1.0, 2, 3, 4, 5, 6])


class SharedLayer(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(self.a(self.b(x)).tanh())


class UsesParameterTwice(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * self.a.weight.norm() + self.b.weight.sum(0)


def rows() -> tuple[Tensor]:
    return (torch.randn(4, 6),)


def rows_with_gradient() -> tuple[Tensor]:
    return (torch.randn(4, 6, requires_grad=True),)


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Tied, rows),
        (Unused, rows),
        (PartlyFrozen, rows),
        (Frozen, rows_with_gradient),
        (Layers, rows_with_gradient),
        (Unregistered, rows),
        (SharedLayer, rows),
        (UsesParameterTwice, rows_with_gradient),
    ],
    ids=lambda p: p.__name__,
)
def test_parameters(model: type[nn.Module], inputs: Callable[[], Any]) -> None:
    check(Case(model, inputs))


def test_unused_parameters_and_buffers_are_resident() -> None:
    plain, unused = (prepare(m(), torch.randn(4, 6)).graph for m in (Layers, Unused))
    assert unused.resident_bytes - plain.resident_bytes == 4 * (3 * 3 + 3 + 7)


SCALE = torch.ones(3, requires_grad=True)


@pytest.mark.parametrize("of_the_loss", [False, True])
def test_a_train_step_refuses_to_train_what_is_not_registered(of_the_loss: bool) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.held = nn.Linear(3, 3), [nn.Parameter(torch.ones(3))]

        def forward(self, x: Tensor) -> Any:
            return self.linear(x) * self.held[0]

    def loss(output: Tensor) -> Tensor:
        return (output * SCALE if of_the_loss else output).square().mean()

    model = nn.Linear(3, 3) if of_the_loss else Held()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    name = "SCALE" if of_the_loss else r"model.held\[0\]"
    with pytest.raises(memopt.CaptureError, match=f"trains .*{name}.*does not register"):
        memopt.plan(
            model, torch.ones(2, 3), loss_fn=loss, optimizer=sgd, whole_step=True, progress=False
        )


def test_unregistered_parameter_gets_its_gradient() -> None:
    outside = torch.ones(6, requires_grad=True)

    class Model(Layers):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * outside)

    model, x = Model(), torch.randn(4, 6)
    model(x).sum().backward()
    expected, outside.grad = outside.grad, None
    prepare(model, x).planned("recompute_all")(x).sum().backward()
    assert torch.equal(outside.grad, expected)


class Embeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, padding_idx=0)
        self.linear = nn.Linear(6, 6)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        return self.linear(self.embedding(tokens)) * mask[:, None, None]


class Options(Layers):
    def forward(
        self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, **more: Any
    ) -> Tensor:
        y = self.a(x) * scale
        if mask is not None:
            y = y * mask
        return self.b(y) + more.get("shift", 0)


class Structured(Layers):
    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.b(self.a(batch["x"]) * batch["list"][0])


class TakesThree(Layers):
    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return self.b(self.a(x))


class TakesTwo(Layers):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.b(self.a(x) * y)


def same_twice() -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 6)
    return x, x


@pytest.mark.parametrize(
    ("model", "inputs"),
    [
        (Embeds, lambda: (torch.randint(0, 10, (4, 5)), torch.tensor([True, False, True, True]))),
        (Options, lambda: {"x": torch.randn(4, 6), "scale": 2.0, "mask": None}),
        (Options, lambda: {"mask": torch.ones(6), "shift": 3, "x": torch.randn(4, 6)}),
        (Structured, lambda: ({"x": torch.randn(4, 6), "list": [torch.randn(6), None]},)),
        (TakesTwo, same_twice),
        (
            TakesThree,
            lambda: (torch.randn(4, 6), torch.randn(3, requires_grad=True), torch.randn(2)),
        ),
    ],
    ids=["integers", "keywords", "other-keywords", "nested", "same-twice", "unused"],
)
def test_inputs(model: type[nn.Module], inputs: Callable[[], Any]) -> None:
    check(Case(model, inputs))


def test_gradient_flows_on_to_what_made_the_input() -> None:
    model, start = Layers(), torch.randn(4, 6, requires_grad=True)
    model(start * 2).sum().backward()
    expected, start.grad = start.grad, None
    planned = prepare(model, (torch.randn(4, 6, requires_grad=True),)).planned("recompute_late")
    planned(start * 2).sum().backward()
    assert torch.equal(start.grad, expected)


def test_arguments_by_name_by_position_and_by_default() -> None:
    model, x = Options(), torch.randn(4, 6)
    expected = model(x)
    for inputs in ((x,), {"x": x}, (x, None), {"mask": None, "x": x, "scale": 1.0}):
        planned = prepare(model, inputs).planned()
        for found in (
            planned(x),
            planned(x=x),
            planned(x, None, 1.0),
            planned(scale=1.0, x=x),
            planned(x, scale=1.0, mask=None),
        ):
            assert torch.equal(found, expected)
