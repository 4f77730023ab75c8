"""DistributedDataParallel around a wrapped model, with two processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memopt
from tests.distributed.gloo import in_one_thread

STEPS = 4


def network() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    return nn.Sequential(*blocks, nn.Linear(16, 4))


def trained(rank: int, wrapped: bool) -> tuple[list[torch.Tensor], int]:
    model = network()
    if wrapped:
        memopt.wrap(model, "min", progress=False)
    around = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(around.parameters(), 1e-2)
    torch.manual_seed(1 + rank)
    found = []
    for step in range(STEPS):
        accumulating = step % 2 == 0
        with around.no_sync() if accumulating else torch.enable_grad():
            loss = around(torch.randn(8, 16)).square().mean()
            loss.backward()
        found.append(loss.detach())
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
    planned = model.calls.planned if wrapped else 0
    return [*found, *(p.detach() for p in model.parameters())], planned


def one_rank(rank: int, store: str, folder: str) -> None:
    torch.set_num_threads(1)
    in_one_thread()
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.save([trained(rank, False), trained(rank, True)], f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))
    given = (str(tmp_path / "store"), str(tmp_path))
    torch.multiprocessing.start_processes(one_rank, given, nprocs=2, start_method="spawn")
    ends = []
    for rank in range(2):
        (expected, _), (found, planned) = torch.load(tmp_path / f"{rank}.pt")
        assert planned == STEPS
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
        ends.append(found[STEPS:])
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
