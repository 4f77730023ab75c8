"""Process groups in one process, and a model whose parameters are flat shards that are gathered."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.distributed.gloo import in_one_thread

_GATHER = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
"""Under its new name, where torch has that."""


@contextlib.contextmanager
def fake_ranks(ranks: int) -> Iterator[None]:
    """Rank 0 of a process group of which the others are not there."""
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A real process group of this process, whose collectives run in a thread of gloo."""
    in_one_thread()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


class Gathered(nn.Module):
    """A parametrization: the parameter of a flat shard, gathered."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.shape, self.dtype = shape, dtype

    def forward(self, shard: Tensor) -> Tensor:
        cast = shard if self.dtype is None else shard.to(self.dtype)
        whole = _GATHER(cast, 0, dist.group.WORLD)
        return whole[: self.shape.numel()].view(self.shape)

    def right_inverse(self, whole: Tensor) -> Tensor:
        length = -(-whole.numel() // dist.get_world_size())
        flat = whole.detach().reshape(-1)
        mine = flat[dist.get_rank() * length :][:length]
        return nn.functional.pad(mine, (0, length - mine.numel())).clone()


def sharded(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """The model, each of its parameters a flat shard now."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            gathered = Gathered(parameter.shape, dtype)
            nn.utils.parametrize.register_parametrization(module, name, gathered, unsafe=True)
    return model


def layers(count: int = 3, width: int = 6) -> nn.Module:
    """Linear layers with an activation after each."""
    pairs = [(nn.Linear(width, width), nn.GELU()) for _ in range(count)]
    return nn.Sequential(*(layer for pair in pairs for layer in pair))
