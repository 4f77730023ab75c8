"""A backward under other settings of torch than its forward is warned of where it matters."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memopt

Context = Callable[[], AbstractContextManager[Any]]


def off() -> AbstractContextManager[Any]:
    return torch.backends.mkldnn.flags(enabled=False)


def trained(
    budget: Any, forward: Context = nullcontext, backward: Context = nullcontext
) -> tuple[list[str], bool]:
    """What two planned steps warned of, and whether their gradients are eager's."""
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GELU())]
    model, x = nn.Sequential(*layers), torch.randn(2, 8, 12, 12)
    planned = memopt.plan(model, x, budget=budget, strategy="rotor", progress=False).apply(model)
    gradients = []
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for one in (planned, planned, model):
            model.zero_grad()
            with forward():
                loss = one(x).square().sum()
            with backward():
                loss.backward()
            gradients.append([p.grad.clone() for p in model.parameters()])
    told = [str(one.message) for one in seen if "backward" in str(one.message)]
    return told, all(map(torch.equal, *gradients[1:]))


@pytest.mark.parametrize("which", ["forward", "backward"])
def test_other_kernels_in_the_backward_are_warned_of_once(which: Any) -> None:
    (told,), _ = trained("min", **{which: off})
    was, now = (False, True) if which == "forward" else (True, False)
    begin = f"torch.backends.mkldnn.enabled was {was} in the forward and is {now} in its backward"
    assert re.match(rf"(memopt: )?{re.escape(begin)}.*last bits", told)


class Louder(TorchDispatchMode):
    """Changes what products return."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return 1.5 * found if func is torch.ops.aten.convolution.default else found


def test_a_mode_around_the_backward_alone_is_warned_of_once() -> None:
    """In eager it changes no convolution there."""
    (told,), same = trained("min", backward=Louder)
    assert "Louder is active around backward()" in told
    assert not same
    assert trained(None, backward=Louder) == ([], True)


@pytest.mark.parametrize(("budget", "forward"), [("min", off), (None, off), (None, nullcontext)])
def test_settings_that_are_the_same_or_change_nothing_are_not(budget: Any, forward: Any) -> None:
    """A plan that computes nothing again needs none."""
    assert trained(budget, forward, off) == ([], True)
