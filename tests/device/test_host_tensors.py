"""What kernels of an accelerator read or leave on the host is made, kept and read there."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memopt
from memopt.errors import CaptureError
from tests.device import accelerator

LINK = memopt.Device(name="link", to_host_bytes_per_s=1e9, from_host_bytes_per_s=1e9)
PLANS: dict[str, dict[str, Any]] = {
    "store-all": {"strategy": "store-all"},
    "rotor": {"strategy": "rotor", "budget": "min"},
    "offload": {"strategy": "offload-graph", "budget": "min", "device": LINK},
    "placed": {"strategy": "rotor", "budget": "min", "place": True},
}


def _weights(q: Tensor, k: Tensor, seed: int, p: float) -> tuple[Tensor, Tensor]:
    weights = torch.softmax(q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1]), -1)
    drawn = torch.rand(weights.shape, generator=torch.Generator().manual_seed(seed))
    return weights, (drawn >= p).to(weights) / (1 - p)


def _rows(value: Tensor) -> Tensor:
    return value.transpose(1, 2).contiguous().transpose(1, 2)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Any, lse: bool, p: float = 0.0, causal: bool = False
) -> tuple[Tensor, ...]:
    """As CUDA's kernel: the seed that it drew stays on the host."""
    seed = torch.randint(2**31, (), device=q.device).cpu()
    weights, kept = _weights(q, k, int(seed), p)
    rows = weights.new_zeros(*q.shape[:2], -(-q.shape[2] // 32) * 32)
    return _rows((weights * kept) @ v), rows, seed, torch.zeros((), dtype=torch.long)


def _backward(
    d: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Any, out: Tensor, lse: Tensor,
    seed: Tensor, offset: Tensor, p: float, mask: list[bool], causal: bool = False,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """As CUDA's kernel: it follows the seed's address on the host."""
    weights, kept = _weights(q, k, ctypes.c_int64.from_address(seed.data_ptr()).value, p)
    d_weights = (d @ v.transpose(-2, -1)) * kept
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdim=True))
    d_scores = d_scores / math.sqrt(q.shape[-1])
    d_v = (weights * kept).transpose(-2, -1) @ d
    return _rows(d_scores @ k), _rows(d_scores.transpose(-2, -1) @ q), _rows(d_v), None


@pytest.fixture
def attention(device: torch.device) -> Iterator[None]:
    """The device has a memory-efficient attention."""
    library = torch.library.Library("aten", "IMPL")
    name = "_scaled_dot_product_efficient_attention"
    library.impl(name, _forward, "PrivateUse1")
    library.impl(f"{name}_backward", _backward, "PrivateUse1")
    yield
    library._destroy()


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.ModuleList(nn.Linear(32, 96) for _ in range(3))
        self.out = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for into, out in zip(self.into, self.out, strict=True):
            parts = into(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
            attend = torch.ops.aten._scaled_dot_product_efficient_attention
            found = attend(parts[0], parts[1], parts[2], None, True, 0.3)[0]
            x = x + F.gelu(out(found.transpose(1, 2).flatten(2)))
        return x


class MadeOnHost(nn.Module):
    """Index tensors, numbers and noise that the forward makes without naming a device."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.scales = nn.Parameter(torch.ones(8, 32))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            noise = torch.rand(32)
            rows = self.scales[torch.arange(x.shape[1]) % 8]
            x = x + torch.tanh(layer(x * rows) * torch.rand(())) * noise.to(x.device)
        return x * torch.tensor(0.5)


def gradients(module: nn.Module, model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    module(x).square().sum().backward()
    torch.accelerator.synchronize(x.device)
    return [torch.rand(1), *(p.grad.cpu() for p in model.parameters() if p.grad is not None)]


def equal_under_delays(
    make: Callable[[], nn.Module], device: torch.device, how: dict[str, Any]
) -> memopt.Plan:
    torch.manual_seed(0)
    model = make().to(device)
    x = torch.randn(4, 16, 32).to(device)
    expected = gradients(model, model, x)
    plan = memopt.plan(model, x, progress=False, cache=False, **how)
    planned = plan.apply(model)
    for delay in (0, 300, 300):
        accelerator.delay(delay)
        assert all(map(torch.equal, gradients(planned, model, x), expected))
    return plan


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.usefixtures("attention")
def test_attentions_seed_is_read_on_the_host(name: str, device: torch.device) -> None:
    """Before, planning gave the backward a seed on the device, which ended the process."""
    plan = equal_under_delays(Attention, device, PLANS[name])
    seeds = [t for t in plan.graph.tensors if t.name.endswith("attention.2")]
    assert [t.size_bytes for t in plan.graph.tensors if "attention" in t.name].count(0) >= 6
    assert all(t.size_bytes == 0 for t in seeds)


@pytest.mark.parametrize("name", PLANS)
def test_tensors_that_a_forward_makes_on_the_host(name: str, device: torch.device) -> None:
    """Noise of the host is drawn once: only the device's generator is rewound."""
    equal_under_delays(MadeOnHost, device, PLANS[name])


def test_a_fake_kernel_that_names_another_place_is_refused(device: torch.device) -> None:
    library = torch.library.Library("memopt_tests", "FRAGMENT")
    library.define("hosted(Tensor x) -> Tensor")
    library.impl("hosted", lambda x: x.cpu(), "PrivateUse1")
    torch.library.register_fake("memopt_tests::hosted", torch.empty_like, lib=library)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.ops.memopt_tests.hosted(x).sum()

    with pytest.raises(CaptureError, match=r"leaves its result 0 on 'cpu'.*register_fake"):
        memopt.plan(Model().to(device), torch.ones(2, 8).to(device), progress=False, cache=False)
    library._destroy()
