"""The scripts that the page on distributed training shows, as users start them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("name", "calls"), [("train_sharded", "planned=8"), ("train_data_parallel", "planned=8")]
)
@pytest.mark.slow
def test_with_two_processes(name: str, calls: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "-m", f"examples.{name}"]
    environment = {**os.environ, "MEMOPT_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr
    assert "2 ranks, loss" in done.stdout
    assert f"{calls}, original=0" in done.stdout
