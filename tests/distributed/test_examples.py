"""The scripts that the page on distributed training shows: with two processes, and as users start
them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed import processes

ROOT = Path(__file__).parents[2]


def examples(rank: int, ranks: int, ports: list[int]) -> list[str]:
    """What both print, in groups of their own, which torchrun's variables say how to form; `ports`
    of the stores."""
    from examples import train_data_parallel, train_sharded

    torch.distributed.destroy_process_group()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1"}
    # As under torchrun, whose store the ranks find.
    told["TORCHELASTIC_USE_AGENT_STORE"] = True
    os.environ.update({name: str(value) for name, value in told.items()})
    texts = []
    for run, port in zip((train_sharded.main, train_data_parallel.main), ports, strict=True):
        os.environ["MASTER_PORT"] = str(port)
        with contextlib.redirect_stdout(io.StringIO()) as text:
            run(steps=2)
        texts.append(text.getvalue())
    return texts


@pytest.mark.slow
def test_two_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEMOPT_CACHE_DIR", str(tmp_path / "cache"))
    stores = [
        torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(2)
    ]
    ports = [store.port for store in stores]
    (sharded, parallel), others = processes.results(processes.run(examples, 2, tmp_path, ports))
    # A layer's weight and bias are gathered by one.
    assert re.search(r"gathered again: [1-8] of 8 all-gathers", sharded)
    assert "2 ranks, loss" in sharded
    assert "planned=2, original=0" in sharded
    assert "planned=4, original=0" in parallel
    # Rank 0 speaks for all.
    assert others == ["", ""]


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
