"""Whatever a model returns comes back the same: structure, sharing, bits, gradients."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from memopt.errors import CaptureError
from tests.executor.harness import Case, check, prepare

Pair = namedtuple("Pair", "y hidden")  # what users write


@dataclass
class Fields:
    y: Tensor
    hidden: Tensor | None = None


torch.export.register_dataclass(Fields, serialized_type_name="tests.Fields")


@dataclass
class Unknown:
    y: Tensor


class TwoLayers(nn.Module):
    """Two linear layers; a test's function of (a, b, x) is the forward."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.b = nn.Linear(6, 6)
        self.function = forward

    def forward(self, x: Tensor) -> Any:
        return self.function(self.a, self.b, x)


def hidden_and_y(a: nn.Module, b: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = a(x).tanh()
    return hidden, b(hidden).exp()


def view_of_input(a, b, x):
    return a(x), x.view(2, 12), x.t()


def input_itself(a, b, x):
    return b(a(x).tanh()), x


def views_of_one(a, b, x):
    _, y = hidden_and_y(a, b, x)
    return y, y.view(2, 12), y[0], y.t()


def views_without_their_base(a, b, x):
    _, y = hidden_and_y(a, b, x)
    return y.view(2, 12), y[1:]


def twice(a, b, x):
    _, y = hidden_and_y(a, b, x)
    return y, y


def parameters(a, b, x):
    return b(a(x).tanh()), a.weight, b.weight.t()


def none_and_values(a, b, x):
    return hidden_and_y(a, b, x)[1], None, 3, "text", 2.5, True


def nested(a, b, x):
    hidden, y = hidden_and_y(a, b, x)
    return {"y": y, "list": [hidden, (y.sum(), None)], "empty": [], "size": {"rows": x.shape[0]}}


def named_tuple(a, b, x):
    hidden, y = hidden_and_y(a, b, x)
    return Pair(y, hidden)


def data_class(a, b, x):
    hidden, y = hidden_and_y(a, b, x)
    return Fields(y, hidden)


def model_output(a, b, x):
    hidden, y = hidden_and_y(a, b, x)
    return BaseModelOutput(last_hidden_state=y, hidden_states=(hidden,))


def without_gradient(a, b, x):
    hidden, y = hidden_and_y(a, b, x)
    return y, hidden.argmax(-1), hidden.detach(), hidden > 0


def several_results(a, b, x):
    first, second = a(x).chunk(2, -1)
    stacked = torch.stack([first, second]).unbind(0)
    values, _ = torch.topk(b(x), 3)
    return stacked[0] * values, torch.max(second, 0).values


def overlapping(a, b, x):
    hidden, y = hidden_and_y(a, b, x)
    return y.unfold(-1, 3, 1), hidden.sum(0).expand(3, 6), b(hidden).as_strided((4, 4), (3, 2))


def with_gaps(a, b, x):
    hidden, y = hidden_and_y(a, b, x)
    return y[:, ::2], hidden[:, 1], y.view(2, 2, 2, 3).permute(0, 3, 1, 2), hidden.chunk(2)


def views_among_uses(a, b, x):
    """Autograd adds the gradients of views and of uses in the order of their making."""
    hidden = a(x).tanh()
    return hidden[:, :4], hidden.exp(), hidden.t(), b(hidden), hidden.square(), hidden[1:, 2:]


def detached_beside(a, b, x):
    y = b(a(x).tanh()).transpose(0, 1)
    return y.detach(), y, y.exp().detach()


def changed_in_place(a, b, x):
    y = b(a(x).tanh())
    first = y[:, :2]
    first.mul_(2)
    return y, first, y[2:]


def views_of_parameters(a, b, x):
    return b(a(x).tanh()), a.weight.t(), a.weight[0], b.bias.view(2, 3), x[1:]


def complex_views(a, b, x):
    _, y = hidden_and_y(a, b, x)
    turned = torch.view_as_complex(y.view(4, 3, 2))
    return torch.view_as_real(turned.conj() * turned), y


FORWARDS = [
    view_of_input,
    input_itself,
    views_of_one,
    views_without_their_base,
    twice,
    parameters,
    none_and_values,
    nested,
    named_tuple,
    data_class,
    model_output,
    without_gradient,
    several_results,
    overlapping,
    with_gaps,
    views_among_uses,
    detached_beside,
    changed_in_place,
    views_of_parameters,
    complex_views,
]


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_output(forward: Callable[..., Any]) -> None:
    check(Case(lambda: TwoLayers(forward), lambda: (torch.randn(4, 6),)))


@pytest.mark.parametrize(
    "forward", [view_of_input, input_itself, views_of_parameters], ids=lambda f: f.__name__
)
def test_output_of_an_input_that_requires_grad(forward: Callable[..., Any]) -> None:
    check(Case(lambda: TwoLayers(forward), lambda: (torch.randn(4, 6, requires_grad=True),)))


def test_unregistered_class_is_refused() -> None:
    model = TwoLayers(lambda a, b, x: Unknown(b(a(x))))
    with pytest.raises(
        CaptureError, match=r"Unknown.*return a tuple or a dict.*register_dataclass"
    ):
        prepare(model, torch.randn(4, 6))


def test_outputs_the_loss_does_not_use() -> None:
    def forward(a, b, x):
        hidden = a(x)
        return b(hidden.tanh()), hidden.exp(), b(hidden).sin()

    def loss(output: tuple[Tensor, ...]) -> Tensor:
        return output[0].square().sum()

    check(Case(lambda: TwoLayers(forward), lambda: (torch.randn(4, 6),), loss=loss))


def test_tangents_without_memory_of_their_own() -> None:
    # The gradient of sum() is one expanded number.
    check(
        Case(
            lambda: TwoLayers(lambda a, b, x: b(a(x).tanh())),
            lambda: (torch.randn(4, 6),),
            loss=torch.sum,
        )
    )


def test_tangents_of_another_layout_are_taken_in_the_outputs_layout() -> None:
    """AOTAutograd traces the backward for tangents laid out as the outputs; others are copied.
    Kernels that sum in memory order may then round differently from the unplanned model's."""
    torch.manual_seed(0)
    model, x = nn.Conv2d(3, 4, 1), torch.randn(2, 3, 16, 16)
    y = model(x)
    tangent = torch.randn(2, 16, 16, 4).permute(0, 3, 1, 2)
    results = []
    planned = prepare(model, x).planned("recompute_all")
    for module, gradient in (
        (model, tangent.contiguous()),
        (planned, tangent),
        (model, tangent),
    ):
        model.zero_grad()
        module(x).backward(gradient)
        results.append([p.grad.clone() for p in model.parameters()])
    assert y.stride() != tangent.stride()
    assert all(map(torch.equal, results[0], results[1]))
    for found, expected in zip(results[1], results[2], strict=True):
        torch.testing.assert_close(found, expected)
