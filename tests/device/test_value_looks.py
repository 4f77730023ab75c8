"""Forwards that look at values on the device: what they see is there, and the host waits as eager's
does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import memopt
from tests.device import accelerator
from tests.device.harness import DELAYS, LINK, delayed, settled


class _Looking(nn.Module):
    """Looks at values between two layers."""

    def __init__(self, look: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.look = nn.Linear(16, 64), nn.Linear(64, 4), look

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.look(torch.tanh(self.first(x))))
        return found


def _computed(h: Tensor) -> Tensor:
    return h * min(1.0, 1 / (h.norm().item() + 1e-6))


def _branching(h: Tensor) -> Tensor:
    return h * 2 if h.sum() > -1e9 else h


def _trained(model: nn.Module, count: int = 2) -> list[Tensor]:
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for number in range(count):
        x = torch.randn(32, 16, generator=torch.Generator().manual_seed(number)).to("fake:0")
        optimizer.zero_grad()
        out = model(x)
        out.square().mean().backward()
        optimizer.step()
        found += [out.detach().clone(), *(one.detach().clone() for one in model.parameters())]
    return found


def _waits(model: nn.Module) -> int:
    settled()
    before = accelerator.counts()[2]
    _trained(model, 1)
    return int(accelerator.counts()[2] - before)


@pytest.mark.parametrize("look", [_computed, _branching], ids=lambda one: one.__name__)
def test_values_are_there_when_they_are_looked_at(look: Callable[[Tensor], Tensor]) -> None:
    settled()  # and the device is there
    model = _Looking(look).to("fake:0")
    plan = memopt.plan(
        model, torch.ones(32, 16).to("fake:0"), strategy="rotor", budget="min", progress=False
    )
    for most in DELAYS:
        twin = copy.deepcopy(model)
        planned = plan.apply(copy.deepcopy(model))
        with delayed(most):
            found = _trained(planned)
        pairs = zip(found, _trained(twin), strict=True)
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)
        assert _waits(planned) == _waits(twin)
        assert memopt.running(planned).calls.original == 0


class _Selecting(nn.Module):
    """Selects by a buffer, and repeats by another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 64), nn.Linear(42, 4)
        self.register_buffer("mask", torch.arange(64) % 3 != 0)
        self.register_buffer("counts", torch.arange(32) % 3)

    def forward(self, x: Tensor) -> Tensor:
        selected = torch.tanh(self.first(x))[:, self.mask]
        found: Tensor = self.last(selected.repeat_interleave(self.counts, 0))
        return found


def test_selections_by_buffers_never_fail_on_the_device() -> None:
    """Not measured with other counts, and not in a step with other counts, which runs unplanned."""
    settled()
    model = _Selecting().to("fake:0")
    plan = memopt.plan(
        model, torch.ones(32, 16).to("fake:0"), strategy="rotor", budget="min", progress=False
    )
    twin, planned = copy.deepcopy(model), plan.apply(copy.deepcopy(model))
    for changed in (False, True):
        for one in (twin, planned):
            one.get_buffer("counts")[0] = 2 * changed
        pairs = zip(_trained(planned), _trained(twin), strict=True)
        assert all(torch.equal(one.cpu(), other.cpu()) for one, other in pairs)
        assert bool(memopt.running(planned).calls.original) == changed


class _Chosen(_Selecting):
    """Selects by an input."""

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.first(x))[chosen]
        return found


def test_no_memory_to_read_a_value_of_the_inputs() -> None:
    settled()
    model, inputs = _Chosen().to("fake:0"), (torch.ones(32, 16), torch.arange(32) > 20)
    x, chosen = (one.to("fake:0") for one in inputs)
    planned = memopt.plan(model, (x, chosen), budget=1.0, progress=False).apply(model)
    for failing in (False, True, False):
        accelerator.fail_in(0, failing)
        if failing:
            with pytest.raises(torch.OutOfMemoryError):
                planned(x, chosen)
        else:
            planned(x, chosen).sum().backward()
    assert memopt.running(planned).calls.planned == 2


def _stage() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 16)
    return nn.Sequential(*layers).to("fake:0")


def _halves(model: nn.Module) -> list[Tensor]:
    """Run the first halves of two calls' backwards, use freed memory, then the second halves."""
    inputs = [torch.ones(32, 16).mul(i + 1).to("fake:0").requires_grad_() for i in range(2)]
    found: list[Tensor] = []
    waiting = []
    for one, output in [(one, model(one)) for one in inputs]:
        given, groups = stage_backward_input(
            [output], [output.detach().clone()], [one], model.parameters()
        )
        found += [gradient for gradient in given if gradient is not None]
        waiting.append(groups)
    for groups in waiting:
        for _ in range(10):
            torch.full((64, 64), float("nan"), device="fake:0")
        stage_backward_weight(model.parameters(), groups)
    return [one.cpu() for one in (*found, *(p.grad for p in model.parameters())) if one is not None]


@pytest.mark.parametrize("strategy", ["rotor", "offload-graph"])
def test_what_waits_between_two_halves_stays(strategy: str) -> None:
    settled()
    example, expected = torch.ones(32, 16).to("fake:0").requires_grad_(), _halves(_stage())
    asked = {"strategy": strategy, "budget": "min", "device": LINK, "progress": False}
    plan = memopt.plan(_stage(), example, **asked)
    for most in DELAYS:
        planned = plan.apply(_stage())
        with delayed(most):
            assert all(map(torch.equal, _halves(planned), expected))
        assert memopt.running(planned).calls.planned == 2
