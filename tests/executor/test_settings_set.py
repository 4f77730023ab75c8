"""A forward that sets how torch computes, or leaves NumPy arrays, is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import memopt
from memopt.errors import CaptureError

KEPT: list[Any] = []


class Net(nn.Module):
    def __init__(self, touch: Callable[[Net, Tensor, Any], Any]) -> None:
        super().__init__()
        self.layer, self.touch, self.kept = nn.Linear(3, 3), touch, dict[str, Any]()

    def forward(self, x: Tensor, out: Any = None) -> Any:
        h = self.layer(x)
        return h.sin(), self.touch(self, h, out)


def plan(touch: Callable[[Net, Tensor, Any], Any]) -> None:
    memopt.plan(Net(touch), (torch.randn(2, 3), []), progress=False, cache=False)


def flash(*_: Any) -> None:
    torch.backends.cuda.enable_flash_sdp(False)


def sets_benchmark(*_: Any) -> None:
    torch.backends.cudnn.benchmark = True


def for_a_table(_net: Net, h: Tensor, _: Any) -> Tensor:
    torch.set_default_dtype(torch.float64)
    table = torch.linspace(0, 1, 3)
    torch.set_default_dtype(torch.float32)
    return h + table.float()


SETTINGS: dict[str, Callable[..., Any]] = {
    "default_dtype": for_a_table,
    "deterministic_algorithms": lambda *_: torch.use_deterministic_algorithms(True, warn_only=True),
    "matmul_precision": lambda *_: torch.set_float32_matmul_precision("medium"),
    "flash_sdp": flash,
    "cudnn.benchmark": sets_benchmark,
    "default device": lambda *_: torch.set_default_device("cpu"),
}


def settings() -> list[Any]:
    cuda = torch.backends.cuda
    return [
        torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(), cuda.flash_sdp_enabled(),
        torch.backends.cudnn.benchmark, torch.get_default_device(),
    ]  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_settings(name: str) -> None:
    before = settings()
    with pytest.raises(CaptureError, match=rf"sets .*{name}.*before planning"):
        plan(SETTINGS[name])
    assert settings() == before


class Doubles(TorchFunctionMode):
    """Doubles sines."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = function(*args, **kwargs or {})
        return 2 * found if function in (torch.sin, Tensor.sin) else found


def test_a_mode_that_the_forward_enters_and_leaves_is_planned() -> None:
    """As transformers does where it makes masks of images (Gemma 3)."""

    def touch(_net: Net, h: Tensor, _: Any) -> Tensor:
        with Doubles():
            return h.sin()

    model, x = Net(touch), torch.randn(2, 3)
    planned = memopt.plan(model, x, progress=False, cache=False).apply(model)
    for one, doubled in zip(planned(x), model(x), strict=True):
        assert torch.equal(one, doubled)
    assert torch.equal(planned(x)[1], 2 * planned(x)[0])


def test_a_mode_that_the_forward_leaves_behind_is_refused() -> None:
    mode = Doubles()

    def touch(_net: Net, h: Tensor, _: Any) -> Tensor:
        mode.__enter__()
        return h.sin()

    with pytest.raises(CaptureError, match="leaves a mode behind"):
        plan(touch)


ARRAYS: dict[str, Callable[[Net, Tensor, Any], Any]] = {
    "KEPT": lambda net, h, out: KEPT.append(h.detach().numpy()),
    "model.kept": lambda net, h, out: net.kept.update(last=[{"h": h.detach().numpy()}]),
    "model.own": lambda net, h, out: setattr(net, "own", np.zeros(3)),
    "an argument": lambda net, h, out: out.append(h.detach().numpy()),
    "returns": lambda net, h, out: h.detach().numpy(),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays(name: str) -> None:
    with pytest.raises(CaptureError, match=rf"NumPy array.*{name}|{name}.*NumPy array"):
        plan(ARRAYS[name])
    assert not KEPT
