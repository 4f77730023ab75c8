"""Models on the device, under plans, beside what they do without: bits, bytes, waits."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import memopt
from memopt.pricing import device_measure
from memopt.pricing.device_probes import row_probes
from memopt.profiler import Loss, MeasureOptions, Profiled, profile_model
from tests.device import accelerator

LINK = memopt.Device(name="link", to_host_bytes_per_s=1e9, from_host_bytes_per_s=1e9)
DELAYS: Sequence[tuple[int, int]] = ((200, 200), (0, 600), (300, 0))
"""Of the compute stream and of the copies, in µs: alike; copies late; kernels late."""


class Net(nn.Module):
    """Residual blocks with dropout."""

    def __init__(self, dropout: float = 0.1, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.first = nn.Linear(16, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 4 * width),
                nn.GELU(),
                nn.Dropout(dropout),
                nn.Linear(4 * width, width),
            )
            for _ in range(depth)
        )
        self.last = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        found: Tensor = self.last(x)
        return found


def small_probes(patch: pytest.MonkeyPatch) -> None:
    """Measure links and rates in small: a GPU's sizes take a CPU minutes."""
    patch.setattr(device_measure, "_COPY_BYTES", 2**18)
    patch.setattr(device_measure, "_SQUARE", 8)
    patch.setattr(device_measure, "STREAM_ELEMENTS", 2**6)
    patch.setattr(device_measure, "PROBES", (lambda place, _: row_probes(place, 1),))


def on(device: torch.device | str, value: Any) -> Any:
    """Nested tensors on a device."""
    return pytree.tree_map_only(Tensor, lambda one: one.detach().to(device), value)


def settled() -> None:
    """Nothing is queued, and nothing waits to be freed."""
    gc.collect()
    for index in range(accelerator.mod.device_count()):
        accelerator.mod.synchronize(index)


@contextmanager
def delayed(most: tuple[int, int]) -> Iterator[None]:
    """Work on the device is held up at random."""
    accelerator.delay(*most)
    try:
        yield
    finally:
        accelerator.delay(0)


class Subject:
    """A model on a device with inputs and a loss.

    Args:
        model: on the device.
        inputs: of a call, a tuple.
        loss: scalar of the output.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        loss: Callable[[Any], Tensor],
        call: Callable[[nn.Module, Any], Any] = lambda module, inputs: module(*inputs),
    ) -> None:
        self.model, self.inputs, self.loss, self.call = model, inputs, loss, call
        self.device = next(model.parameters()).device
        self.buffers = {name: value.clone() for name, value in model.named_buffers()}

    def begin(self, seed: int = 5) -> None:
        """Be as before every other step."""
        self.model.zero_grad(set_to_none=True)
        for name, value in self.model.named_buffers():
            value.copy_(self.buffers[name])
        torch.manual_seed(seed)

    def step(self, module: nn.Module | None = None) -> None:
        """Forward and backward."""
        output = self.call(module or self.model, self.inputs)
        self.loss(output).backward()
        del output  # held until here, as loops do

    def grads(self, module: nn.Module | None = None, seed: int = 5) -> list[Tensor | None]:
        """Gradients and statistics after a step, on the host."""
        self.begin(seed)
        self.step(module)
        return self.left()

    @functools.cached_property
    def profiled(self) -> Profiled:
        """The model's step, measured in short."""
        options = MeasureOptions(cap_s=0.5, max_rounds=2)
        return profile_model(self.model, self.inputs, loss=Loss(self.loss), options=options)

    def left(self) -> list[Tensor | None]:
        settled()
        found = [one.grad for one in self.model.parameters()] + list(self.model.buffers())
        return [None if one is None else one.detach().cpu() for one in found]

    def peak_bytes(self, module: nn.Module) -> int:
        """What the allocator counts at the peak of a step, beyond what was there before."""
        self.begin()
        settled()
        before = accelerator.mod.memory_allocated(self.device)
        accelerator.mod.reset_peak_memory_stats(self.device)
        self.step(module)
        settled()
        peak: int = accelerator.mod.max_memory_allocated(self.device) - before
        return peak


def net(device: torch.device | str = "fake:0", dropout: float = 0.1) -> Subject:
    """A `Net` and a batch."""
    torch.manual_seed(0)
    model, x = Net(dropout).to(device), torch.randn(64, 16).to(device)
    target = (torch.arange(64) % 10).to(device)
    return Subject(model, (x,), lambda output: nn.functional.cross_entropy(output, target))


def same(found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]) -> bool:
    """Equal bits."""
    return len(found) == len(wanted) and all(
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(found, wanted, strict=True)
    )
