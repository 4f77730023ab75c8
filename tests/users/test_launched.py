"""Two processes that torchrun starts, with and without memopt: bit for bit the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    launch = "-m torch.distributed.run --standalone --nproc-per-node 2 -m tests.users.launched"
    subprocess.run(
        [sys.executable, *launch.split(), str(tmp_path)],
        env={**os.environ, "MEMOPT_CACHE_DIR": str(tmp_path), "ACCELERATE_USE_CPU": "true"},
        check=True,
        timeout=300,
    )
    ends = [torch.load(tmp_path / f"{rank}.pt", weights_only=False) for rank in range(2)]
    for kind in ("trainer", "loop"):
        for end in ends:
            losses, weights, _ = end[kind, False]
            assert end[kind, True][0] == losses
            assert len(losses) == 4
            assert end[kind, True][2] == {"trainer": 8, "loop": 4}[kind]
            assert all(torch.equal(end[kind, True][1][key], weights[key]) for key in weights)
        pairs = zip(ends[0][kind, True][1].values(), ends[1][kind, True][1].values(), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs)
