"""Sharded training under a plan: each rank holds a part of every parameter, and the plan says which
are kept for the backward and which are gathered again.

torchrun --nproc-per-node 2 -m examples.train_sharded

On a cluster the same script runs with nccl, on every node:

torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400
    -m examples.train_sharded
"""

from __future__ import annotations

import os

import torch
import torch.distributed
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import memopt


def main(steps: int = 8, budget: str = "min") -> float:
    """Train on numbers that each rank draws for itself; the last loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    mesh = init_device_mesh(device, (ranks,))

    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)]
    model = nn.Sequential(nn.Linear(64, 256), *hidden, nn.Linear(256, 10)).to(device)
    memopt.shard(model, mesh)
    memopt.wrap(model, budget, progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    torch.manual_seed(rank)  # every rank has its own part of the data
    loss = torch.zeros(())
    for _ in range(steps):
        batch = torch.randn(128, 64, device=device)
        loss = nn.functional.cross_entropy(model(batch), batch[:, :10].argmax(1))
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if rank == 0:
        print(model.memopt.plans[0])
        print(f"{ranks} ranks, loss {loss.item():.3f}, norm {norm.item():.3f}; {model.calls}")
    torch.distributed.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
