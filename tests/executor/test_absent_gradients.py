"""Hooks on parameters whose gradient a loss does not give: autograd calls none without a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt

Loss = Callable[[nn.Module, Tensor], Tensor]
Seen = list[tuple[str, Any]]


class Heads(nn.Module):
    """Two heads on one body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = nn.Linear(8, 16), nn.Linear(16, 4), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).relu()
        return self.left(hidden), self.right(hidden)


def built() -> Heads:
    torch.manual_seed(0)
    return Heads()


def one_head(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[0].square().mean()  # type: ignore[no-any-return]


def a_weight_beside(model: Any, x: Tensor) -> Tensor:
    return one_head(model, x) + model.right.weight.square().mean()


def two_calls(model: nn.Module, x: Tensor) -> Tensor:
    return one_head(model, x) + model(x * 2)[1].mean()


def hooks_of(model: nn.Module) -> int:
    return sum(
        len(hooks or ())
        for one in model.parameters()
        for hooks in (one._backward_hooks, one._post_accumulate_grad_hooks)
    )


def trained_in_backward(model: nn.Module, losses: list[Loss]) -> list[Seen]:
    """What hooks saw in each step, that scale gradients and step an optimizer per parameter."""
    steps: list[Seen] = []
    for name, parameter in model.named_parameters():
        optimizer = torch.optim.Adam([parameter], 0.01)

        def scaled(gradient: Tensor, name: str = name) -> Tensor:
            steps[-1].append((f"{name} on its way", gradient.clone()))
            return gradient * 2

        def stepped(p: Tensor, name: str = name, optimizer: Any = optimizer) -> None:
            assert p.grad is not None
            steps[-1].append((f"{name} arrived", p.grad.clone()))
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)

        parameter.register_hook(scaled)  # type: ignore[no-untyped-call]
        parameter.register_post_accumulate_grad_hook(stepped)
    hooks = hooks_of(model)
    torch.manual_seed(1)
    for loss in losses:
        steps.append([])
        loss(model, torch.randn(8, 8)).backward()
        steps[-1] = sorted(steps[-1], key=lambda seen: seen[0])
        steps[-1] += [(name, value.detach().clone()) for name, value in model.named_parameters()]
    assert hooks_of(model) == hooks
    return steps


def other_head(model: nn.Module, x: Tensor) -> Tensor:
    return model(x)[1].square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "losses",
    [
        [one_head] * 3,
        [one_head, other_head] * 3,
        [one_head, a_weight_beside, other_head, two_calls],
    ],
    ids=["one head", "in turns", "gradients from elsewhere"],
)
def test_hooks_are_called_where_a_gradient_arrives_alone(losses: list[Loss]) -> None:
    expected = trained_in_backward(built(), losses)
    model = built()
    memopt.wrap(model, "min", progress=False)
    for got, wanted in zip(trained_in_backward(model, losses), expected, strict=True):
        assert [name for name, _ in got] == [name for name, _ in wanted]
        assert all(map(torch.equal, (one for _, one in got), (one for _, one in wanted)))
    assert memopt.running(model).calls.planned >= len(losses)


def test_a_hook_that_removes_itself_stays_removed() -> None:
    model = built()
    memopt.wrap(model, "min", progress=False)
    handles: list[Any] = []
    handles.append(
        model.left.weight.register_post_accumulate_grad_hook(lambda _: handles.pop().remove())
    )
    for loss in (one_head, other_head, two_calls):
        loss(model, torch.randn(8, 8)).backward()
    assert not handles
    assert not model.left.weight._post_accumulate_grad_hooks
