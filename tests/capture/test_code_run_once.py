"""Code that may draw or change something by itself runs once in a call, however branches go."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.errors import CaptureError
from memopt.user_code.told_layouts import is_python


def _mask(x: Tensor) -> Tensor:
    return torch.from_numpy(np.random.rand(*x.shape) > 0.5).to(x.dtype)


class _Drops(torch.autograd.Function):
    """Draws in NumPy, by a helper, which no planned step can undo."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = _mask(x)
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0]


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _cube(gradient: Any, x: Tensor) -> Tensor:
    found: Tensor = gradient * 3 * x.square()
    return found


@torch.library.custom_op("memopt_tests::cubed", mutates_args=())
def cubed(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() ** 3)


@torch.library.custom_op("memopt_tests::cubed_told", mutates_args=())
def cubed_told(x: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() ** 3)


cubed_told.register_fake(torch.empty_like)
for _one in (cubed, cubed_told):
    _one.register_autograd(lambda ctx, g: _cube(g, *ctx.saved_tensors), setup_context=_keep)


class _Turning(nn.Module):
    """Runs such code before a branch on an activation."""

    def __init__(self, call: Callable[[Tensor], Tensor], where: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16))
        self.call, self.where = call, where

    def forward(self, x: Tensor) -> Tensor:
        h = self.call(self.body(x))
        if self.where:
            return torch.where(h.sum() > 0, h * 2, h)
        return h * 2 if h.sum() > 0 else h


def _trained(model: nn.Module) -> list[Tensor]:
    np.random.seed(0)
    found = []
    for number in range(6):
        model.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        loss = model(x).square().mean()
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters())]  # type: ignore[union-attr]
    return [*found, torch.from_numpy(np.random.rand(2))]


def _drops(h: Tensor) -> Tensor:
    found: Tensor = _Drops.apply(h)
    return found


def _told(h: Tensor) -> Tensor:
    found: Tensor = cubed_told(h)
    return found


CALLS = {"_Drops": _drops, "memopt_tests::cubed": cubed}
LINES = {"_Drops": r"_Drops\.apply\(h\)", "memopt_tests::cubed": r"self\.call\(self\.body"}
REMEDIES: dict[str, tuple[nn.Module, dict[str, str]]] = {
    "torch.where": (_Turning(_drops, where=True), {}),
    "a fake kernel": (_Turning(_told), {}),
    "parts": (_Turning(_drops), {"parts": "auto"}),
}


@pytest.mark.parametrize("name", CALLS)
def test_beside_a_branch_on_an_activation_it_is_refused(name: str) -> None:
    lines = rf"{name} at .*{LINES[name]}.*h\.sum\(\) > 0.*would come twice"
    with pytest.raises(CaptureError, match=lines):
        memopt.plan(_Turning(CALLS[name]), torch.ones(4, 8), strategy="store-all", progress=False)


@pytest.mark.parametrize("remedy", REMEDIES)
def test_each_remedy_is_exact(remedy: str) -> None:
    model, options = REMEDIES[remedy]
    expected = _trained(copy.deepcopy(model))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a call goes otherwise
        wrapped: Any = memopt.wrap(model, "min", progress=False, **options)
        got = _trained(wrapped)
    assert wrapped.calls.planned > 2
    assert all(map(torch.equal, got, expected))


def test_a_plain_function_that_draws_in_numpy_is_refused() -> None:
    opaque = memopt.opaque(lambda h: h * _mask(h))
    model = _Turning(opaque, where=True)
    with pytest.raises(CaptureError, match=r"draws random numbers.*torch\.autograd\.Function"):
        memopt.plan(model, torch.ones(4, 8), strategy="store-all", progress=False)


def test_kernels_of_torch_are_not_pythons() -> None:
    assert is_python(torch.ops.memopt_tests.cubed.default)
    assert not is_python(torch.ops.aten.mm.default)
