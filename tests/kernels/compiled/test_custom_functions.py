"""Custom autograd functions in `torch.compile(model, backend="memopt")`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from memopt.integrations.torch_compile import CompiledStep, memopt_backend


class SeveralResults(torch.autograd.Function):
    """Two results with gradients and one without, a number, and something kept by hand."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.factor, ctx.kept = factor, x.exp()
        positive = x > 0
        ctx.mark_non_differentiable(positive)
        return x * factor, x.sum(-1), positive

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (x,) = ctx.saved_tensors
        first, second, _ = gradients
        return first * ctx.factor + second.unsqueeze(-1) * ctx.kept * x, None


class NewerStyle(torch.autograd.Function):
    """With a context of its own, and two operands."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return x @ weight, x.tanh()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs, output[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, bent = ctx.saved_tensors
        first, second = gradients
        return first @ weight.t() + second * (1 - bent * bent), x.t() @ first


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0]


def several(x: Tensor, _: Tensor) -> Tensor:
    for _ in range(2):
        x, total, positive = SeveralResults.apply(x, 1.5)
        x = x * positive + total.unsqueeze(-1)
    return x


def newer(x: Tensor, weight: Tensor) -> Tensor:
    first, second = NewerStyle.apply(x, weight)
    return first + second.sin()


def straight(x: Tensor, _: Tensor) -> Tensor:
    return StraightThrough.apply(StraightThrough.apply(x) * 2).cos()


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 8), function
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x), self.weight)


@pytest.fixture(autouse=True)
def _afresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("function", [several, newer, straight])
def test_custom_functions_are_planned(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x = Net(function), torch.randn(4, 8)
    twin = copy.deepcopy(model)
    names: list[str] = []
    planned = CompiledStep.planned

    def noted(self: CompiledStep, name: str, module: Any, args: Any) -> Any:
        names.append(name)
        return planned(self, name, module, args)

    monkeypatch.setattr(CompiledStep, "planned", noted)
    run = torch.compile(model, backend=memopt_backend, options={"budget": "min"}, fullgraph=True)
    for _ in range(2):
        found, expected = run(x), twin(x)
        assert torch.equal(found, expected)
        for output in (found, expected):
            output.sum().backward()
    assert len(names) == 1
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    assert all(p.grad is q.grad is None or torch.equal(p.grad, q.grad) for p, q in pairs)
    with torch.no_grad():
        assert torch.equal(run(x), twin(x))
