"""DistributedDataParallel around a planned model: gradients are reduced while the backward runs.

torchrun --nproc-per-node 2 -m examples.train_data_parallel

On a cluster the same script runs with nccl, on every node:

torchrun --nnodes 8 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29400
    -m examples.train_data_parallel
"""

from __future__ import annotations

import os

import torch
import torch.distributed
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import memopt


def main(steps: int = 4, budget: str = "min") -> float:
    """Train on numbers that each rank draws for itself, two micro-batches a step; the last loss."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if device == "cuda" else "gloo")
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()

    torch.manual_seed(0)
    hidden = [nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(6)]
    planned = nn.Sequential(nn.Linear(64, 256), *hidden, nn.Linear(256, 10)).to(device)
    memopt.wrap(planned, budget, progress=False)
    model = DistributedDataParallel(planned)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    torch.manual_seed(rank)  # every rank has its own part of the data
    loss = torch.zeros(())
    for _ in range(steps):
        for last in (False, True):
            batch = torch.randn(128, 64, device=device)
            with torch.enable_grad() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(batch), batch[:, :10].argmax(1))
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        for plan in planned.memopt.plans:
            print(plan)
        print(f"{ranks} ranks, loss {loss.item():.3f}; {planned.calls}")
    # Else the group ends with the wrapper, and on gloo torch 2.13 may then wait for ever.
    del model
    torch.distributed.destroy_process_group()
    return loss.item()


if __name__ == "__main__":
    main()
