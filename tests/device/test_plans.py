"""Plans on the device: eager's bits there whatever is late, and memory within the budgets."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import memopt
from memopt.step.backend import backend_of
from tests.device import accelerator
from tests.device.harness import DELAYS, LINK, Subject, delayed, net, on, same, settled
from tests.zoo import FAMILIES, Family, call

WAYS: dict[str, dict[str, Any]] = {
    "store-all": {"strategy": "store-all"},
    "rotor": {"strategy": "rotor", "budget": "min"},
    "offload": {"strategy": "offload-graph", "budget": "min", "device": LINK},
    "joint": {"strategy": "joint", "budget": "min", "device": LINK, "time_limit_s": 3},
    "placed": {"strategy": "rotor", "budget": "min", "place": True},
}
MAIN = ("rotor", "offload", "placed")
BY_WAY = [pytest.param(way, marks=() if way in MAIN else pytest.mark.slow, id=way) for way in WAYS]
"""All of them; the usual test run leaves out those that share their code with others."""

QUICK = {
    "mlp": tuple(WAYS),
    "unet": ("rotor", "offload"),
    "gpt2": ("placed", "offload"),
    "resnet50": ("rotor",),
}


def check(one: Subject, **asked: Any) -> memopt.Plan:
    """The plan's steps have eager's bits under all delays; peaks are within the budgets."""
    wanted = one.grads()
    assert same(one.grads(), wanted)
    plan = memopt.plan(one.profiled, progress=False, **asked)
    accelerator.reset_pinned_peak()
    before, _ = accelerator.pinned()
    module = plan.apply(one.model)
    for most in DELAYS:
        with delayed(most):
            assert same(one.grads(module), wanted), most
    # The step's own scalars are charged as resident, and metered: count them once.
    resident_bytes = plan.resident_bytes - backend_of(one.device).step_scalars_bytes
    measured = resident_bytes + one.peak_bytes(module)
    assert plan.budget is None or measured <= plan.budget
    assert abs(measured - plan.peak_bytes) <= 0.01 * plan.peak_bytes
    assert accelerator.pinned()[1] - before <= plan.host_peak_bytes
    return plan


@pytest.mark.parametrize("way", WAYS)
def test_dropout_and_residuals(way: str, device: torch.device) -> None:
    plan = check(own_net(str(device)), **WAYS[way])
    assert (plan.host_peak_bytes > 0) == (way in ("offload", "joint"))
    assert ("slots[" in plan.code) == (way == "placed")


class Averages(nn.Module):
    """Each block has statistics, a counter and an average that is as large as its activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm1d(96) for _ in range(4))
        for number in range(4):
            self.register_buffer(f"average_{number}", torch.zeros(64, 96))

    def forward(self, x: Tensor) -> Tensor:
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            x = norm(layer(x)).relu()
            average = self.get_buffer(f"average_{number}")
            average.copy_(0.9 * average + 0.1 * x.detach())
        return x


@functools.lru_cache(1)
def averages(device: torch.device) -> Subject:
    torch.manual_seed(0)
    return Subject(Averages().to(device), (torch.randn(64, 96).to(device),), Tensor.sum)


SIBLINGS = [pytest.param(way, marks=pytest.mark.slow) for way in WAYS if way != "rotor"]


@pytest.mark.parametrize("way", ["rotor", *SIBLINGS])
def test_what_buffers_become_is_gone_when_the_loss_runs(way: str, device: torch.device) -> None:
    plan = check(averages(device), **WAYS[way])
    # Statistics, which the backward does not look at, counters and averages.
    assert len(plan.graph.written_back) == 4 * 4


def test_within_a_host_budget(device: torch.device) -> None:
    ways = WAYS["offload"] | {"host_budget": 120_000, "budget": 0.85}
    plan = check(own_net(str(device)), **ways)
    assert 0 < plan.host_peak_bytes <= 120_000


own_net = functools.lru_cache(2)(net)


@functools.lru_cache(1)
def family(one: Family, device: torch.device) -> Subject:
    model = one.build("tiny").to(device)
    inputs = on(device, one.inputs("tiny"))
    return Subject(model, inputs, one.loss, call)


CASES = [
    pytest.param(
        one,
        way,
        id=f"{one}-{way}",
        marks=() if way in QUICK.get(str(one), ()) else pytest.mark.slow,
    )
    for one in FAMILIES
    for way in WAYS
]


@pytest.mark.parametrize(("family_", "way"), CASES)
def test_families(family_: Family, way: str, device: torch.device) -> None:
    check(family(family_, device), **WAYS[way])


@pytest.mark.parametrize("way", BY_WAY)
def test_on_the_device_that_is_not_current(way: str, device: torch.device) -> None:
    settled()
    used = accelerator.mod.memory_allocated(0)
    check(own_net("fake:1"), **WAYS[way])
    assert accelerator.mod.current_device() == 0
    assert accelerator.mod.memory_allocated(0) == used
