"""Forwards that set a buffer to another tensor, with checkpoints, which eager runs again."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import memopt
from memopt.errors import CaptureError


class Averages(nn.Module):
    """Keeps an average of what it computes. reads: whether the checkpoint reads it, too."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear, self.reads = nn.Linear(4, 4), reads
        self.register_buffer("mean", torch.ones(()))

    def part(self, x: Tensor, mean: Tensor | None = None) -> Tensor:
        scale = self.mean if self.reads else 1 if mean is None else mean
        return (self.linear(x) * scale).tanh()

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.part, x, use_reentrant=False)
        self.mean = self.mean * 0.5 + y.detach().mean()
        return y * self.mean


class Remedied(Averages):
    """Hands a copy of the average to the checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        y = checkpoint(self.part, x, self.mean.clone(), use_reentrant=False)
        self.mean = self.mean * 0.5 + y.detach().mean()
        return y * self.mean


@pytest.mark.parametrize("kind", [Averages, Remedied])
def test_steps_are_eagers(kind: type[Averages]) -> None:
    x = torch.randn(3, 4)
    eager, model = kind(False), kind(False)
    planned = memopt.plan(model, x, cache=False, progress=False).apply(model)
    for _ in range(3):
        for one in (eager, planned):
            one(x).sum().backward()
        assert torch.equal(model.linear.weight.grad, eager.linear.weight.grad)
        assert torch.equal(model.mean, eager.mean)


def test_what_a_checkpoint_reads_again_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"sets mean to another tensor.*self\.mean\.clone\(\)"):
        memopt.plan(Averages(True), torch.randn(3, 4), cache=False, progress=False)
