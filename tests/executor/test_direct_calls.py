"""Kernels are called by torch's bindings, below autograd, only where that changes nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.executor.direct_calls import direct
from memopt.torch_private.modes import TorchDispatchMode
from memopt.torch_private.operators import aten, unwrapped
from tests.executor.harness import prepare
from tests.executor.tiny_gpt import TinyGPT, batch, calls_of, loss_of

SQUARE, ROW = torch.ones(3, 3), torch.ones(3)


@pytest.mark.parametrize(
    ("overload", "args", "kwargs", "binding"),
    [
        (aten.add.Tensor, (SQUARE, ROW), {"alpha": 2}, torch.add),
        (aten.addmm.out, (ROW, SQUARE, SQUARE), {"out": SQUARE}, torch.addmm),
        (aten.view.default, (SQUARE, [9]), {}, torch.Tensor.view),
        (aten.gelu.default, (SQUARE,), {}, torch.nn.functional.gelu),
        # `torch.mul(x, 2.0)` is another overload, which casts otherwise.
        (aten.mul.Scalar, (SQUARE, 2.0), {}, None),
        # There is no function of this name.
        (aten.native_dropout_backward.default, (SQUARE, SQUARE > 0, 2.0), {}, None),
        # Composed of others: the dispatcher is asked for those.
        (aten.linear.default, (SQUARE, SQUARE), {}, None),
    ],
    ids=lambda one: str(one) if "OpOverload" in type(one).__name__ else "",
)
def test_a_binding_is_used_if_it_asks_for_the_same_overload(
    overload: Any, args: tuple[Any, ...], kwargs: dict[str, Any], binding: Any
) -> None:
    expected = unwrapped(overload) if binding is None else binding
    assert direct(overload, args, kwargs) == expected


class Seen(TorchDispatchMode):
    """Records the operators that are called under it, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x)).view(-1, 6))


def test_a_mode_around_the_backward_sees_the_captured_operators() -> None:
    """Also if the forward, which no mode surrounds, has run without any regard to modes."""
    seen = []
    prepared = prepare(Small(), (torch.randn(2, 3, 4),))
    for interpreted in (True, False):
        planned = prepared.planned(interpreted=interpreted)
        planned.zero_grad()
        loss = planned(torch.randn(2, 3, 4)).sum()
        with Seen() as mode:
            loss.backward()
        seen.append(mode.names)
    assert len(seen[0]) > 4
    assert seen[0] == seen[1]


LIBRARY = torch.library.Library("memopt_direct", "DEF")
LIBRARY.define("slope(Tensor x) -> Tensor")
LIBRARY.impl("slope", torch.cos, "CPU")
torch.library.register_fake("memopt_direct::slope", torch.empty_like, lib=LIBRARY)


class Sloping(nn.Module):
    """Calls a user's kernel, which may differentiate inside, in the forward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.ops.memopt_direct.slope(x.detach())


def test_users_kernels_run_above_autograd() -> None:
    code = prepare(Sloping(), (torch.randn(2, 4),)).planned().code
    assert re.search(r"^    slope\w* = memopt_direct_slope_default\(", code, re.MULTILINE)
    assert re.search(r"^        \w+ = aten_addmm_default\(", code, re.MULTILINE)


class TwoViews(nn.Module):
    """Two outputs are views of one tensor, of which one is viewed for a kernel, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.linear(x)
        return y.view(2, 2, 2), y.t(), (y.view(8) * 2).exp()


def test_a_change_of_one_output_is_noticed_for_the_other() -> None:
    planned = prepare(TwoViews(), (torch.randn(2, 4),)).planned()
    first, second, _ = planned(torch.randn(2, 4))
    before = first._version
    assert before == second._version
    with torch.no_grad():
        first.detach().add_(1)
    assert first._version == second._version == before + 1


@pytest.mark.parametrize("strategy", ["store-all", "rotor"])
def test_calls_of_one_more_layer(strategy: str) -> None:
    """The host's work: what a layer adds to a step's calls, for each kernel that eager runs."""

    def calls(layers: int) -> tuple[int, int, int]:
        torch.manual_seed(0)
        model, (ids, targets) = TinyGPT(layers), batch()
        plan = memopt.plan(
            model, ids, loss_fn=loss_of, targets=(targets,), strategy=strategy, progress=False
        )

        def step(module: nn.Module) -> None:
            loss_of(module(ids), targets).backward()  # type: ignore[no-untyped-call]
            for parameter in parameters:
                parameter.grad = None

        parameters = list(model.parameters())
        planned = plan.apply(model)
        for _ in range(2):  # in the first two it looks whether hooks on gradients draw
            step(planned)
        with Seen() as mode:
            step(model)
        return *calls_of(lambda: step(planned)), len(mode.names)

    (python, c, kernels), (less, fewer, before) = calls(3), calls(1)
    assert kernels - before > 70
    # AOTAutograd's, which flattens the parameters; of memopt's own there is one in ten kernels.
    assert python - less < 2 * (kernels - before)
    # The kernel, a view, a look at a layout, and what is done for each parameter.
    assert c - fewer < 6 * (kernels - before)
