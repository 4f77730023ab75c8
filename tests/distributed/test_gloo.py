"""The gloo groups that tests run in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed import all_reduce, get_rank, group

from tests.distributed import processes


def summed(_rank: int, _ranks: int) -> tuple[int, float]:
    """Threads of the default group, and the sum of the ranks over it."""
    world: Any = group.WORLD
    total = torch.tensor([float(get_rank())])
    all_reduce(total)
    return world._get_backend(torch.device("cpu")).options._threads, total.item()


def test_groups_have_one_thread(tmp_path: Path) -> None:
    assert processes.results(processes.run(summed, 2, tmp_path)) == [(1, 1.0), (1, 1.0)]
